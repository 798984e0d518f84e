"""What a job's driver says of itself, as the status that a cluster shows."""

from dataclasses import replace

from pollux.cluster.base import JobStatus
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import Placement


def as_driven(status: JobStatus, state: DriverState, *, held: Placement) -> JobStatus:
    """The status with what the driver's state tells, its GPU seconds apart: they depend on the time.

    ``held`` are the GPUs of its workers, of which the cluster may know more than the driver.
    """
    return replace(
        status,
        phase=state.phase,
        incarnation=state.incarnation,
        held=held,
        acted_decision=state.acted_decision,
        since_unix_s=state.since_unix_s,
        message=state.message,
        outcome=state.outcome,
        final=state.final,
        restarts=max(0, state.incarnation - 1),
        max_gpus_seen=state.max_gpus_seen,
    )

"""From a choice of options to a decision: placements, what they are worth, and reasons."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from pollux.policy.options import Options
from pollux.policy.reasons import Facts, explain_facts
from pollux.policy.tables import Floats, Ints
from pollux.snapshot import Decision, Job, JobDecision, Snapshot


def nothing(snapshot: Snapshot, policy: str) -> Decision:
    """The decision where there is no GPU to give, or no job."""
    reason = "waits: the cluster has no GPU to give"
    return Decision(
        decision=snapshot.decision,
        policy=policy,
        objective=0.0,
        jobs={job.job_id: JobDecision(reason=reason) for job in snapshot.jobs},
    )


def answer(
    snapshot: Snapshot,
    options: Options,
    option: Ints,
    placements: Sequence[Mapping[str, int]],
    *,
    policy: str,
    objective: float,
    factor: Floats,
    state: Mapping[str, Any],
) -> Decision:
    """The decision; ``option`` (J) is -1 for none, ``factor`` (J) what a change leaves of a job's goodput."""
    present, jobs = options.present, snapshot.jobs
    after = np.array([sum(placement.values()) for placement in placements], dtype=np.int64)
    worth = np.append(options.goodput, 0.0)[option]
    goodput = np.where(after > 0, np.where(option >= 0, worth, options.now), 0.0)
    held = present.gpus > 0
    moved = np.array(
        [
            dict(placement) != (dict(job.placement) if held[row] else {})
            for row, (job, placement) in enumerate(zip(jobs, placements, strict=True))
        ],
        dtype=np.bool_,
    )
    reasons = explain_facts(
        snapshot,
        Facts(
            before=present.gpus,
            after=after,
            moved=moved,
            speedup_now=options.now / options.fair,
            speedup=goodput / options.fair,
            factor=factor,
            pinned=present.pinned,
            fitted=options.fitted,
            at_m0=options.at_m0,
            gains=[_gains(*each) for each in zip(jobs, placements, strict=True)],
            fair_gpus=options.fair_gpus,
        ),
    )
    return Decision(
        decision=snapshot.decision,
        policy=policy,
        objective=_figure(objective),
        jobs={
            job.job_id: JobDecision(
                placement=placements[row],
                reason=reasons[row].text,
                goodput=_figure(goodput[row]) if reasons[row].fitted else None,
                goodput_now=_figure(options.now[row]) if reasons[row].fitted else None,
                speedup=_figure(goodput[row] / options.fair[row]),
                restart_factor=_figure(factor[row]),
            )
            for row, job in enumerate(jobs)
        },
        state=dict(state),
    )


def _gains(job: Job, placement: Mapping[str, int]) -> dict[Hashable, int]:
    """How many GPUs more a job gets on each node where that changes."""
    more = {
        node: placement.get(node, 0) - job.placement.get(node, 0) for node in {**placement, **job.placement}
    }
    return {node: gpus for node, gpus in more.items() if gpus}


def _figure(value: float) -> float:
    """Nine digits: the last ones depend on the processor's vector instructions, and a decision does not."""
    return float(f"{value:.9g}")

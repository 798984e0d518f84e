"""What the cycle's tests are made of: a cluster in memory, a real store, and jobs with reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pollux.cluster.base import ClusterJob, JobIdentity
from pollux.cluster.memory import MemoryCluster
from pollux.cycle import CycleResult, run_once
from pollux.record import Records
from pollux.settings import Settings
from pollux.snapshot import Job, Node
from pollux.store import ModelStore
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import REPORT_TAG, JobSpec, Report, encode

START_UNIX_S = 1_700_000_000.0
FIT = ThroughputParams(
    alpha_grad=0.02,
    beta_grad=0.004,
    alpha_sync_local=0.01,
    beta_sync_local=0.001,
    alpha_sync_node=0.03,
    beta_sync_node=0.002,
    gamma=1.5,
)


def a_spec(name: str = "digits", *, max_gpus: int = 4) -> JobSpec:
    return JobSpec(
        name=name,
        script="digits.py",
        initial_batch_size=32,
        max_batch_size=1024,
        max_local_batch_size=128,
        max_gpus=max_gpus,
    )


def an_identity(job_id: str, deployment: str = "airflow") -> JobIdentity:
    return JobIdentity(deployment=deployment, dag_id="train", run_id=job_id, task_id="train")


def a_report(
    job_id: str, *, sequence: int = 1, time_unix_s: float = START_UNIX_S, **fields: object
) -> Report:
    plain: dict[str, object] = {
        "job_id": job_id,
        "incarnation": 1,
        "sequence": sequence,
        "time_unix_s": time_unix_s,
        "fits": {"gpu": FIT},
        "noise_scale": 400.0,
        "initial_batch_size": 32,
        "max_batch_size": 1024,
        "max_local_batch_size": 128,
        "max_gpus_seen": 2,
        "progress": 100.0,
        "goodput": 900.0,
    }
    return Report(**(plain | fields))  # type: ignore[arg-type]


@dataclass
class World:
    """A cluster of two nodes with two GPUs each, the store, and a clock that only tests move."""

    uri: str
    store: ModelStore
    settings: Settings
    records: Records
    lag: int = 0
    now: float = START_UNIX_S
    cluster: MemoryCluster = field(init=False)

    def __post_init__(self) -> None:
        nodes = (Node(name="node-0", gpus=2), Node(name="node-1", gpus=2))
        self.cluster = MemoryCluster(nodes, lag=self.lag, clock=lambda: self.now)

    def submit(self, *job_ids: str, deployment: str = "airflow", max_gpus: int = 4) -> None:
        for job_id in job_ids:
            self.cluster.submit(
                job_id,
                identity=an_identity(job_id, deployment),
                spec=a_spec(job_id, max_gpus=max_gpus),
                run_id=None,
            )
            self.now += 1

    def report(self, *job_ids: str, **fields: object) -> None:
        """Store a report as the agent of each job would."""
        from mlflow import MlflowClient

        for job_id in job_ids:
            run_id = self.cluster.job(job_id).mlflow_run_id
            text = encode(a_report(job_id, time_unix_s=self.now, **fields))
            MlflowClient(self.uri).set_tag(run_id, REPORT_TAG, text)

    def cycle(self, holder: str = "minute", *, settings: Settings | None = None) -> CycleResult:
        self.now += 60
        return run_once(
            self.cluster,
            self.store,
            settings or self.settings,
            now=self.now,
            holder=holder,
            records=self.records,
        )

    def job(self, job_id: str) -> ClusterJob:
        return self.cluster.job(job_id)

    def settle(self) -> None:
        """Let the workers catch up with their allocations."""
        for _ in range(4 * self.cluster.lag + 4):
            self.cluster.observe()

    def placements(self, job_ids: Sequence[str]) -> dict[str, dict[str, int]]:
        return {job_id: dict(self.job(job_id).allocation.placement) for job_id in job_ids}

    def watch(self, before: Callable[[str], None] = lambda method: None) -> None:
        """Check after every call of anybody that no GPU is given or held twice; ``before`` each, do that."""
        self.cluster.before = before
        self.cluster.after = lambda method: self._check()

    def _check(self) -> None:
        jobs = self.cluster.jobs
        for name in ("node-0", "node-1"):
            used = [
                max(
                    job.status.held.get(name, 0),
                    0 if job.status.stop else job.allocation.placement.get(name, 0),
                )
                for job in jobs
            ]
            assert sum(used) <= 2, f"{name} is given twice: {jobs}"


class OneGpuIsEnough:
    """A goodput estimator."""

    def goodput(self, job: Job, gpu_type: str, num_nodes: object, num_replicas: np.ndarray) -> np.ndarray:
        return np.full(num_replicas.shape, 5.0)


def decision_folder(settings: Settings, number: int) -> Path:
    return settings.decisions / str(number)

"""A simulation that also writes down what each job did, round by round."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from pollux.simulate.engine import Outcome, Progress, Round, Simulation
from pollux.simulate.fields import Count, Figure, check_columns
from pollux.simulate.job import TUNED, SimulatedJob
from pollux.simulate.runner import Run
from pollux.simulate.setup import ClusterSetup, RunSettings
from pollux.traces import Application, Workload, read_application
from pollux_agent.protocol import DOCUMENT_CONFIG


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Course:
    """One job over time: GPUs, total batch size, statistical efficiency, and active jobs of the cluster."""

    name: str
    application: str
    time_s: Annotated[tuple[Figure, ...], Field(min_length=1)]
    gpus: tuple[Count, ...]
    batch_size: tuple[Count, ...]
    efficiency: tuple[Figure, ...]
    active: tuple[Count, ...]

    @model_validator(mode="after")
    def _check(self) -> "Course":
        check_columns(self.time_s, self.gpus, self.batch_size, self.efficiency, self.active)
        return self


class FollowedSimulation(Simulation):
    """As its parent, and :meth:`course` afterwards."""

    def __init__(
        self,
        workload: Workload,
        apps: Mapping[str, Application],
        cluster: ClusterSetup,
        settings: RunSettings,
    ) -> None:
        super().__init__(workload, apps, cluster, settings)
        self._seen: dict[str, list[tuple[float, int, int, float, int]]] = {}

    def _cycle(self, number: int, now_s: float, outcome: Outcome) -> Round:
        done = super()._cycle(number, now_s, outcome)
        for name, job in self._active.items():
            batch = job.replicas * job.local_bsz * (job.accumulation + 1) if job.placement else 0
            useful = job.efficiency if job.placement else 0.0
            self._seen.setdefault(name, []).append((now_s, job.gpus, batch, useful, len(self._active)))
        return done

    def course(self, job: SimulatedJob) -> Course:
        """What a job did."""
        time_s, gpus, batch, efficiency, active = zip(*self._seen[job.request.name], strict=True)
        return Course(
            name=job.request.name,
            application=job.app.name,
            time_s=time_s,
            gpus=gpus,
            batch_size=batch,
            efficiency=efficiency,
            active=active,
        )


def follow(
    run: Run, job: str | None = None, progress: Progress = lambda done: None
) -> tuple[Outcome, Course]:
    """Simulate, and follow the job of that name, else the one that adapts and took the most GPU time.

    Raises TraceError, and what a policy raises.
    """
    types = frozenset(run.cluster.gpus_of)
    names = dict.fromkeys(request.application for request in run.workload.requests)
    apps = {name: read_application(run.traces, name, types) for name in names}
    followed = FollowedSimulation(run.workload, apps, run.cluster, run.settings)
    outcome = followed.run(progress)
    named = [each for each in outcome.jobs if each.request.name == job]
    tuned = [each for each in outcome.jobs if each.kind in TUNED]
    return outcome, followed.course(max(named or tuned or outcome.jobs, key=lambda each: each.attained_gpu_s))

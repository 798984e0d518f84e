"""``pollux bench resize``: what a change of a running job's GPUs costs, from the patch to the first new step.

One training is given one node, two nodes, one node and so on by hand, as a cycle would; its driver's and its
workers' events tell the phases. All clocks have to agree, which they do on one machine.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Protocol, TypeVar

from pollux.cluster.base import FINAL_PHASES, Cluster, ClusterJob, JobControl, JobIdentity
from pollux.cluster.k8s import KubeCluster, kube_settings
from pollux.demo.jobs import DIGITS, DemoPlan
from pollux.demo.kube import KubeChoice, kube_site
from pollux.demo.timing import local_service
from pollux.errors import PolluxError, UnknownJob
from pollux_agent.driver.kube.api import open_api
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, DriverEvent, Event, JobFolder, Placement, decode
from pollux_agent.records import read_regular

PHASES = ("signal", "save", "deletion", "start", "load", "first_step")
"""From the patch to the driver's signal, to the checkpoint, to the start of the new workers once the old ones
are gone, to the new rank 0's first word, to the end of its restore, to the end of its first step."""

T = TypeVar("T")
_JOB_ID = "resize-bench"
_EPOCHS = 1_000_000
_SETTLED_STEPS = 4
"""Step events, at most one a second, before the next change."""
_PATIENCE_S = 180.0
_POLL_S = 0.1
_LEASE = timedelta(seconds=30)

Say = Callable[[str], None]


class Both(Cluster, JobControl, Protocol):
    """A cluster seen as scheduler and operator see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """One change; ``phases_s`` in the order of PHASES."""

    gpus_before: int
    gpus_after: int
    phases_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return sum(self.phases_s)


def medians(resizes: Sequence[Resize]) -> dict[str, float]:
    """Median seconds by phase, and ``total``, the median of the sums."""
    columns = zip(*(resize.phases_s for resize in resizes), strict=True)
    by_phase = {name: round(median(column), 3) for name, column in zip(PHASES, columns, strict=True)}
    return {**by_phase, "total": round(median(resize.total_s for resize in resizes), 3)}


def resizes_on_local(plan: DemoPlan, *, state: Path, scripts: Path, rounds: int, say: Say) -> list[Resize]:
    """On a local cluster of its own, whose default nodes have room for two."""
    with local_service(state, scripts=scripts, slot_cap=plan.slot_cap) as cluster:
        return _Bench(cluster, state / "jobs", say).run(rounds)


def resizes_on_kubernetes(
    plan: DemoPlan, choice: KubeChoice, *, state: Path, scripts: Path, rounds: int, say: Say
) -> list[Resize]:
    """On the chosen cluster, by the rights that the chart gives Airflow."""
    with kube_site(plan, choice, state=state, examples=scripts) as site:
        kube = kube_settings(site.settings)
        template = kube.pod_template
        cluster = KubeCluster(
            open_api(kube.config),
            kube,
            namespace=kube.namespace,
            user_pod=lambda: json.loads(template.read_text()) if template else {},
        )
        return _Bench(cluster, state / "jobs", say).run(rounds)


class _Bench:
    """Drives one job by hand."""

    def __init__(self, cluster: Both, jobs: Path, say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._folder = JobFolder(jobs / _JOB_ID)

    def run(self, rounds: int) -> list[Resize]:
        """A growth and a shrinking each round; raises PolluxError where the training does not go on."""
        first, second = (node.name for node in self._cluster.observe().nodes[:2])
        one, two = {first: 1}, {first: 1, second: 1}
        found: list[Resize] = []
        with self._job():
            _, _, incarnation = self._give(one)
            for before, after in [(one, two), (two, one)] * rounds:
                patched_unix_s, number, began = self._give(after)
                phases = phases_of(self._folder, patched_unix_s, before=incarnation, after=began)
                incarnation = began
                resize = Resize(gpus_before=len(before), gpus_after=len(after), phases_s=phases)
                self._say(f"decision {number}: {len(before)} -> {len(after)} GPUs in {resize.total_s:.2f} s")
                found.append(resize)
        return found

    @contextmanager
    def _job(self) -> Iterator[None]:
        identity = JobIdentity(deployment="airflow", dag_id="bench", run_id="resize", task_id="train")
        spec = DIGITS.spec(epochs=_EPOCHS, max_gpus=2)
        self._cluster.submit(_JOB_ID, identity=identity, spec=spec, run_id=None)
        try:
            yield
        finally:
            with suppress(UnknownJob):
                self._cluster.stop(_JOB_ID, "failed")
                self._await(lambda job: job.status.phase in FINAL_PHASES, "it ends")

    def _give(self, placement: Placement) -> tuple[float, int, int]:
        """Patch, and wait until it trains there: Unix seconds of the patch, its number, the incarnation."""
        with self._cluster.lease("bench", _LEASE):
            number = self._cluster.next_decision()
            (job,) = (job for job in self._cluster.observe().jobs if job.job_id == _JOB_ID)
            allocation = Allocation(decision=number, placement=placement, gpu_type="gpu", reason="bench")
            patched_unix_s = time.time()
            self._cluster.patch_allocation(_JOB_ID, expected=job.allocation.decision, allocation=allocation)

        def settled(job: ClusterJob) -> bool:
            if job.status.phase in FINAL_PHASES:
                raise PolluxError(f"the training ended: {job.status.message}")
            steps = [event for event in self._events(job.status.incarnation) if event.event == "step"]
            return dict(job.status.held) == dict(placement) and len(steps) >= _SETTLED_STEPS

        job = self._await(settled, f"it trains on {', '.join(placement)}")
        return patched_unix_s, number, job.status.incarnation

    def _await(self, holds: Callable[[ClusterJob], bool], what: str) -> ClusterJob:
        until_s = time.monotonic() + _PATIENCE_S
        while not holds(job := self._cluster.job(_JOB_ID)):
            if time.monotonic() > until_s:
                raise PolluxError(f"{what}: not within {_PATIENCE_S:.0f} s; the job is {job.status}")
            time.sleep(_POLL_S)
        return job

    def _events(self, incarnation: int) -> list[Event]:
        return _lines(self._folder.events(incarnation, 0), Event)


def phases_of(folder: JobFolder, patched_unix_s: float, *, before: int, after: int) -> tuple[float, ...]:
    """Seconds of each phase between two incarnations that follow each other; raises PolluxError where a
    moment is missing."""
    driver = _lines(folder.driver_events, DriverEvent)
    old, new = (_lines(folder.events(incarnation, 0), Event) for incarnation in (before, after))
    told = {(event.event, event.incarnation): event.t_unix_s for event in driver}
    moments = {
        "signal": told.get(("signal", before)),
        "save": next((event.t_unix_s for event in reversed(old) if event.event == "checkpoint"), None),
        "deletion": told.get(("start", after)),
        **{
            phase: next((event.t_unix_s for event in new if event.event == name), None)
            for phase, name in (("start", "start"), ("load", "resume"), ("first_step", "step"))
        },
    }
    phases, last = [], patched_unix_s
    for name in PHASES:
        moment = moments[name]
        if moment is None:
            raise PolluxError(f"incarnation {before} to {after}: no event tells when {name} was over")
        phases.append(moment - last)
        last = moment
    return tuple(phases)


def _lines(path: Path, kind: type[T]) -> list[T]:
    """The whole lines of a file of events; none while it is not there."""
    try:
        parts = read_regular(path).split(b"\n")[:-1]
        return [decode(kind, part) for part in parts]
    except FileNotFoundError:
        return []
    except DocumentError as error:
        raise PolluxError(f"{path}: {error}") from None

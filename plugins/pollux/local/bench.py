"""``pollux local bench``: are slots worth something, and are they kept apart?

On a service of its own a training runs on one slot for some seconds, and then on all four until it has made
the same progress, each with its batch size tuned as it goes. Then one with a fixed batch runs on one slot
alone, beside a neighbour, and alone again.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean

from pollux.cluster.base import FINAL_PHASES, JobIdentity
from pollux.cluster.local import LocalCluster
from pollux.errors import ClusterError, ClusterUnavailable
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, Event, JobFolder, JobKind, JobSpec, Placement, decode

MIN_SPEEDUP = 1.5
MAX_SLOWDOWN = 0.15
_POLL_S = 0.2
_START_TIMEOUT_S = 180.0
_ONE: Placement = {"node-0": 1}
_ALL: Placement = {"node-0": 2, "node-1": 2}
_MANY_EPOCHS = "100000"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Seconds from the first step to the same ``progress``, and samples per second of a fixed batch."""

    progress: float
    one_slot_s: float
    four_slots_s: float
    alone_samples_per_s: tuple[float, float]
    with_neighbour_samples_per_s: float

    @property
    def speedup(self) -> float:
        return self.one_slot_s / self.four_slots_s

    @property
    def slowdown(self) -> float:
        """Share of its speed that a job loses to a neighbour; alone is the mean of before and after."""
        return 1 - self.with_neighbour_samples_per_s / fmean(self.alone_samples_per_s)

    @property
    def ok(self) -> bool:
        return self.speedup >= MIN_SPEEDUP and self.slowdown <= MAX_SLOWDOWN


def bench(
    *, script: Path, seconds: float, slot_cap: float, follow: Callable[[str, float], None]
) -> BenchResult:
    """Measure with runs of about ``seconds``; ``follow`` hears what is going on and the share that is done.

    Raises ClusterError if the service or a training does not start, or four slots are slower than one.
    """
    with tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder:
        state = Path(folder)
        with _service(state, slot_cap) as cluster:
            run = _Bench(cluster, state, script, seconds, follow)
            run.start("one-slot", _ONE, "adaptive")
            one = run.steps_after("one-slot", 2 * seconds)
            run.end("one-slot")
            run.start("four-slots", _ALL, "adaptive")
            four = run.steps_after("four-slots", 3 * seconds, until_progress=one[-1].progress)
            run.end("four-slots")
            run.start("measured", _ONE, "strong_scaling")
            before = run.samples_per_s("measured")
            run.start("neighbour", _ONE, "strong_scaling")
            beside = run.samples_per_s("measured")
            run.end("neighbour")
            after = run.samples_per_s("measured")
    return BenchResult(
        progress=one[-1].progress,
        one_slot_s=one[-1].t_unix_s - one[0].t_unix_s,
        four_slots_s=four[-1].t_unix_s - four[0].t_unix_s,
        alone_samples_per_s=(before, after),
        with_neighbour_samples_per_s=beside,
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    cluster: LocalCluster
    state: Path
    script: Path
    seconds: float
    follow: Callable[[str, float], None]

    def start(self, name: str, placement: Placement, kind: JobKind) -> None:
        """Start the training and wait for its first step."""
        spec = JobSpec(
            name=name,
            script=str(self.script),
            arguments=("--epochs", _MANY_EPOCHS),
            kind=kind,
            initial_batch_size=32,
            max_local_batch_size=256,
            max_gpus=4,
        )
        identity = JobIdentity(deployment="bench", dag_id="bench", run_id=name, task_id="bench")
        self.cluster.submit(name, identity=identity, spec=spec, run_id=None)
        number = self.cluster.next_decision()
        allocation = Allocation(decision=number, placement=placement, reason="bench")
        self.cluster.patch_allocation(name, expected=0, allocation=allocation)
        begin = time.monotonic()
        while not self._steps(name):
            status = self.cluster.job(name).status
            if status.phase in FINAL_PHASES or time.monotonic() - begin > _START_TIMEOUT_S:
                raise ClusterError(f"the training did not start: {status.message}")
            self.follow(f"{name}: starts", 0.0)
            time.sleep(_POLL_S)

    def steps_after(self, name: str, seconds: float, until_progress: float = inf) -> list[Event]:
        """All steps of rank 0, so many seconds from now or as soon as that progress is reached.

        Raises ClusterError where the progress is not reached in time.
        """
        begin_unix_s = time.time()
        while (steps := self._steps(name))[-1].progress < until_progress:
            passed_s = time.time() - begin_unix_s
            if passed_s > seconds:
                if until_progress < inf:
                    raise ClusterError(f"{name}: in {seconds:.0f} s it made less progress than one slot")
                break
            self.follow(f"{name}: measures", min(1.0, passed_s / seconds))
            time.sleep(_POLL_S)
        steps = [step for step in steps if step.progress <= until_progress or step is steps[-1]]
        if len(steps) < 2:
            raise ClusterError(f"{name}: too few steps in the time given; measure for longer with --seconds")
        return steps

    def samples_per_s(self, name: str) -> float:
        """Samples a second of a job with a fixed batch, over the seconds to come."""
        begin_unix_s = time.time()
        steps = [s for s in self.steps_after(name, self.seconds) if s.t_unix_s >= begin_unix_s]
        samples = sum((after.step - before.step) * after.batch_size for before, after in pairwise(steps))
        if not samples:
            raise ClusterError(f"{name}: too few steps in the time given; measure for longer with --seconds")
        return samples / (steps[-1].t_unix_s - steps[0].t_unix_s)

    def end(self, name: str) -> None:
        """Stop the training and wait until its slots are free."""
        self.cluster.stop(name, "failed")
        while name in self.cluster.held():
            time.sleep(_POLL_S)

    def _steps(self, name: str) -> list[Event]:
        path = JobFolder(self.state / "jobs" / name).events(1, 0)
        events = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                events.append(decode(Event, line))
            except DocumentError:
                continue
        return [event for event in events if event.event == "step"]


@contextmanager
def _service(state: Path, slot_cap: float) -> Iterator[LocalCluster]:
    ends_with_us = f"from pollux_agent.lifeline import die_with_parent; die_with_parent({os.getpid()}); "
    command = (
        *(sys.executable, "-c", ends_with_us + "from pollux.cli import app; app()", "local", "serve"),
        *("--state", str(state), "--slot-cap", str(slot_cap), "--grace", "5"),
        *("--report-interval", "10"),
    )
    with (state / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    cluster = LocalCluster(state / "local.sock")
    try:
        _until_it_answers(cluster, process, state)
        yield cluster
    finally:
        process.terminate()
        process.wait()


def _until_it_answers(cluster: LocalCluster, process: "subprocess.Popen[bytes]", state: Path) -> None:
    while True:
        try:
            cluster.health()
        except ClusterUnavailable:
            if process.poll() is not None:
                raise ClusterError((state / "serve.log").read_text()[-2000:]) from None
            time.sleep(0.1)
        else:
            return

"""``pollux local bench``: are slots worth something, and are they kept apart?

Three runs of the same training on a service of its own: on one slot, on all four, and on one slot while a
neighbour trains beside it.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pollux.cluster.base import FINAL_PHASES, JobIdentity
from pollux.cluster.local import LocalCluster
from pollux.errors import ClusterError, ClusterUnavailable
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, Event, JobFolder, JobSpec, Placement, decode

MIN_SPEEDUP = 1.5
MAX_SLOWDOWN = 0.15
_WARM_UP_S = 5.0
_START_TIMEOUT_S = 180.0
_ONE: Placement = {"node-0": 1}
_ALL: Placement = {"node-0": 2, "node-1": 2}
_MANY_EPOCHS = "100000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast one run went, from its rank 0's events after a warm-up."""

    progress_per_s: float
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """``speedup`` compares progress on four slots with one; ``slowdown`` samples beside a neighbour."""

    one: Rates
    four: Rates
    with_neighbour: Rates

    @property
    def speedup(self) -> float:
        return self.four.progress_per_s / self.one.progress_per_s

    @property
    def slowdown(self) -> float:
        return 1 - self.with_neighbour.samples_per_s / self.one.samples_per_s

    @property
    def ok(self) -> bool:
        return self.speedup >= MIN_SPEEDUP and self.slowdown <= MAX_SLOWDOWN


def bench(
    *, script: Path, seconds: float, slot_cap: float, follow: Callable[[str, float], None]
) -> BenchResult:
    """Measure each run for ``seconds``; ``follow`` hears what is going on and the share of it that is done.

    Raises ClusterError if the service or a training does not start.
    """
    with tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder:
        state = Path(folder)
        with _service(state, slot_cap) as cluster:
            run = _Bench(cluster, state, script, seconds, follow)
            one = run.measure("one-slot", _ONE)
            four = run.measure("four-slots", _ALL)
            run.start("neighbour", _ONE)
            return BenchResult(one=one, four=four, with_neighbour=run.measure("beside-neighbour", _ONE))


@dataclass(frozen=True, slots=True)
class _Bench:
    cluster: LocalCluster
    state: Path
    script: Path
    seconds: float
    follow: Callable[[str, float], None]

    def start(self, name: str, placement: Placement) -> float:
        """Start the training and wait for its first step; when that was."""
        spec = JobSpec(
            name=name,
            script=str(self.script),
            arguments=("--epochs", _MANY_EPOCHS),
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
        while not (steps := self._steps(name)):
            status = self.cluster.job(name).status
            waited_s = time.monotonic() - begin
            if status.phase in FINAL_PHASES or waited_s > _START_TIMEOUT_S:
                raise ClusterError(f"the training did not start: {status.message}")
            self.follow(f"{name}: starts", 0.0)
            time.sleep(0.2)
        return steps[0].t_unix_s

    def measure(self, name: str, placement: Placement) -> Rates:
        begin_unix_s = self.start(name, placement) + _WARM_UP_S
        end_unix_s = begin_unix_s + self.seconds
        while (now := time.time()) < end_unix_s:
            share = 1 - (end_unix_s - now) / (self.seconds + _WARM_UP_S)
            self.follow(f"{name}: measures", min(1.0, max(0.0, share)))
            time.sleep(0.2)
        steps = [step for step in self._steps(name) if begin_unix_s <= step.t_unix_s <= end_unix_s]
        self.cluster.stop(name, "failed")
        while name in self.cluster.held():
            time.sleep(0.1)
        return _rates(name, steps)

    def _steps(self, name: str) -> list[Event]:
        path = JobFolder(self.state / "jobs" / name).events(1, 0)
        events = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                events.append(decode(Event, line))
            except DocumentError:
                continue
        return [event for event in events if event.event == "step"]


def _rates(name: str, steps: list[Event]) -> Rates:
    if len(steps) < 2:
        raise ClusterError(f"{name}: too few steps in the time given; measure for longer with --seconds")
    seconds = steps[-1].t_unix_s - steps[0].t_unix_s
    samples = sum((after.step - before.step) * after.batch_size for before, after in pairwise(steps))
    progress = steps[-1].progress - steps[0].progress
    return Rates(progress_per_s=progress / seconds, samples_per_s=samples / seconds)


@contextmanager
def _service(state: Path, slot_cap: float) -> Iterator[LocalCluster]:
    command = (
        *(sys.executable, "-c", "from pollux.cli import app; app()", "local", "serve"),
        *("--state", str(state), "--slot-cap", str(slot_cap), "--grace", "5"),
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

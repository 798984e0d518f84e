"""Times the training scripts for some seconds each, on one slot of a local cluster of its own."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pollux.cluster.base import FINAL_PHASES, ClusterJob, JobIdentity
from pollux.cluster.local import LocalCluster
from pollux.demo.follow import POLL_S, Watchdog
from pollux.demo.jobs import DemoJob, DemoPlan
from pollux.demo.sizing import Timing, stepping_seconds, timing_from
from pollux.errors import ClusterUnavailable, DemoError
from pollux.stack import tether
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, Event, JobFolder, decode

ENOUGH_S = 6.0
"""Seconds of steps that tell a speed; a script that was done sooner is timed again with more epochs."""
WANTED_S = 10.0
_STOP_S = 20.0


def time_scripts(plan: DemoPlan, *, scripts: Path, say: Callable[[str], None]) -> Mapping[str, Timing]:
    """The timing of each script of the plan; they run at the same time, as they will in the demo.

    Raises DemoError with the end of a script's output when it does not run.
    """
    jobs = {job.script: job for job in reversed(plan.jobs)}
    with TemporaryDirectory(prefix="pollux-timing-") as name:
        state = Path(name)
        with local_service(state, scripts=scripts, slot_cap=plan.slot_cap) as cluster:
            nodes = [node.name for node in cluster.observe().nodes]
            trials = {
                script: _Trial(cluster=cluster, state=state, job=job, node=nodes[number % len(nodes)])
                for number, (script, job) in enumerate(jobs.items())
            }
            watchdog = Watchdog("timing the training scripts", stall_s=plan.stall_s, where=state)
            while waiting := [trial for trial in trials.values() if trial.timing is None]:
                for trial in waiting:
                    trial.look()
                    if trial.timing is not None:
                        say(trial.words())
                watchdog.feed(tuple(len(trial.events()) for trial in trials.values()), time.monotonic())
                time.sleep(POLL_S / 4)
    return {script: trial.timing for script, trial in trials.items() if trial.timing is not None}


@contextmanager
def local_service(state: Path, *, scripts: Path, slot_cap: float) -> Iterator[LocalCluster]:
    """A local cluster for the time of the block; it ends with this process at the latest."""
    command = [sys.executable, "-IS", tether.__file__, str(os.getpid())]
    command += [str(Path(sys.executable).with_name("pollux")), "local", "serve", "--state", str(state)]
    command += ["--scripts", str(scripts), "--slot-cap", str(slot_cap)]
    log = state / "local.log"
    with log.open("wb") as output:
        service = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        cluster = LocalCluster(state / "local.sock")
        while not _answers(cluster):
            if service.poll() is not None:
                raise DemoError(
                    f"the local cluster did not start:\n{log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(POLL_S / 4)
        yield cluster
    finally:
        service.terminate()
        try:
            service.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


@dataclass(slots=True, kw_only=True)
class _Trial:
    """Trains one script for an epoch on one slot, and again with more epochs if that was too quick."""

    cluster: LocalCluster
    state: Path
    job: DemoJob
    node: str
    epochs: int = 1
    attempt: int = 0
    timing: Timing | None = None

    def look(self) -> None:
        """Start what is to be started, and read what is done."""
        if self.attempt == 0:
            self._start()
            return
        found = self.cluster.job(self._job_id)
        if found.status.phase not in FINAL_PHASES:
            return
        if found.status.phase != "done":
            raise DemoError(f"{self.job.script} does not run:\n{self._why(found)}")
        events = self.events()
        seconds = stepping_seconds(events)
        if seconds < ENOUGH_S and self.attempt < 3:
            self.epochs = math.ceil(self.epochs * WANTED_S / max(seconds, 0.1))
            self._start()
            return
        try:
            self.timing = timing_from(events, epochs=self.epochs)
        except ValueError as error:
            raise DemoError(f"{self.job.script} cannot be timed: {error}") from None

    def events(self) -> list[Event]:
        """Rank 0's events so far."""
        path = JobFolder(self.state / "jobs" / self._job_id).events(1, 0)
        if not path.exists():
            return []
        try:
            return [decode(Event, line) for line in path.read_bytes().split(b"\n")[:-1]]
        except DocumentError as error:
            raise DemoError(f"{path}: {error}") from None

    def words(self) -> str:
        timing = self.timing
        if timing is None:
            return ""
        epoch_s = timing.epoch_progress / timing.progress_per_s
        return f"{self.job.script}: {epoch_s:.2f} s an epoch on one slot, {timing.start_s:.1f} s to start"

    @property
    def _job_id(self) -> str:
        return f"timing-{self.job.name}-{self.attempt}"

    def _start(self) -> None:
        self.attempt += 1
        identity = JobIdentity(
            deployment="demo", dag_id="timing", run_id=f"{self.job.name}-{self.attempt}", task_id="train"
        )
        self.cluster.submit(
            self._job_id, identity=identity, spec=self.job.spec(epochs=self.epochs, max_gpus=1), run_id=None
        )
        allocation = Allocation(
            decision=self.cluster.next_decision(), placement={self.node: 1}, reason="timing"
        )
        self.cluster.patch_allocation(self._job_id, expected=0, allocation=allocation)

    def _why(self, found: ClusterJob) -> str:
        outcome = found.status.outcome
        return outcome.traceback if outcome and outcome.traceback else found.status.message


def _answers(cluster: LocalCluster) -> bool:
    try:
        cluster.health()
    except ClusterUnavailable:
        return False
    return True

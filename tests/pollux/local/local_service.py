"""A real service with real workers that train nothing: they count steps, which needs no model and no time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil

from pollux.cluster.base import ClusterJob, JobIdentity, Phase
from pollux.cluster.local import LocalCluster
from pollux.errors import ClusterUnavailable
from pollux_agent.protocol import Allocation, DriverEvent, Event, JobFolder, JobSpec, decode

T = TypeVar("T")

COUNT = '''
"""Counts to the number given, a step each 50 ms, and goes on from where it was stopped."""
import os, pathlib, signal, sys, time
from pollux_agent.protocol import Event, Outcome
from pollux_agent.records import append_line, write_atomic, write_completion, write_outcome
from pollux_agent.settings import worker_settings

settings, rank, last = worker_settings(), int(os.environ["RANK"]), int(sys.argv[1])
saved = settings.folder.checkpoints / "step"
step = first = int(saved.read_text()) if saved.exists() else 0
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))

def note(event):
    slot = settings.slots[int(os.environ["LOCAL_RANK"])]
    append_line(settings.folder.events(settings.incarnation, rank), Event(
        t_unix_s=time.time(), event=event, node=settings.node, slots=(slot,),
        step=step, progress=float(step), batch_size=8))

def end(kind):
    if rank == 0:
        write_atomic(saved, str(step).encode())
    outcome = Outcome(kind=kind, job_id=settings.job_id, incarnation=settings.incarnation, rank=rank,
        time_unix_s=time.time(), step=step, steps_taken=step - first, progress=float(step))
    write_outcome(settings.folder, outcome)
    if kind == "done" and rank == 0:
        write_completion(settings.folder, outcome)
    note("done" if kind == "done" else "stop")
    sys.exit(0)

note("start")
print("counts on from", step, flush=True)
while step < last:
    if stopping:
        end("interrupted")
    time.sleep(0.05)
    step += 1
    note("step")
    if rank == 0 and step % 10 == 0:
        write_atomic(saved, str(step).encode())
end("done")
'''


def awaited(look: Callable[[], T], wanted: Callable[[T], bool] = bool, timeout_s: float = 90.0) -> T:
    """Look until what is seen is as wanted."""
    until_s = time.monotonic() + timeout_s
    while not wanted(seen := look()):
        assert time.monotonic() < until_s, f"did not come about; last seen: {seen}"
        time.sleep(0.05)
    return seen


def identity(job_id: str) -> JobIdentity:
    return JobIdentity(deployment="test", dag_id="train", run_id=job_id, task_id="train")


@dataclass
class Service:
    """``pollux local serve`` on a state folder, and what tests do with it."""

    state: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(self.state / "local.sock", timeout=timedelta(seconds=30))

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("pollux")),
            "local",
            "serve",
            "--state",
            str(self.state),
        ]
        with (self.state / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--scripts", str(self.state), *self.options],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        awaited(self._answers)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def processes(self) -> list[psutil.Process]:
        """The launchers and workers of now."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        return [process for process in self.processes() if _name(process) == "pollux-worker"]

    def script(self, name: str, text: str) -> str:
        (self.state / name).write_text(text)
        return name

    def submit(
        self,
        job_id: str,
        script: str,
        *arguments: str,
        max_gpus: int = 4,
        fresh: bool = False,
        run_id: str | None = None,
    ) -> ClusterJob:
        spec = JobSpec(
            name=job_id,
            script=script,
            arguments=arguments,
            initial_batch_size=8,
            max_local_batch_size=8,
            max_gpus=max_gpus,
        )
        return self.cluster.submit(job_id, identity=identity(job_id), spec=spec, run_id=run_id, fresh=fresh)

    def give(self, job_id: str, placement: dict[str, int]) -> None:
        self.cluster.patch_allocation(
            job_id,
            expected=self.cluster.job(job_id).allocation.decision,
            allocation=Allocation(decision=self.cluster.next_decision(), placement=placement),
        )

    def until(self, job_id: str, *phases: Phase, timeout_s: float = 90.0) -> ClusterJob:
        return awaited(
            lambda: self.cluster.job(job_id), lambda job: job.status.phase in phases, timeout_s=timeout_s
        )

    def folder(self, job_id: str) -> JobFolder:
        return JobFolder(self.state / "jobs" / job_id)

    def driver_events(self, job_id: str) -> list[DriverEvent]:
        lines = self.folder(job_id).driver_events.read_text().splitlines()
        return [decode(DriverEvent, line) for line in lines]

    def events(self, job_id: str, rank: int | str = 0) -> list[Event]:
        """Events of one rank (``*``: all) in all incarnations, in order of time."""
        lines = [
            line
            for path in self.folder(job_id).root.glob(f"events-*-{rank}.jsonl")
            for line in path.read_text().splitlines()
        ]
        return sorted((decode(Event, line) for line in lines), key=lambda event: event.t_unix_s)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.state / "serve.log").read_text()
        try:
            return bool(self.cluster.health())
        except ClusterUnavailable:
            return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)

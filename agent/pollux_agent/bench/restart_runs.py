"""Starts, stops and restarts the digits example as a driver does, and a bare torchrun beside it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pollux_agent.driver.quota import available_cores, open_cgroups
from pollux_agent.driver.quota import slot_share as cores_of_slot
from pollux_agent.errors import DocumentError, PolluxAgentError
from pollux_agent.protocol import Event, JobFolder, JobSpec, decode, encode
from pollux_agent.settings import WorkerSettings, environment

BARE = Path(__file__).with_name("restart_bare.py")
_TIMEOUT_S = 180.0
_RESERVE_CORES = 0.2
"""What a local cluster leaves to everything else."""
_SETTLE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """Seconds of one restart: from the signal to the first new step, of which the save took ``save_s``."""

    restart_s: float
    save_s: float

    @property
    def counted_s(self) -> float:
        return self.restart_s - self.save_s


@contextmanager
def quota(num_ranks: int, slot_share: float | None) -> Iterator[tuple[Path | None, float]]:
    """The file by which processes enter the CPU quota of that many slots, and its cores; else None and 0."""
    groups = open_cgroups(f"pollux-bench-{os.getpid()}")
    if groups is None:
        yield None, 0.0
        return
    share = slot_share or cores_of_slot(
        num_slots=num_ranks, cap=1.0, reserve=_RESERVE_CORES, num_cores=available_cores()
    )
    try:
        yield groups.create("slots", share * num_ranks).members, share * num_ranks
    finally:
        groups.close()


def restart(example: Path, num_ranks: int, members: Path | None = None) -> Restarted:
    """Train a little, ask for a stop, start again, and wait for the first new step."""
    with tempfile.TemporaryDirectory(prefix="pollux-restart-") as scratch:
        folder = JobFolder(Path(scratch) / "job")
        folder.root.mkdir()
        spec = JobSpec(
            name="restart",
            script=str(example),
            kind="strong_scaling",
            initial_batch_size=32,
            max_local_batch_size=32,
            max_gpus=num_ranks,
            epochs=10_000,
        )
        folder.spec.write_text(encode(spec))
        with _Launched(folder, 0, num_ranks, members) as first:
            first.wait(lambda event: event.event == "step" and event.step > _SETTLE_STEPS)
            signalled_unix_s = time.time()
            first.process.send_signal(signal.SIGTERM)
            first.process.wait(_TIMEOUT_S)
        saved = [event.t_unix_s for event in first.events() if event.event == "checkpoint"]
        with _Launched(folder, 1, num_ranks, members, signalled_unix_s) as second:
            stepped = second.wait(lambda event: event.event == "step")
            save_s = _save_s(folder)
            if not saved or not any(event.event == "resume" for event in second.events()):
                raise PolluxAgentError(f"the job did not go on from a checkpoint; see {folder.root}")
    return Restarted(restart_s=stepped.t_unix_s - signalled_unix_s, save_s=save_s)


def bare(example: Path, num_ranks: int, members: Path | None = None) -> float:
    """Seconds from the start of torchrun to the end of its workers' first step."""
    with tempfile.TemporaryDirectory(prefix="pollux-restart-") as scratch:
        answer = Path(scratch) / "answer"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}"]
        started_unix_s = time.time()
        done = subprocess.run(
            [*command, str(BARE), str(example), str(answer), *([str(members)] if members else [])],
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if not answer.exists():
            raise PolluxAgentError(f"the bare torchrun failed: {done.stderr.strip()[-2000:]}")
        return float(answer.read_text()) - started_unix_s


class _Launched:
    """A launcher of one incarnation, as a context manager that leaves no process behind."""

    def __init__(
        self,
        folder: JobFolder,
        incarnation: int,
        num_ranks: int,
        members: Path | None,
        signal_unix_s: float | None = None,
    ) -> None:
        self._folder, self._incarnation = folder, incarnation
        settings = WorkerSettings(
            job_id="restart-1",
            job_dir=folder.root,
            incarnation=incarnation,
            node="node-0",
            slots=tuple(range(num_ranks)),
            placement={"node-0": num_ranks},
            rendezvous=f"127.0.0.1:{_free_port()}",
            signal_unix_s=signal_unix_s,
            parent_pid=os.getpid(),
            cpu_group=members,
        )
        self._log = (folder.root / f"{incarnation}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pollux_agent.cli", "launch"],
            env=os.environ | environment(settings),
            stdout=self._log,
            stderr=self._log,
        )

    def __enter__(self) -> "_Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()

    def events(self) -> list[Event]:
        """Rank 0's events so far."""
        try:
            lines = self._folder.events(self._incarnation, 0).read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [decode(Event, line) for line in lines if line.endswith("\n")]

    def wait(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event that is wanted."""
        until_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            for event in self.events():
                if wanted(event):
                    return event
            time.sleep(0.02)
        log = (self._folder.root / f"{self._incarnation}.log").read_text(errors="replace")
        raise PolluxAgentError(f"the training did not come so far: {log.strip()[-2000:]}")


def _save_s(folder: JobFolder) -> float:
    word = json.loads(folder.last_stop.read_text())
    return float(word["saved_unix_s"]) - float(word["saving_unix_s"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def example_script(path: Path | None) -> Path:
    """The digits example: ``path``, or the one beside this package in a checkout.

    Raises DocumentError where there is none.
    """
    found = path or Path(__file__).resolve().parents[2] / "examples" / "digits.py"
    with suppress(OSError):
        if found.is_file():
            return found.resolve()
    raise DocumentError(f"--example: {str(found)!r} is no file; name agent/examples/digits.py of a checkout")

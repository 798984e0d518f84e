"""SIGTERM where no step boundary comes: a checkpoint within the grace period, or word of one that stands."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from forked import forked

from pollux_agent.protocol import Event, JobFolder, JobSpec, Outcome, decode, encode
from pollux_agent.settings import WorkerSettings, environment
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.worker import main

SCRIPT = Path(__file__).with_name("stop_script.py")
PASS = 16
"""Steps of a pass."""
GRACE_S = 6.0
TIMEOUT_S = 120


def member(environ: dict[str, str], output: str) -> None:
    """A worker as the launcher forks it."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    with open(output, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main([str(SCRIPT), environ["MODE"], environ["READY"]]))


class Stopped:
    """A job of one or two ranks, each a process, that is stopped while some of them wait."""

    def __init__(self, root: Path, mode: str, *, ranks: int) -> None:
        self.root, self.mode, self.ranks = root, mode, ranks
        self.folder = JobFolder(root / "job")
        self.folder.root.mkdir()
        spec = JobSpec(
            name="line",
            script=str(SCRIPT),
            initial_batch_size=4,
            max_batch_size=4,
            max_local_batch_size=4,
            max_gpus=2,
            epochs=3,
        )
        self.folder.spec.write_text(encode(spec))

    def start(self, incarnation: int) -> list[BaseProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = WorkerSettings(
            job_id="job-1",
            job_dir=self.folder.root,
            incarnation=incarnation,
            node="node-0",
            slots=tuple(range(self.ranks)),
            placement={"node-0": self.ranks},
            grace_s=GRACE_S,
            checkpoint_interval_s=1000.0,
        )
        context = forked()
        processes: list[BaseProcess] = []
        for rank in range(self.ranks):
            environ = environment(settings) | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "MODE": self.mode,
                "READY": str(self.root / "ready"),
            }
            process = context.Process(target=member, args=(environ, str(self.root / "output")))
            process.start()
            processes.append(process)
        return processes

    def stop_once_ready(self, ready_ranks: tuple[int, ...]) -> None:
        processes = self.start(0)
        until_s = time.monotonic() + TIMEOUT_S
        try:
            while not all((self.root / f"ready-{rank}").exists() for rank in ready_ranks):
                assert all(each.is_alive() for each in processes), self.output()
                assert time.monotonic() < until_s, self.output()
                time.sleep(0.02)
            for process in processes:
                os.kill(process.pid or 0, signal.SIGTERM)
        finally:
            self._await_end(processes)

    def run_freely(self, incarnation: int) -> None:
        (self.root / "free").touch()
        self._await_end(self.start(incarnation))

    def _await_end(self, processes: list[BaseProcess]) -> None:
        for process in processes:
            process.join(TIMEOUT_S)
        ended = [process.exitcode is not None for process in processes]
        for process in processes:
            process.kill()
        assert all(ended), self.output()

    def output(self) -> str:
        return (self.root / "output").read_text()

    def outcome(self, incarnation: int, rank: int = 0) -> Outcome:
        path = self.folder.outcome(incarnation, rank)
        assert path.exists(), self.output()
        return decode(Outcome, path.read_bytes())

    def resumed_step(self, incarnation: int) -> int | None:
        lines = self.folder.events(incarnation, 0).read_text().splitlines()
        events = [decode(Event, line) for line in lines]
        return next((event.step for event in events if event.event == "resume"), None)

    def saved_steps(self) -> list[int]:
        return [int(name[-10:]) for name in CheckpointStore(self.folder.checkpoints).names()]


@pytest.mark.parametrize(
    ("mode", "ranks", "ready"),
    [
        pytest.param("evaluate", 1, (0,), id="in an evaluation"),
        pytest.param("evaluate", 2, (0, 1), id="in an evaluation on two ranks"),
        pytest.param("evaluate-0", 2, (0,), id="in an evaluation of rank 0, for which the other one waits"),
        pytest.param("data", 1, (0,), id="while a loader process makes it wait"),
    ],
)
def test_between_steps_it_saves_what_the_last_step_left_and_goes_on_from_there(
    tmp_path: Path, mode: str, ranks: int, ready: tuple[int, ...]
) -> None:
    job = Stopped(tmp_path, mode, ranks=ranks)
    job.stop_once_ready(ready)
    stopped = job.outcome(0)
    assert (stopped.kind, stopped.error) == ("interrupted", "")
    assert {job.outcome(0, rank).kind for rank in range(ranks)} == {"interrupted"}
    assert stopped.step == PASS
    assert job.saved_steps() == [PASS]
    job.run_freely(1)
    assert job.resumed_step(1) == PASS
    assert (job.outcome(1).kind, job.outcome(1).step) == ("done", 3 * PASS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_before_the_first_step_it_just_ends(tmp_path: Path, ranks: int) -> None:
    job = Stopped(tmp_path, "before", ranks=ranks)
    job.stop_once_ready(tuple(range(ranks)))
    for rank in range(ranks):
        assert (job.outcome(0, rank).kind, job.outcome(0, rank).step) == ("interrupted", 0)
    assert job.saved_steps() == []
    job.run_freely(1)
    assert job.resumed_step(1) is None
    assert job.outcome(1).kind == "done"


def test_within_a_step_that_does_not_end_it_says_which_checkpoint_stands(tmp_path: Path) -> None:
    job = Stopped(tmp_path, "frozen", ranks=1)
    job.stop_once_ready((0,))
    stopped = job.outcome(0)
    assert stopped.kind == "interrupted"
    assert stopped.error == (
        f"step {PASS} is not saved: its end came too late to save; there is no checkpoint"
    )
    assert stopped.error in job.output()
    job.run_freely(1)
    assert job.outcome(1).kind == "done"

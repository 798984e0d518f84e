"""A job that is killed at any moment, also within a save, goes on whole from its last checkpoint."""

import os
import random
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from elastic_runs import DriverRun
from forked import forked

from pollux_agent.settings import environment

SCRIPT = Path(__file__).with_name("crash_script.py")
NUM_KILLS = int(os.environ.get("POLLUX_KILLS", "20"))
"""200 show more than a CI run has time for."""
_LONGEST_LIFE_S = 1.0
_TIMEOUT_S = 120.0


def worker(environ: dict[str, str], steps: str, output: str) -> None:
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), steps]
    with open(output, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(str(SCRIPT), run_name="__main__")


class Victim:
    """A job's workers, one after another, forked from a parent that has everything loaded."""

    def __init__(self, root: Path) -> None:
        self.run = DriverRun(root, script=str(SCRIPT), epochs=1_000_000)
        self.steps, self.output = root / "steps", root / "output"
        self.steps.touch()

    def start(self, incarnation: int) -> BaseProcess:
        settings = self.run.settings(incarnation, checkpoint_interval_s=0.1)
        context = forked()
        process = context.Process(
            target=worker, args=(environment(settings), str(self.steps), str(self.output))
        )
        process.start()
        return process

    def kill_at(self, process: BaseProcess, seconds: float, *, incarnation: int) -> None:
        """SIGKILL that long after the incarnation's start; the first one makes a checkpoint before."""
        until_s = time.monotonic() + _TIMEOUT_S
        while incarnation == 0 and not self._saved():
            assert process.is_alive() and time.monotonic() < until_s, self.output.read_text()
            time.sleep(0.01)
        time.sleep(seconds)
        self._kill(process)

    def kill_in_save(self, process: BaseProcess, seconds: float) -> bool:
        """SIGKILL ``seconds`` after a save has begun; whether it was still in the save."""
        until_s = time.monotonic() + _TIMEOUT_S
        while not self._saving():
            assert process.is_alive() and time.monotonic() < until_s, self.output.read_text()
        time.sleep(seconds)
        self._kill(process)
        return self._saving()

    def lines(self) -> list[tuple[int, str]]:
        """(step, digest) of every whole line."""
        text = self.steps.read_text()
        whole = text[: text.rfind("\n") + 1]
        return [(int(step), digest) for step, digest in (line.split() for line in whole.splitlines())]

    def _saved(self) -> bool:
        events = self.run.folder.events(0, 0)
        return events.exists() and '"checkpoint"' in events.read_text()

    def _saving(self) -> bool:
        folder = self.run.folder.checkpoints
        return folder.is_dir() and any(name.startswith(".saving-") for name in os.listdir(folder))

    def _kill(self, process: BaseProcess) -> None:
        assert process.is_alive(), self.output.read_text()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(_TIMEOUT_S)


@pytest.mark.timeout(300 + 10 * NUM_KILLS)
def test_a_job_killed_at_random_moments_resumes_whole_and_loses_at_most_one_interval(tmp_path: Path) -> None:
    random_ = random.Random(5)
    victim = Victim(tmp_path)
    weights: dict[int, str] = {}
    inside = taken = newest = 0
    for incarnation in range(NUM_KILLS):
        process = victim.start(incarnation)
        if incarnation % 2:
            inside += victim.kill_in_save(process, random_.uniform(0, 0.01))
        else:
            victim.kill_at(process, random_.uniform(0, _LONGEST_LIFE_S), incarnation=incarnation)
        events = victim.run.events(incarnation) if victim.run.folder.events(incarnation, 0).exists() else []
        resumed = [event.step for event in events if event.event == "resume"]
        if any(event.event == "step" for event in events) and newest:
            assert len(resumed) == 1, "a checkpoint was there and not taken up"
        for step in resumed:
            assert step >= newest, "a checkpoint that was complete is lost"
        newest = max([newest, *resumed, *(event.step for event in events if event.event == "checkpoint")])
        lines = victim.lines()[taken:]
        if lines:
            assert lines[0][0] == (resumed[0] if resumed else 0) + 1, "a step was left out"
        for step, digest in lines:
            assert weights.setdefault(step, digest) == digest, f"step {step} came out otherwise"
        taken += len(lines)
    assert inside >= NUM_KILLS // 4
    assert newest > 0

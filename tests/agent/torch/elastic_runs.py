"""Builders for runs of an elastic job, in this process or in workers as a driver starts them."""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from forked import forked
from torch import nn
from torch.utils.data import Dataset

from pollux_agent.protocol import Event, JobFolder, JobSpec, Outcome, decode, encode
from pollux_agent.settings import WorkerSettings, environment

SCRIPT = Path(__file__).with_name("worker_script.py")


class Line(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Noisy points on a plane in 3 dimensions; each item names its index."""

    def __init__(self, num_samples: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(num_samples, 3, generator=generator)
        noise = 0.1 * torch.randn(num_samples, generator=generator)
        self.targets = self.inputs @ torch.tensor([1.0, -2.0, 0.5]) + noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.targets[index], index


def linear_model() -> nn.Module:
    torch.manual_seed(11)
    return nn.Linear(3, 1)


class DriverRun:
    """A job's folder, and workers started on it as a driver would, one rank an incarnation."""

    def __init__(self, root: Path, **spec: Any) -> None:
        self.folder = JobFolder(root / "job")
        self.folder.root.mkdir()
        self.seen, self.ready, self.output = root / "seen.jsonl", root / "ready", root / "output"
        self.processes: list[BaseProcess] = []
        plain = {
            "name": "line",
            "script": str(SCRIPT),
            "initial_batch_size": 4,
            "max_batch_size": 4,
            "max_local_batch_size": 4,
            "max_gpus": 2,
            "epochs": 3,
        } | spec
        self.folder.spec.write_text(encode(JobSpec(**plain)))

    def settings(self, incarnation: int, **changes: Any) -> WorkerSettings:
        plain: dict[str, Any] = {
            "job_id": "line-1",
            "job_dir": self.folder.root,
            "incarnation": incarnation,
            "node": "node-0",
            "slots": (1,),
            "placement": {"node-0": 1},
            "checkpoint_interval_s": 1000.0,
        }
        return WorkerSettings(**(plain | changes))

    def start(self, incarnation: int, *arguments: str, **changes: Any) -> BaseProcess:
        """A worker in a process (and session) of its own; its output goes to ``output``."""
        environ = environment(self.settings(incarnation, **changes))
        context = forked()
        self.ready.unlink(missing_ok=True)
        argv = [str(SCRIPT), str(self.seen), str(self.ready), *arguments]
        process = context.Process(target=_worker, args=(environ, argv, str(self.output)))
        process.start()
        self.processes.append(process)
        return process

    def run(self, incarnation: int, *arguments: str, **changes: Any) -> None:
        self.finish(self.start(incarnation, *arguments, **changes))

    def wait_ready(self, process: BaseProcess) -> None:
        """Until the worker has made the steps that --wait-at names."""
        deadline = time.monotonic() + 120
        while not self.ready.exists():
            assert process.is_alive() and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)

    def terminate(self, process: BaseProcess, *, group: bool = False) -> None:
        """SIGTERM once the worker is in its loop, then wait for its end."""
        self.wait_ready(process)
        (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
        self.finish(process)

    def finish(self, process: BaseProcess) -> None:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
        assert process.exitcode == 0, self.output.read_text()

    def end_all(self) -> None:
        """What a test that failed has left running."""
        for process in self.processes:
            process.kill()
            process.join()

    def outcome(self, incarnation: int, rank: int = 0) -> Outcome:
        return decode(Outcome, self.folder.outcome(incarnation, rank).read_bytes())

    def events(self, incarnation: int, rank: int = 0) -> list[Event]:
        lines = self.folder.events(incarnation, rank).read_text().splitlines()
        return [decode(Event, line) for line in lines]

    def samples_seen(self) -> list[tuple[int, int]]:
        """(pass, sample index) of everything that was trained on."""
        return [tuple(json.loads(line)) for line in self.seen.read_text().splitlines()]


def _worker(environ: dict[str, str], argv: list[str], output: str) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(environ)
    torch.set_num_threads(1)
    sys.argv = argv
    with open(output, "a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_path(argv[0], run_name="__main__")

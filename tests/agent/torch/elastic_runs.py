"""Builders for runs of an elastic job: in this process, on two gloo ranks, or in workers of their own."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
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


def on_ranks(num_ranks: int, body: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Run ``body(rank, *arguments)`` on gloo ranks over loopback; their answers in rank order."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    store = folder / f"store-{len(list(folder.iterdir()))}"
    processes = [
        context.Process(target=_on_rank, args=(rank, num_ranks, str(store), body, arguments, answers))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
            raise AssertionError("a rank hangs")
        assert process.exitcode == 0
    return [answer for _, answer in sorted((answers.get() for _ in processes), key=lambda pair: pair[0])]


def _on_rank(
    rank: int, size: int, store: str, body: Callable[..., Any], arguments: tuple[Any, ...], answers: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    answers.put((rank, body(rank, *arguments)))


class DriverRun:
    """A job's folder, and workers started on it as a driver would, one rank an incarnation."""

    def __init__(self, root: Path, **spec: Any) -> None:
        self.folder = JobFolder(root / "job")
        self.folder.root.mkdir()
        self.seen = root / "seen.jsonl"
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

    def start(self, incarnation: int, *arguments: str, **changes: Any) -> subprocess.Popen[str]:
        environ = os.environ | environment(self.settings(incarnation, **changes)) | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), str(self.seen), *arguments],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, incarnation: int, *arguments: str, **changes: Any) -> None:
        process = self.start(incarnation, *arguments, **changes)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output

    def terminate(self, process: subprocess.Popen[str], *, group: bool = False) -> None:
        """SIGTERM once the worker says that it is in its loop, then wait for its end."""
        assert process.stdout is not None
        while (line := process.stdout.readline()) and "ready" not in line:
            pass
        (os.killpg if group else os.kill)(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output

    def outcome(self, incarnation: int, rank: int = 0) -> Outcome:
        return decode(Outcome, self.folder.outcome(incarnation, rank).read_bytes())

    def events(self, incarnation: int, rank: int = 0) -> list[Event]:
        lines = self.folder.events(incarnation, rank).read_text().splitlines()
        return [decode(Event, line) for line in lines]

    def samples_seen(self) -> list[tuple[int, int]]:
        """(pass, sample index) of everything that was trained on."""
        return [tuple(json.loads(line)) for line in self.seen.read_text().splitlines()]

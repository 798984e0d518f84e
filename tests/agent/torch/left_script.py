"""Trainings that end in different ways: FOLDER WAY..., each in a process forked from this one.

Each leaves FOLDER/WAY.out, what it printed. The exit statuses are printed, one a line.
"""

import atexit
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # as the first optimizer does, once for all
import torch.nn.functional as F
from elastic_runs import Line, linear_model

import pollux_agent.torch as pollux


def new_job(**arguments: Any) -> tuple[pollux.ElasticJob, torch.optim.Optimizer]:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return pollux.ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, **arguments), optimizer


def train(job: pollux.ElasticJob, optimizer: torch.optim.Optimizer, way: str, epochs: int = 2) -> None:
    for _ in job.epochs(epochs):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            if job.steps_taken == 3 and way == "stop":
                job.stop()
            if job.steps_taken == 3 and way == "raise":
                raise ValueError("the script's own")
            if job.steps_taken == 3 and way == "exit":
                sys.exit()
        if way == "finish":
            job.finish()
        if way in ("finish", "break"):
            break


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def main(way: str, kept: Path) -> None:
    if way == "made alone":
        new_job()
    elif way == "break behind a checkpoint":
        train(*new_job(checkpoint_dir=kept), "", epochs=1)
        train(*new_job(checkpoint_dir=kept), "break", epochs=4)
    elif way == "break, then complete":
        train(*new_job(), "break")
        train(*new_job(), "")
    elif way == "break twice":
        train(*new_job(), "break")
        train(*new_job(), "break")
    elif way == "break on two ranks":
        os.environ |= {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        child = os.fork()
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if child else "1"
        train(*new_job(), "break")
        if child:
            os.waitpid(child, 0)
    elif way == "break and fork":
        train(*new_job(), "break")
        if child := os.fork():
            os.waitpid(child, 0)
    else:
        train(*new_job(), way)


def run(way: str, folder: Path) -> None:
    """In this process, to its end; what Python does behind the exit functions takes seconds after torch."""
    status = 1
    atexit.register(lambda: (sys.stderr.flush(), os._exit(status)))
    try:
        main(way, folder / "kept")
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
        raise


folder = Path(sys.argv[1])
torch.set_num_threads(1)
for way in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        with open(folder / f"{way}.out", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run(way, folder)
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)

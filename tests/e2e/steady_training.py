"""A training for tests: small steps, a tenth of a second apart, each of which is logged and printed.

It takes --steps steps, or ends at the first step that finds the file --until. With --raise-at it raises at
that step, each time, or with --marker once, when it makes that file; with --hoard-at it likewise takes 8 GiB
of memory.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import pollux_agent.torch as pollux

BATCH_SIZE = 8


def everywhere(flag: bool) -> bool:
    """Whether any replica says so: all of them get the same answer."""
    if not dist.is_initialized():
        return flag
    said = torch.tensor(float(flag))
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return bool(said.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--hoard-at", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(arguments.steps * BATCH_SIZE, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = pollux.ElasticJob(model, optimizer, data, batch_size=BATCH_SIZE)
    for _ in job.epochs(1):
        for features, targets in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(features), targets).backward()
            optimizer.step()
            job.log(walked=job.step)
            if job.rank == 0:
                print(f"step {job.step}", flush=True)
            due = job.step in (arguments.raise_at, arguments.hoard_at)
            if due and not (arguments.marker and arguments.marker.exists()):
                if arguments.marker:
                    arguments.marker.touch()
                if job.step == arguments.raise_at:
                    raise RuntimeError("broken on purpose")
                print(len(b"x" * (8 << 30)))
            if arguments.until and everywhere(arguments.until.exists()):
                job.finish()
                return
            time.sleep(0.1)


if __name__ == "__main__":
    main()

"""A training script that is somewhere else than in a step for ever: MODE READY, under a driver.

MODE: evaluate (all ranks behind the first pass), evaluate-0 (rank 0 alone, while the others go on), before
(the first step), data (a sample of the second pass that never comes, in two worker processes), frozen (within
the second pass's first step). Once there is a file "free" beside READY nothing is waited for.
"""

import sys
import time
from pathlib import Path

import torch
from elastic_runs import Line, linear_model

import pollux_agent.torch as pollux

mode, ready = sys.argv[1], Path(sys.argv[2])


def for_ever(rank: int) -> None:
    while not ready.with_name("free").exists():
        ready.with_name(f"ready-{rank}").touch()
        time.sleep(0.02)


class Slow(Line):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        if mode == "data" and ready.with_name("first").exists():
            for_ever(0)
        return super().__getitem__(index)


model = linear_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
workers = 2 if mode == "data" else 0
job = pollux.ElasticJob(model, optimizer, Slow(), batch_size=4, num_workers=workers)
if mode == "before":
    for_ever(job.rank)
for epoch in job.epochs(3):
    for inputs, targets, _ in job.loader:
        if mode == "frozen" and epoch == 1:
            for_ever(job.rank)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(job.model(inputs).squeeze(1), targets).backward()
        optimizer.step()
    ready.with_name("first").touch()
    if epoch == 0 and (mode == "evaluate" or (mode == "evaluate-0" and job.rank == 0)):
        for_ever(job.rank)

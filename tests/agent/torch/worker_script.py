"""A training script for tests: SEEN READY [--workers N] [--wait-at STEP] [--raise-at STEP] [--ballast N].

Without a driver also [--checkpoint-dir FOLDER] [--epochs N] [--batch-size N].

Notes every sample that it trained on in the file SEEN. With --wait-at it makes the file READY after that many
steps of its own and then trains on slowly, so that a test can stop it in mid-pass.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from elastic_runs import Line, linear_model

import pollux_agent.torch as pollux

parser = argparse.ArgumentParser()
parser.add_argument("seen")
parser.add_argument("ready", type=Path)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--wait-at", type=int, default=-1)
parser.add_argument("--raise-at", type=int, default=-1)
parser.add_argument("--ballast", type=int, default=0)
parser.add_argument("--checkpoint-dir")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=999)  # under a driver the spec's counts
arguments = parser.parse_args()

model = linear_model()
if arguments.ballast:
    model.register_buffer("ballast", torch.zeros(arguments.ballast))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
job = pollux.ElasticJob(
    model,
    optimizer,
    Line(),
    batch_size=arguments.batch_size,
    max_batch_size=arguments.batch_size,
    num_workers=arguments.workers,
    checkpoint_dir=arguments.checkpoint_dir,
    stateful={"scheduler": scheduler},
)
turns = 0
with open(arguments.seen, "a", buffering=1) as seen:
    for epoch in job.epochs(arguments.epochs):
        for inputs, targets, indices in job.loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(job.model(inputs).squeeze(1), targets)
            loss.backward()
            optimizer.step()
            for index in indices.tolist():
                seen.write(json.dumps([epoch, index]) + "\n")
            turns += 1
            if turns == arguments.raise_at:
                raise RuntimeError("broken on purpose")
            if turns == arguments.wait_at:
                arguments.ready.touch()
            if 0 <= arguments.wait_at <= turns:
                time.sleep(0.05)
        scheduler.step()
        job.log(loss=loss.item())

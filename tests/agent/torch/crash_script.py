"""A training script for crash tests: STEPS_FILE. Writes a line "step digest-of-weights" behind every step.

It has what makes a resume hard: momentum, dropout, a shuffled order, and a buffer that makes a save take a
while.
"""

import hashlib
import sys

import torch
from elastic_runs import Line
from torch import nn

import pollux_agent.torch as pollux

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.2), nn.Linear(16, 1))
model.register_buffer("ballast", torch.randn(1_000_000))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
job = pollux.ElasticJob(model, optimizer, Line(), batch_size=4)
with open(sys.argv[1], "a", buffering=1) as steps:
    for _ in job.epochs(1_000_000):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            weights = torch.cat([param.detach().flatten() for param in model.parameters()])
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
            steps.write(f"{job.step + 1} {digest}\n")

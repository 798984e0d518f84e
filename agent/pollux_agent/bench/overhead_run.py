"""One rank of a training that is timed in turns: ``python overhead_run.py MODE WORKLOAD LOCAL_BATCH CLOCK``.

MODE is ``plain`` (torch alone, with DistributedDataParallel where there are several ranks), ``agent``,
``every`` (the agent, with the noise scale measured at every step) or ``adaptdl``. Behind the warm-up it says
``ready``; it answers each line of its input, a number of steps, with the seconds that these took by CLOCK:
``wall``, or ``cpu`` for those of this process's threads. Run as a file, since a peer's environment lacks this
package.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WARM_UP_STEPS = 100
NUM_SAMPLES = 20_000
VOCABULARY, LENGTH, WIDTH = 128, 32, 96
PIXELS, CLASSES = 16, 10

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Loop = tuple[nn.Module, Iterator[list[Tensor]]]


class Transformer(nn.Module):
    """Two pre-norm encoder layers under a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (samples, VOCABULARY, LENGTH)."""
        hidden = self.layers(self.embedding(tokens), mask=self.mask, is_causal=True)
        return torch.as_tensor(self.head(hidden)).transpose(1, 2)


def convolutions() -> nn.Module:
    """Five convolutions with batch normalisation for images of PIXELS x PIXELS."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    blocks = [*block(3, 32, 1), *block(32, 32, 1), *block(32, 64, 2), *block(64, 64, 1), *block(64, 128, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def workload(name: str) -> tuple[nn.Module, Optimizer, TensorDataset]:
    """(model, optimizer, data) of ``cnn`` or ``transformer``, the same on every rank and in every mode."""
    torch.manual_seed(0)
    if name == "cnn":
        model = convolutions()
        images = torch.randn(NUM_SAMPLES, 3, PIXELS, PIXELS)
        data = TensorDataset(images, torch.randint(CLASSES, (NUM_SAMPLES,)))
        return model, SGD(model.parameters(), lr=0.01, momentum=0.9), data
    if name == "transformer":
        model = Transformer()
        tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH + 1))
        data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return model, AdamW(model.parameters(), lr=1e-4), data
    raise SystemExit(f"WORKLOAD: cnn or transformer (got {name!r})")


def plain(model: nn.Module, optimizer: Optimizer, data: TensorDataset, local_batch: int) -> Loop:
    """What a script does without us."""
    world_size = int(os.environ["WORLD_SIZE"])
    sampler: DistributedSampler[tuple[Tensor, ...]] | None = None
    if world_size > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        sampler = DistributedSampler(data)
    loader = DataLoader(
        data, batch_size=local_batch, sampler=sampler, shuffle=sampler is None, drop_last=True
    )
    return model, (batch for _ in iter(int, 1) for batch in loader)


def agent(
    model: nn.Module, optimizer: Optimizer, data: TensorDataset, local_batch: int, *, every_step: bool
) -> Loop:
    """Under the agent as a driver starts it; the job's spec holds the batch size."""
    import pollux_agent.torch as pollux

    job = pollux.ElasticJob(
        model,
        optimizer,
        data,
        batch_size=local_batch * int(os.environ["WORLD_SIZE"]),
        noise_every=1 if every_step else 10,
    )
    return job.model, (batch for _ in job.epochs(1_000_000) for batch in job.loader)


def adaptdl(model: nn.Module, optimizer: Optimizer, data: TensorDataset, local_batch: int) -> Loop:
    """Under AdaptDL, with its batch size fixed."""
    adl: Any = importlib.import_module("adaptdl.torch")

    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(
        data, batch_size=local_batch * int(os.environ["WORLD_SIZE"]), shuffle=True, drop_last=True
    )
    wrapped = adl.AdaptiveDataParallel(model, optimizer)
    return wrapped, (batch for _ in adl.remaining_epochs_until(1_000_000) for batch in loader)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterator[list[Tensor]],
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds that ``steps`` steps of an ordinary loop take."""
    started_s = clock()
    for inputs, targets in islice(batches, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return clock() - started_s


def main(mode: str, name: str, local_batch: int, clock: Callable[[], float]) -> None:
    """Warm up, and train as many steps as each line of the input says until it ends."""
    torch.set_num_threads(1)
    model, optimizer, data = workload(name)
    if mode == "plain":
        model, batches = plain(model, optimizer, data, local_batch)
    elif mode == "adaptdl":
        model, batches = adaptdl(model, optimizer, data, local_batch)
    else:
        model, batches = agent(model, optimizer, data, local_batch, every_step=mode == "every")
    train(model, optimizer, batches, WARM_UP_STEPS)
    print("ready", flush=True)  # noqa: T201 - the answer
    for line in sys.stdin:
        print(train(model, optimizer, batches, int(line), clock), flush=True)  # noqa: T201 - the answer
    os._exit(0)


if __name__ == "__main__":
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), clocks[sys.argv[4]])

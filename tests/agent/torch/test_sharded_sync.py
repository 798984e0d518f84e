"""A model under fully_shard: the same gradients and noise as a whole one, however the step is split."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import run_gang
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pollux_agent.errors import DocumentError, LoopError
from pollux_agent.torch.fsdp import ShardedSync
from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.precondition import SETTLED_STEPS

Split = Sequence[Sequence[int]]
"""``split[rank][j]``: real samples of that rank's micro-batch j."""


def build_model() -> nn.Sequential:
    """Sizes that no number of ranks divides."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def shard(model: nn.Sequential) -> nn.Sequential:
    fully_shard(model[0])
    fully_shard(model[2])
    return fully_shard(model)


def build_data(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (count,), generator=generator)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1),
}


class BySize:
    """One number for all elements of a parameter."""

    needs_state = False

    def diagonal(self, optimizer: Any, group: Any, params: Sequence[Tensor]) -> list[Tensor]:
        return [torch.full((), float(param.numel()), dtype=param.dtype) for param in params]


OWN = {torch.optim.ASGD: BySize()}


def whole(tensor: Tensor) -> list[float]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().tolist()


def train(
    model: nn.Module, sync: Any, optimizer: Any, split: Split, rank: int, *, clip: float | None = None
) -> dict[str, Any]:
    """Some steps over one data set, and what was seen: gradients, weights, noise."""
    total = sum(map(sum, split))
    x, y = build_data(total)
    place, spans = 0, {}
    for j in range(len(split[0])):
        for member in range(len(split)):
            spans[member, j] = (place, place + split[member][j])
            place += split[member][j]
    gradients = []
    for _ in range(SETTLED_STEPS + 2):
        sync.start_step(micro_batches=len(split[0]), step_samples=total)
        for j in range(len(split[0])):
            start, end = spans[rank, j]
            last = j == len(split[0]) - 1
            sync.start_micro_batch(num_samples=end - start, last=last)
            optimizer.zero_grad()
            chosen = slice(start, end) if end > start else slice(0, 1)
            nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            if not last:
                assert all(param.grad is None for param in model.parameters())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients.append([whole(param.grad) for param in model.parameters()])
        result = sync.finish_step()
        assert not result.skip
        optimizer.step()
    return {
        "gradients": gradients,
        "weights": [whole(param) for param in model.parameters()],
        "noise": (sync.noise.count, sync.noise.grad_var, sync.noise.grad_sqr),
    }


def alone(split: Split, kind: str, clip: float | None) -> dict[str, Any]:
    """The same micro-batches accumulated in one process on a model that is whole."""
    model = build_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = GradientSync(model, [optimizer], sample_every=1, preconditioners=OWN)
    flat = [[size for j in range(len(split[0])) for size in (rank[j] for rank in split) if size]]
    return train(model, sync, optimizer, flat, 0, clip=clip)


def sharded(cases: list[tuple[Split, str, float | None]]) -> list[dict[str, Any]]:
    found = []
    for split, kind, clip in cases:
        model = shard(build_model())
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = ShardedSync(model, [optimizer], sample_every=1, preconditioners=OWN)
        found.append(train(model, sync, optimizer, split, dist.get_rank(), clip=clip))
    return found


CASES: dict[int, list[tuple[Split, str, float | None]]] = {
    1: [([[6, 6]], "sgd", None), ([[4, 5, 3]], "adamw", 0.05)],
    2: [
        ([[6], [6]], "sgd", None),
        ([[7], [5]], "adamw", None),
        ([[3, 3], [4, 2]], "adamw", 0.05),
        ([[3, 0], [4, 5]], "sgd", 0.05),
        ([[3, 3], [4, 2]], "adagrad", None),
        ([[3, 3], [4, 2]], "asgd", None),
    ],
    3: [([[4], [4], [4]], "sgd", None), ([[2, 2], [3, 1], [4, 0]], "adamw", None)],
}


@pytest.mark.parametrize("ranks", CASES)
def test_gradients_weights_and_noise_are_those_of_the_whole_model(ranks: int) -> None:
    for answers in run_gang(ranks, sharded, CASES[ranks]):
        for case, found in zip(CASES[ranks], answers, strict=True):
            want = alone(*case)
            for step, expected in zip(found["gradients"], want["gradients"], strict=True):
                for mine, theirs in zip(step, expected, strict=True):
                    assert mine == pytest.approx(theirs, abs=1e-9), case
            for mine, theirs in zip(found["weights"], want["weights"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-9)
            assert found["noise"] == pytest.approx(want["noise"], rel=1e-6), case


def other_matters() -> dict[str, Any]:
    """Steps that are not measured, a gradient that is not finite, a wish to stop, backward twice."""
    rank = dist.get_rank()
    model = shard(build_model())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = ShardedSync(model, [optimizer], sample_every=1000)
    sync.noise.count = 20
    x, y = build_data(8)
    own = slice(4 * rank, 4 * rank + 4)
    seen: list[Any] = []
    for step, poison in enumerate([1.0, float("inf"), 1.0]):
        sync.start_step(micro_batches=1, step_samples=8)
        sync.start_micro_batch(num_samples=4, last=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        (loss * (poison if rank == 1 else 1.0)).backward()
        result = sync.finish_step(stop=step == 2 and rank == 1)
        seen.append((result.skip, result.stop, sync.noise.count))
    sync.start_step(micro_batches=1, step_samples=8)
    sync.start_micro_batch(num_samples=4, last=True)
    nn.functional.cross_entropy(model(x[own]), y[own]).backward()
    try:
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
    except LoopError as error:
        seen.append(str(error))
    return {"seen": seen}


def test_ranks_agree_on_skips_and_stops_of_a_sharded_model() -> None:
    for found in run_gang(2, other_matters):
        first, second, third, message = found["seen"]
        assert (first[:2], second[:2], third[:2]) == ((False, False), (True, False), (False, True))
        assert second[2] == first[2]
        assert "backward once per batch" in message


def partly_sharded() -> str:
    model = build_model()
    fully_shard(model[0])
    try:
        ShardedSync(model, [OPTIMIZERS["sgd"](model.parameters())])
    except DocumentError as error:
        return str(error)
    return ""


def test_a_model_that_is_sharded_in_part_is_refused() -> None:
    assert "not sharded" in run_gang(1, partly_sharded)[0]

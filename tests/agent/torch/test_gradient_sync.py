"""Gradients of a step equal one process's full batch, however it is split, with one all-reduce a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gang import run_gang
from torch import Tensor, nn

from pollux_agent.errors import LoopError
from pollux_agent.torch.gradients import GradientSync, StepResult

FEATURES, CLASSES = 6, 3


def build_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def build_data(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def gradients(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def full_batch(count: int, clip: float | None = None) -> nn.Module:
    """The model after backward on all samples in one batch, by torch alone."""
    model = build_model()
    x, y = build_data(count)
    nn.functional.cross_entropy(model(x), y).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return model


Split = Sequence[Sequence[int]]
"""``split[rank][j]``: real samples of that rank's micro-batch j."""


def spans(split: Split) -> list[list[tuple[int, int]]]:
    """Where each micro-batch begins and ends in the data: by micro-batch, then by rank."""
    order = [(rank, j) for j in range(len(split[0])) for rank in range(len(split))]
    ends = [0]
    for rank, j in order:
        ends.append(ends[-1] + split[rank][j])
    found: list[list[tuple[int, int]]] = [[] for _ in split]
    for (rank, _), span in zip(order, pairwise(ends), strict=True):
        found[rank].append(span)
    return found


def train_step(
    sync: GradientSync, split: Split, optimizer: torch.optim.Optimizer, clip: float | None = None
) -> None:
    """A user's loop over one step, up to the optimizer's step; an empty micro-batch borrows sample 0."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    total = sum(map(sum, split))
    x, y = build_data(total)
    own = spans(split)[rank]
    sync.start_step(micro_batches=len(own), step_samples=total)
    for j, (start, end) in enumerate(own):
        sync.start_micro_batch(num_samples=end - start, last=j == len(own) - 1)
        chosen = slice(start, end) if end > start else slice(0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(sync.module(x[chosen]), y[chosen]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(sync.module.parameters(), clip)


@dataclass
class Counter:
    """Sizes of the all-reduces made since this began."""

    sizes: list[int]

    def __enter__(self) -> "Counter":
        self._real = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return self._real(tensor, *args, **kwargs)

        dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._real


def ranks_step(splits: list[Split], clip: float | None) -> list[tuple[Any, list[int], bool]]:
    """Per split: gradients before the optimizer's step, sizes of all-reduces, and whether it was skipped."""
    found = []
    for split in splits:
        model = build_model()
        optimizer = sgd(model)
        sync = GradientSync(model, [optimizer])
        with Counter([]) as counter:
            train_step(sync, split, optimizer, clip)
            before = gradients(model)
            result = sync.finish_step()
        found.append((before, counter.sizes, result.skip))
    return found


SPLITS_ON_TWO = [
    pytest.param([[6], [6]], id="no accumulation"),
    pytest.param([[3, 3], [3, 3]], id="accumulation 2"),
    pytest.param([[2, 2, 2], [2, 2, 2]], id="accumulation 3"),
    pytest.param([[2, 1, 1, 2], [1, 2, 2, 1]], id="accumulation 4"),
    pytest.param([[7], [5]], id="uneven ranks"),
    pytest.param([[4, 1], [5, 2]], id="uneven micro-batches"),
    pytest.param([[5, 4], [3, 0]], id="a rank without samples in the last micro-batch"),
    pytest.param([[9, 0], [0, 3]], id="a rank without samples in the first micro-batch"),
    pytest.param([[12], [0]], id="a rank without samples"),
]
SPLITS_ON_ONE = [[[12]], [[6, 6]], [[4, 4, 4]], [[5, 4, 2, 1]], [[5, 7]]]


@pytest.fixture(scope="module")
def on_two() -> dict[str, list[Any]]:
    """All splits on one pair of ranks, with and without clipping: split -> what each rank saw."""
    splits = [param.values[0] for param in SPLITS_ON_TWO]
    found: dict[str, list[Any]] = {}
    for clip in (None, 0.05):
        ranks = run_gang(2, ranks_step, splits, clip)
        found.update({f"{split} {clip}": seen for split, *seen in zip(splits, *ranks, strict=True)})
    return found


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("split", SPLITS_ON_TWO)
def test_two_ranks_see_the_full_batchs_gradient(
    on_two: dict[str, list[Any]], split: Split, clip: float | None
) -> None:
    want = gradients(full_batch(12, clip))
    for before, _, skip in on_two[f"{split} {clip}"]:
        assert not skip
        for got, expected in zip(before, want, strict=True):
            assert got == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("split", SPLITS_ON_TWO)
def test_gradients_are_reduced_once_a_step(on_two: dict[str, list[Any]], split: Split) -> None:
    num_params = sum(p.numel() for p in build_model().parameters())
    for _, sizes, _ in on_two[f"{split} None"]:
        assert len(sizes) == 1
        assert num_params <= sizes[0] <= num_params + 8


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("split", SPLITS_ON_ONE)
def test_one_process_sees_the_full_batchs_gradient(split: Split, clip: float | None) -> None:
    [(before, sizes, skip)] = ranks_step([split], clip)
    assert sizes == [] and not skip
    for got, expected in zip(before, gradients(full_batch(12, clip)), strict=True):
        assert got == pytest.approx(expected, abs=1e-9)


def test_before_the_last_micro_batch_there_is_nothing_to_clip() -> None:
    model = build_model()
    sync = GradientSync(model, [sgd(model)])
    x, y = build_data(4)
    sync.start_step(micro_batches=2, step_samples=4)
    sync.start_micro_batch(num_samples=2, last=False)
    nn.functional.cross_entropy(model(x[:2]), y[:2]).backward()
    assert gradients(model) == [None] * 4


def many_buckets() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)]).double()
    optimizer = sgd(model)
    sync = GradientSync(model, [optimizer])
    x = torch.randn(4, 400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with Counter([]) as counter:
        sync.start_step(micro_batches=1, step_samples=4)
        sync.start_micro_batch(num_samples=2, last=True)
        model(x[dist.get_rank() * 2 :][:2]).square().mean().backward()
        got = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert len(counter.sizes) >= 2
    for param in model.parameters():
        param.grad = None
    sync.abandon_step()
    model(x).square().mean().backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    return [float((got - want).abs().max()), float(want.abs().max())]


def test_a_model_of_several_buckets_is_reduced_exactly() -> None:
    for worst, largest in run_gang(2, many_buckets):
        assert worst <= 1e-12 * largest


class Branches(nn.Module):
    """``odd`` is used when asked for, ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.odd, self.never = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        hidden = self.trunk(x)
        return self.odd(hidden) if odd else hidden


def unused_parameters(used: list[list[list[bool]]]) -> list[tuple[list[Any], list[Any]]]:
    """``used[step][rank][j]``: whether that micro-batch takes the branch. Gradients seen, and wanted."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, reference = Branches(), Branches()
    sync = GradientSync(model, [sgd(model, weight_decay=0.1)])
    x, _ = build_data(24)
    found = []
    for step in used:
        model.zero_grad()
        reference.zero_grad()
        per = 24 // (world * len(step[0]))
        sync.start_step(micro_batches=len(step[0]), step_samples=24)
        for j, odd in enumerate(step[rank]):
            start = (j * world + rank) * per
            sync.start_micro_batch(num_samples=per, last=j == len(step[0]) - 1)
            model(x[start : start + per], odd).square().mean().backward()
        seen = gradients(model)
        assert not sync.finish_step().skip
        for j in range(len(step[0])):
            for other in range(world):
                start = (j * world + other) * per
                loss = reference(x[start : start + per], step[other][j]).square().mean()
                (loss * per / 24).backward()
        found.append((seen, gradients(reference)))
    return found


def test_branches_that_some_steps_ranks_or_micro_batches_use_lose_no_gradient() -> None:
    off, on = False, True
    steps = [
        [[off], [off]],
        [[on], [on]],
        [[on], [off]],
        [[off, off], [off, off]],
        [[on, off], [on, off]],
        [[off, on], [off, off]],
        [[on, off], [off, off]],
    ]
    for found in run_gang(2, unused_parameters, steps):
        for seen, want in found:
            for got, expected in zip(seen, want, strict=True):
                assert (got is None) == (expected is None)
                if expected is not None:
                    assert got == pytest.approx(expected, abs=1e-9)
            assert seen[-1] is None


def one_bad_rank() -> list[Any]:
    """Four steps; in the second, rank 1's gradient is inf, in the third NaN."""
    model = build_model()
    optimizer = sgd(model, momentum=0.9)
    sync = GradientSync(model, [optimizer], sample_every=1)
    x, y = build_data(8)
    found = []
    for step, poison in enumerate([1.0, float("inf"), float("nan"), 1.0]):
        sync.start_step(micro_batches=1, step_samples=8)
        stop = step == 2 and dist.get_rank() == 1
        sync.start_micro_batch(num_samples=4, last=True, stop=lambda stop=stop: stop)
        optimizer.zero_grad()
        own = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        (loss * (poison if dist.get_rank() == 1 else 1.0)).backward()
        result = sync.finish_step()
        if not result.skip:
            optimizer.step()
        found.append((result.skip, result.stop, result.noise_scale, sync.noise.count))
    return [found, weights(model)]


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    (first, first_weights), (second, second_weights) = run_gang(2, one_bad_rank)
    assert first == second
    assert [skip for skip, *_ in first] == [False, True, True, False]
    assert [stop for _, stop, *_ in first] == [False, False, True, False]
    assert [count for *_, count in first] == [1, 1, 1, 2]
    assert first[1][2] == first[0][2]
    assert first_weights == second_weights
    assert all(value == value and abs(value) < 100 for value in first_weights)


def start_apart() -> list[Any]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = sgd(model)
    sync = GradientSync(model, [optimizer])
    at_start = weights(model)
    for _ in range(3):
        sync.start_step(micro_batches=1, step_samples=8)
        sync.start_micro_batch(num_samples=4, last=True)
        optimizer.zero_grad()
        model(torch.randn(4, FEATURES)).square().mean().backward()
        if not sync.finish_step().skip:
            optimizer.step()
    return [at_start, weights(model), [b.flatten().tolist() for b in model.buffers()]]


def test_ranks_start_equal_and_stay_equal_with_batch_normalisation() -> None:
    first, second = run_gang(2, start_apart)
    assert first == second


def backward_twice() -> str:
    model = build_model()
    sync = GradientSync(model, [sgd(model)])
    x, y = build_data(4)
    sync.start_step(micro_batches=1, step_samples=8)
    sync.start_micro_batch(num_samples=4, last=True)
    nn.functional.cross_entropy(model(x), y).backward()
    try:
        nn.functional.cross_entropy(model(x), y).backward()
    except LoopError as error:
        return str(error)
    return ""


def test_a_second_backward_after_averaging_is_refused() -> None:
    assert all("call backward once" in message for message in run_gang(2, backward_twice))


def test_outside_a_step_backward_is_the_scripts_own() -> None:
    model = build_model()
    optimizer = sgd(model)
    sync = GradientSync(model, [optimizer])
    x, y = build_data(12)
    train_step(sync, [[6, 6]], optimizer)
    sync.finish_step()
    sync.start_step(micro_batches=2, step_samples=12)
    sync.start_micro_batch(num_samples=6, last=False)
    sync.abandon_step()
    optimizer.zero_grad()
    for _ in range(2):
        nn.functional.cross_entropy(model(x), y).backward()
    for got, expected in zip(gradients(model), gradients(full_batch(12)), strict=True):
        assert got == pytest.approx([2 * value for value in expected or []], abs=1e-12)


def test_parameters_can_be_frozen_and_unfrozen_between_steps() -> None:
    model = build_model()
    optimizer = sgd(model)
    sync = GradientSync(model, [optimizer])
    want = gradients(full_batch(12))
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        train_step(sync, [[6, 6]], optimizer)
        got = gradients(model)
        sync.finish_step()
        assert got[2] == pytest.approx(want[2], abs=1e-12)
        assert (got[0] is None) == frozen


def test_parameters_that_only_an_optimizer_knows_are_averaged_too() -> None:
    model, scale = build_model(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    sync = GradientSync(model, [optimizer])
    x, y = build_data(4)
    sync.start_step(micro_batches=2, step_samples=4)
    for j in range(2):
        sync.start_micro_batch(num_samples=2, last=j == 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[2 * j :][:2]) * scale, y[2 * j :][:2]).backward()
    got = scale.grad.clone()
    sync.finish_step()
    sync.abandon_step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x) * scale, y).backward()
    assert float(got) == pytest.approx(float(scale.grad), abs=1e-12)


def scaled_step(split: Split, poison: float) -> tuple[list[Any], StepResult | None, float]:
    """One step of a loop with a GradScaler; the optimizer finishes the step, as the elastic job makes it."""
    model = build_model().float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sync = GradientSync(model, [optimizer], sample_every=1, grad_scaler=scaler)
    results: list[StepResult] = []
    real_step = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        results.append(sync.finish_step())
        return real_step(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]
    x, y = build_data(sum(split[0]))
    sync.start_step(micro_batches=len(split[0]), step_samples=len(x))
    for j, (start, end) in enumerate(spans(split)[0]):
        sync.start_micro_batch(num_samples=end - start, last=j == len(split[0]) - 1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[start:end].float()), y[start:end]) * poison
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return gradients(model), results[0] if results else None, scaler.get_scale()


def test_a_grad_scaler_unscales_once_a_step_and_noise_is_unscaled() -> None:
    got, result, _ = scaled_step([[5, 7]], poison=1.0)
    for seen, expected in zip(got, gradients(full_batch(12)), strict=True):
        assert seen == pytest.approx(expected, abs=1e-6)
    model = build_model()
    plain = GradientSync(model, [sgd(model)], sample_every=1)
    train_step(plain, [[5, 7]], sgd(model))
    want = plain.finish_step()
    assert result is not None and result.grad_var == pytest.approx(want.grad_var, rel=1e-4)
    assert result.grad_sqr == pytest.approx(want.grad_sqr, rel=1e-3, abs=1e-6)


def test_a_grad_scaler_that_meets_inf_makes_no_update_and_backs_off() -> None:
    _, result, scale = scaled_step([[5, 7]], poison=float("inf"))
    assert result is None
    assert scale == 512.0


@pytest.mark.parametrize(
    "asked", [{"micro_batches": 0, "step_samples": 4}, {"micro_batches": 1, "step_samples": 0}]
)
def test_an_empty_step_is_refused(asked: dict[str, int]) -> None:
    model = build_model()
    with pytest.raises(LoopError, match="micro_batches="):
        GradientSync(model, [sgd(model)]).start_step(**asked)


def test_finishing_a_step_that_never_began_is_refused() -> None:
    model = build_model()
    with pytest.raises(LoopError, match="never began"):
        GradientSync(model, [sgd(model)]).finish_step()


def test_a_second_optimizer_gets_the_same_result() -> None:
    model = build_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    sync = GradientSync(model, optimizers, sample_every=1)
    train_step(sync, [[6, 6]], optimizers[0])
    first = sync.finish_step()
    assert sync.finish_step() is first
    assert sync.noise.count == 1


def sparse_step(split: Split) -> list[float]:
    """The gradient of an embedding whose gradients are sparse, each row's loss a mean over samples."""
    table = nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    nn.init.constant_(table.weight, 0.5)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    sync = GradientSync(table, [optimizer], sample_every=1)
    chosen = torch.arange(sum(map(sum, split))) % 3
    own = spans(split)[dist.get_rank() if dist.is_initialized() else 0]
    sync.start_step(micro_batches=len(own), step_samples=len(chosen))
    for j, (start, end) in enumerate(own):
        sync.start_micro_batch(num_samples=end - start, last=j == len(own) - 1)
        optimizer.zero_grad()
        table(chosen[start:end]).square().sum(dim=1).mean().backward()
    got = table.weight.grad.to_dense().flatten().tolist()
    assert not sync.finish_step().skip
    return got


@pytest.mark.parametrize("split", [[[6]], [[2, 4]], [[3], [3]], [[1, 2], [1, 2]]], ids=str)
def test_sparse_gradients_are_averaged(split: Split) -> None:
    ranks = run_gang(len(split), sparse_step, split) if len(split) > 1 else [sparse_step(split)]
    want = [1 / 3] * 6 + [0.0] * 4
    for got in ranks:
        assert got == pytest.approx(want, abs=1e-12)


def unused_first(numel: int) -> nn.Module:
    """A model whose smallest parameter, near the input, never gets a gradient."""
    model = nn.Sequential()
    model.register_parameter("unused", nn.Parameter(torch.empty(numel, dtype=torch.float64)))
    model.extend(build_model().children())
    return model


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_parameter_that_never_gets_a_gradient_hides_no_noise(numel: int, late: bool, scaled: bool) -> None:
    model = unused_first(numel)
    assert next(iter(model.parameters())).numel() == numel
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaled else None
    sync = GradientSync(model, [sgd(model)], sample_every=1, late=late, grad_scaler=scaler)
    x, y = build_data(80)
    for step in range(10):
        sync.start_step(micro_batches=1, step_samples=8)
        sync.start_micro_batch(num_samples=8, last=True)
        model.zero_grad()
        nn.functional.cross_entropy(model(x[8 * step :][:8]), y[8 * step :][:8]).backward()
        sync.finish_step()
    assert sync.noise.count >= 6
    assert sync.noise.noise_scale is not None


def test_a_grad_scaler_that_is_off_guards_no_less_than_none() -> None:
    model = build_model()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    sync = GradientSync(model, [sgd(model)], grad_scaler=scaler)
    sync.start_step(micro_batches=1, step_samples=4)
    sync.start_micro_batch(num_samples=4, last=True)
    (float("nan") * model(build_data(4)[0]).sum()).backward()
    assert sync.finish_step().skip


def own_loss_weights() -> list[float]:
    model = build_model()
    torch.manual_seed(dist.get_rank())
    centres = nn.Parameter(torch.randn(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), centres], lr=0.1)
    GradientSync(model, [optimizer])
    return centres.tolist()


def test_what_an_optimizer_alone_knows_begins_alike_on_all_ranks() -> None:
    first, second = run_gang(2, own_loss_weights)
    assert first == second

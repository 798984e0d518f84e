"""The noise scale that training measures, against phi known in closed form and against other splits."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gang import run_gang
from torch import Tensor, nn

from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.noise import NoiseSample
from pollux_agent.torch.precondition import SETTLED_STEPS

DIM = 100


SEEDS, STEPS = 20, 25

Loss = Callable[[Tensor, int, torch.Generator], Tensor]


class Weights(nn.Module):
    """A vector of weights, held where it is."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.vector = nn.Parameter(value.clone())


def quadratic(phi: float) -> tuple[Tensor, Loss]:
    """|w - x|^2 / 2 with x ~ N(mu, sigma^2 I), |w - mu| = 1: G = w - mu, tr(Sigma) = d sigma^2 = phi."""
    sigma = (phi / DIM) ** 0.5
    start = torch.full((DIM,), DIM**-0.5, dtype=torch.float64)

    def loss(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
        x = sigma * torch.randn(count, DIM, generator=generator, dtype=torch.float64)
        return 0.5 * (weights - x).square().sum(dim=1).mean()

    return start, loss


def regression(phi: float) -> tuple[Tensor, Loss]:
    """(x w - y)^2 / 2 with x ~ N(0, I), y = noise of variance s^2, |w| = 1: G = w.

    A sample's gradient is x (x w - e), and E|x|^2 (x w)^2 = d + 2, so tr(Sigma) = d + 1 + d s^2 = phi.
    """
    deviation = ((phi - DIM - 1) / DIM) ** 0.5
    start = torch.full((DIM,), DIM**-0.5, dtype=torch.float64)

    def loss(weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
        y = deviation * torch.randn(count, generator=generator, dtype=torch.float64)
        return 0.5 * (x @ weights - y).square().mean()

    return start, loss


def measured(problem: str, phi: float, local: int, micro_batches: int) -> float:
    """Median over seeds of the measured phi, with m = ``local`` samples a micro-batch and rank."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    start, loss = {"quadratic": quadratic, "regression": regression}[problem](phi)
    found = []
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        model = Weights(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = GradientSync(model, [optimizer], sample_every=1)
        result = None
        for _ in range(STEPS):
            sync.start_step(micro_batches=micro_batches, step_samples=local * micro_batches * world)
            for j in range(micro_batches):
                sync.start_micro_batch(num_samples=local, last=j == micro_batches - 1)
                optimizer.zero_grad()
                loss(model.vector, local, generator).backward()
            result = sync.finish_step()
        assert result is not None and result.noise_scale is not None
        found.append(result.noise_scale)
    return statistics.median(found)


def measured_all(cases: list[tuple[str, float, int, int]]) -> list[float]:
    return [measured(*case) for case in cases]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_phi_within_ten_percent_for_every_split(world: int) -> None:
    """Accumulation 1 to 4 at phi / M of 0.3, 1, 3 and 1; one replica without accumulation is differenced."""
    cases = []
    for micro_batches, ratio, problem in [
        (1, 0.3, "regression"),
        (2, 1.0, "quadratic"),
        (3, 3.0, "regression"),
        (4, 1.0, "quadratic"),
    ]:
        local = 480 // (world * micro_batches)
        cases.append((problem, ratio * local * world * micro_batches, local, micro_batches))
    found = run_gang(world, measured_all, cases) if world > 1 else [measured_all(cases)]
    for rank in found:
        for (problem, phi, _, micro_batches), got in zip(cases, rank, strict=True):
            assert got == pytest.approx(phi, rel=0.1), (problem, micro_batches)


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_phi_from_differences_of_consecutive_gradients(ratio: float) -> None:
    assert measured("quadratic", ratio * 64, 64, 1) == pytest.approx(ratio * 64, rel=0.1)


def run_micro_batches(sizes: list[int], kind: str, steps: int = 4) -> list[tuple[float, float] | None]:
    """Trains on the same micro-batches, dealt to ranks in turn; (sqr, var) of each step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    sync = GradientSync(model, [optimizer], sample_every=1)
    generator = torch.Generator().manual_seed(6)
    per_rank = len(sizes) // world
    found: list[tuple[float, float] | None] = []
    for _ in range(steps):
        data = torch.randn(sum(sizes), 8, generator=generator, dtype=torch.float64)
        parts = data.split(sizes)
        sync.start_step(micro_batches=per_rank, step_samples=sum(sizes))
        for j in range(per_rank):
            x = parts[rank * per_rank + j]
            sync.start_micro_batch(num_samples=len(x), last=j == per_rank - 1)
            optimizer.zero_grad()
            (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        result = sync.finish_step()
        optimizer.step()
        known = result.grad_sqr is not None and result.grad_var is not None
        found.append((result.grad_sqr, result.grad_var) if known else None)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [7, 2, 5, 2]], ids=str)
def test_the_same_micro_batches_give_the_same_estimates_however_they_are_split(
    kind: str, sizes: list[int]
) -> None:
    want = run_micro_batches(sizes, kind)
    assert (want[0] is None) == (kind != "SGD")
    for world in (2, 4):
        for found in run_gang(world, run_micro_batches, sizes, kind):
            for got, expected in zip(found, want, strict=True):
                assert (got is None) == (expected is None)
                if got is not None and expected is not None:
                    assert got == pytest.approx(expected, rel=1e-6)


def adams_diagonal(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter] | list[Tensor], *, beta2: float, eps: float
) -> Tensor:
    """Over all parameters, behind a step whose squares are each parameter's average."""
    parts = []
    for param in params:
        state = optimizer.state[param]
        moment, steps = state["exp_avg_sq"], float(state["step"])
        moment = beta2 * moment + (1 - beta2) * moment.mean() / (1 - beta2**steps)
        parts.append((1 / ((moment / (1 - beta2 ** (steps + 1))).sqrt() + eps)).flatten())
    return torch.cat(parts)


def test_adam_preconditioning_against_an_explicit_computation() -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), eps=1e-6)
    sync = GradientSync(model, [optimizer], sample_every=1)
    sizes = [3, 5]
    x = torch.randn(8, 5, dtype=torch.float64)
    parts = x.split(sizes)
    for step in range(SETTLED_STEPS + 1):
        gradients = [
            torch.cat(
                [g.flatten() for g in torch.autograd.grad(model(p).square().mean(), list(model.parameters()))]
            )
            for p in parts
        ]
        diagonal = None
        if step == SETTLED_STEPS:
            diagonal = adams_diagonal(optimizer, list(model.parameters()), beta2=0.99, eps=1e-6)
        sync.start_step(micro_batches=2, step_samples=8)
        for j, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            sync.start_micro_batch(num_samples=size, last=j == 1)
            optimizer.zero_grad()
            model(part).square().mean().backward()
        result = sync.finish_step()
        optimizer.step()
    assert diagonal is not None
    first, other = (gradient * diagonal for gradient in gradients)
    mean = (3 * first + 5 * other) / 8
    var = float(3 * (first - mean).square().sum() + 5 * (other - mean).square().sum())
    assert result.grad_var == pytest.approx(var, rel=1e-9)
    assert result.grad_sqr == pytest.approx(max(float(mean.square().sum()) - var / 8, 0.0), rel=1e-9)


def test_steps_of_one_and_of_several_micro_batches_in_turn_under_adam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P is kept for some steps, and parameters lie in another order where there are several micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    params: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-4)
    sync = GradientSync(model, [optimizer], sample_every=1)
    seen: list[NoiseSample] = []
    monkeypatch.setattr(sync.noise, "update", seen.append)
    before = known = torch.zeros(0)
    for step in range(60):
        sizes = [3, 5] if step % 3 == 0 else [8]
        seen.clear()
        sync.start_step(micro_batches=len(sizes), step_samples=8)
        vectors = []
        for j, size in enumerate(sizes):
            x = torch.randn(size, 6, dtype=torch.float64)
            loss = (model(x)[:, 0] * 100 - 1).square().mean() + model(x)[:, 1].mean()
            gradients = torch.autograd.grad(loss, params, retain_graph=True)
            vectors.append(torch.cat([gradient.flatten() for gradient in gradients]))
            sync.start_micro_batch(num_samples=size, last=j == len(sizes) - 1)
            optimizer.zero_grad()
            loss.backward()
        sync.finish_step()
        if step < SETTLED_STEPS:
            optimizer.step()
            known = adams_diagonal(optimizer, params, beta2=0.999, eps=1e-8)
        pair = vectors if len(sizes) == 2 else [before, vectors[0]]
        weights = sizes if len(sizes) == 2 else [8, 8]
        before = vectors[-1]
        if step < 20 or step % 3 == 1:
            continue
        first, other = (vector * known for vector in pair)
        mean = (weights[0] * first + weights[1] * other) / sum(weights)
        (sample,) = seen
        assert sample.mean_sqr == pytest.approx(float(mean.square().sum()), rel=1e-9)
        want = weights[0] * float(first.square().sum()) + weights[1] * float(other.square().sum())
        assert sample.weighted_sqr_sum == pytest.approx(want, rel=1e-9)


@pytest.mark.filterwarnings("error")
def test_gradients_of_parameters_that_are_frozen_in_between_are_not_paired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory of earlier gradients, which had another size, is not taken for theirs either."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    sync = GradientSync(nn.Sequential(first, second), [optimizer], sample_every=1)
    seen: list[NoiseSample] = []
    monkeypatch.setattr(sync.noise, "update", seen.append)
    before: list[Tensor] = []
    for step in range(18):
        frozen, skips_bias = step // 3 % 2 == 1, step % 3 == 2
        first.requires_grad_(not frozen)
        sync.start_step(micro_batches=1, step_samples=8)
        sync.start_micro_batch(num_samples=8, last=True)
        optimizer.zero_grad()
        hidden = first(torch.randn(8, 4, dtype=torch.float64))
        (F.linear(hidden, second.weight) if skips_bias else second(hidden)).square().mean().backward()
        now = [p.grad.flatten() for p in (*first.parameters(), second.weight) if p.grad is not None]
        if second.bias.grad is not None:
            now.append(second.bias.grad.clone())
        seen.clear()
        sync.finish_step()
        if step % 3 == 0:
            assert not seen
        else:
            (sample,) = seen
            shared = min(len(before), len(now))
            mean = (torch.cat(before[:shared]) + torch.cat(now[:shared])) / 2
            assert sample.mean_sqr == pytest.approx(float(mean.square().sum()), rel=1e-12)
        before = [part.clone() for part in now]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "Adagrad", "RMSprop"])
def test_an_optimizer_that_begins_measures_as_one_that_has_settled(kind: str, micro_batches: int) -> None:
    """All elements have the same law, so P = I in the limit, and phi is the plain one.

    From its first gradient or two an element's P would be what chance makes of it, for hundreds of steps.
    """
    phi, found = 100.0, []
    start, loss = quadratic(phi)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        model = Weights(start)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-9)
        sync = GradientSync(model, [optimizer], sample_every=1)
        for _ in range(40):
            optimizer.zero_grad()
            sync.start_step(micro_batches=micro_batches, step_samples=32 * micro_batches)
            for number in range(micro_batches):
                sync.start_micro_batch(num_samples=32, last=number == micro_batches - 1)
                loss(model.vector, 32, generator).backward()  # type: ignore[no-untyped-call]
            result = sync.finish_step()
            optimizer.step()
        assert result.noise_scale is not None
        found.append(result.noise_scale)
    assert 0.5 * phi < min(found) and max(found) < 2 * phi, found
    assert statistics.median(found) == pytest.approx(phi, rel=0.25)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "Adagrad", "RMSprop"])
def test_elements_that_seldom_see_a_gradient_do_not_outweigh_the_others(kind: str) -> None:
    """Such as the embedding of a rare word: their v is 0, and 1 / eps would be their P."""
    torch.manual_seed(0)
    model = Weights(torch.ones(100))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-9)
    sync = GradientSync(model, [optimizer], sample_every=1)
    found = []
    for step in range(40):
        optimizer.zero_grad()
        sync.start_step(micro_batches=2, step_samples=64)
        for number in range(2):
            sync.start_micro_batch(num_samples=32, last=number == 1)
            gradient = 1 + torch.randn(100)
            if step != 30:
                gradient[90:] = 0.0
            (model.vector * gradient).sum().backward()  # type: ignore[no-untyped-call]
        result = sync.finish_step()
        optimizer.step()
        found.append((result.grad_sqr, result.grad_var))
    for before, after in zip(found[29], found[30], strict=True):
        assert before is not None and after is not None
        assert 0.3 < after / before < 3


def counted_steps(sample_every: int, steps: int) -> list[int]:
    """How many estimates there are after each step of one process without accumulation."""
    model = Weights(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = GradientSync(model, [optimizer], sample_every=sample_every)
    counts = []
    for step in range(steps):
        sync.start_step(micro_batches=1, step_samples=2)
        sync.start_micro_batch(num_samples=2, last=True)
        optimizer.zero_grad()
        (model.vector * step).square().sum().backward()
        sync.finish_step()
        counts.append(sync.noise.count)
    return counts


def test_noise_is_sampled_on_every_step_at_first_and_then_seldom() -> None:
    counts = counted_steps(sample_every=10, steps=61)
    assert counts[:21] == list(range(21))
    assert counts[30] == 21 and counts[40] == 22 and counts[60] == 24


def test_state_survives_a_checkpoint() -> None:
    model = Weights(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (GradientSync(model, [optimizer], sample_every=1) for _ in range(2))
    for step in range(3):
        first.start_step(micro_batches=1, step_samples=2)
        first.start_micro_batch(num_samples=2, last=True)
        optimizer.zero_grad()
        (model.vector * (step + 1)).square().sum().backward()
        first.finish_step()
    second.load_state_dict(first.state_dict())
    assert second.noise.noise_scale == first.noise.noise_scale is not None
    assert second.state_dict() == first.state_dict()

"""Mixed precision, clipping, several optimizers, compilation and batch normalisation under an ElasticJob."""

from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line
from gang import run_gang
from torch import nn

from pollux_agent.errors import DocumentError
from pollux_agent.torch import ElasticJob, training
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.tuner import Tuner

RANKS = pytest.mark.parametrize("ranks", [1, 2])


def two_layers() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def each(ranks: int, function: Any, *cases: tuple[Any, ...]) -> list[list[Any]]:
    """What ``function`` returns for each case, by case and then by rank; all cases on one gang."""
    return [list(answers) for answers in zip(*run_gang(ranks, all_cases, function, cases), strict=True)]


def all_cases(function: Any, cases: tuple[tuple[Any, ...], ...]) -> list[Any]:
    return [function(*case) for case in cases]


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


class Calls(torch.optim.lr_scheduler.LambdaLR):
    """Halves the rate at every step, as far as it is stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.5**step)


def scaled_training(poisoned_step: int, *, clip: bool, local: int, fused: bool = False) -> dict[str, Any]:
    """Train 8 steps with a GradScaler as torch's recipe has it; in one step the last rank's loss is inf."""
    from torch import distributed as dist

    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scheduler = Calls(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    job = ElasticJob(
        model,
        optimizer,
        Line(),
        batch_size=8,
        max_batch_size=8,
        max_local_batch_size=local,
        grad_scaler=scaler,
        lr_scheduler=scheduler,
    )
    noise = job._trained.sync.noise
    seen: list[tuple[int, float, float, int]] = []
    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in job.epochs(1):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(job.model(inputs).squeeze(1).float(), targets)
            if job.step == poisoned_step and last:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            seen.append((job.step, job.progress, optimizer.param_groups[0]["lr"], noise.count))
        if job.step >= 8:
            break
    return {"weights": weights(model), "seen": seen, "scale": scaler.get_scale(), "noise": noise.noise_scale}


@RANKS
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "unscaled and clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["by itself", "in a fused optimizer"])
def test_a_step_that_the_grad_scaler_skips_is_none_on_any_rank(ranks: int, clip: bool, fused: bool) -> None:
    (answers,) = each(ranks, skipping, (3, clip, fused))
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    assert answer["scale"] == 512.0
    assert all(abs(weight) < 10 for weight in answer["weights"])
    (*_, before), at, after = (answer["seen"][place] for place in (2, 3, 4))
    assert at[-1] == before, "the skipped step gave a noise sample"
    assert after[1:3] == at[1:3], "the skipped step moved progress or learning rate"
    assert answer["seen"][-1][:3] == (7, 6.0, 0.5**6 * 0.1)


def skipping(step: int, clip: bool, fused: bool) -> dict[str, Any]:
    return scaled_training(step, clip=clip, local=8, fused=fused)


def accumulating(clip: bool, local: int) -> dict[str, Any]:
    return scaled_training(-1, clip=clip, local=local)


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "unscaled and clipped"])
def test_accumulation_and_replicas_under_a_grad_scaler_train_as_one_batch_does(clip: bool) -> None:
    (whole,), *rest = each(1, accumulating, (clip, 8), (clip, 4), (clip, 2))
    for answer in chain.from_iterable(rest + each(2, accumulating, (clip, 4), (clip, 1))):
        assert answer["weights"] == pytest.approx(whole["weights"], abs=2e-3)  # bfloat16 rounds by batch
        assert answer["scale"] == whole["scale"]


def test_a_scheduler_follows_progress_and_not_calls() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = Calls(optimizer)
    job = ElasticJob(
        model,
        optimizer,
        Line(40),
        batch_size=16,
        max_batch_size=16,
        max_local_batch_size=4,
        lr_scheduler=scheduler,
    )
    rates = []
    for _ in job.epochs(2):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert job.progress == pytest.approx(5)
    assert rates == [0.25, 1 / 32]  # 2.5 steps of size M0, then 5


def test_a_scheduler_that_knows_no_more_steps_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step goes beyond the target, 7.5 steps of size M0: the third one makes it 9."""
    fixed = BatchPlan(batch_size=16, micro_batches=2)
    monkeypatch.setattr(Tuner, "choose", lambda *args, **kwargs: fixed)
    monkeypatch.setattr(training, "progress_of_step", lambda *args, batch_size, **kwargs: batch_size / 4)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=7)
    job = ElasticJob(model, optimizer, Line(20), batch_size=4, lr_scheduler=scheduler)
    plain_pass(job, optimizer, 1.5)
    assert job.complete
    assert (job.progress, scheduler.last_epoch) == (9.0, 7)


def test_a_scheduler_of_steps_goes_on_after_a_restart(tmp_path: Any) -> None:
    rates = []
    for epochs in (1, 2):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = Calls(optimizer)
        job = ElasticJob(
            model,
            optimizer,
            Line(16),
            batch_size=8,
            max_batch_size=8,
            lr_scheduler=scheduler,
            checkpoint_dir=tmp_path,
        )
        plain_pass(job, optimizer, epochs)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.0625]


def plain_pass(job: ElasticJob, optimizer: torch.optim.Optimizer, epochs: float = 1) -> None:
    for _ in job.epochs(epochs):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()


def several_optimizers(local: int) -> list[float]:
    """One optimizer with two parameter groups and another one, both stepped in each turn of the loop."""
    model = two_layers()
    first = torch.optim.SGD(
        [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias], "lr": 0.01}], momentum=0.9
    )
    second = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    job = ElasticJob(
        model, [first, second], Line(), batch_size=8, max_batch_size=8, max_local_batch_size=local
    )
    for _ in job.epochs(1):
        for inputs, targets, _ in job.loader:
            first.zero_grad()
            second.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            first.step()
            second.step()
    assert job.step == 8
    return weights(model)


def test_several_optimizers_and_groups_train_the_same_on_any_split() -> None:
    (whole,), *rest = each(1, several_optimizers, (8,), (2,))
    for answer in chain.from_iterable(rest + each(2, several_optimizers, (4,), (2,))):
        assert answer == pytest.approx(whole, abs=1e-5)


class Sometimes(nn.Module):
    """``odd`` is used for some samples alone, and ``never`` not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.even, self.odd, self.never = (nn.Linear(3, 1) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = inputs[:, 0] > 1
        hidden = self.even(inputs)
        return torch.where(chosen[:, None], self.odd(inputs), hidden) if chosen.any() else hidden


def unused(local: int) -> tuple[list[float], bool]:
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    job = ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, max_local_batch_size=local)
    plain_pass(job, optimizer)
    return weights(model), model.never.weight.grad is None


def test_parameters_that_only_some_samples_use_are_trained_the_same_on_any_split() -> None:
    ((whole, _),), *rest = each(1, unused, (8,), (2,))
    for answer, never_has_no_gradient in chain.from_iterable(rest + each(2, unused, (4,), (1,))):
        assert answer == pytest.approx(whole, abs=1e-6)
        assert never_has_no_gradient


def moved(local: int, move: bool) -> list[float]:
    """Train on a model that is taken elsewhere and back between steps, as an evaluation may do."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = ElasticJob(model, optimizer, Line(), batch_size=8, max_batch_size=8, max_local_batch_size=local)
    if move:
        job.on_step(lambda: model.double().float() and None)
    plain_pass(job, optimizer)
    return weights(model)


def test_a_model_that_is_moved_between_steps_trains_on() -> None:
    (want,), *rest = each(1, moved, (8, False), (8, True), (2, True))
    for got in chain.from_iterable(rest + each(2, moved, (4, True), (2, True))):
        assert got == pytest.approx(want, abs=1e-6)


def compiled(backend: str, local: int) -> list[float]:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = torch.compile(model, backend=backend) if backend else model
    job = ElasticJob(run, optimizer, Line(), batch_size=8, max_batch_size=8, max_local_batch_size=local)
    plain_pass(job, optimizer)
    return weights(model)


def test_a_compiled_model_trains_as_an_eager_one_does() -> None:
    backend = "aot_eager"
    (want,), *rest = each(1, compiled, ("", 8), (backend, 8), (backend, 2))
    for got in chain.from_iterable(rest + each(2, compiled, (backend, 4), (backend, 2))):
        assert got == pytest.approx(want, abs=1e-6)


def test_a_checkpoint_of_a_compiled_model_fits_the_eager_one(tmp_path: Any) -> None:
    found = []
    for epochs, compile_it in ((1, True), (2, False)):
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend="eager") if compile_it else model
        job = ElasticJob(run, optimizer, Line(), batch_size=8, max_batch_size=8, checkpoint_dir=tmp_path)
        plain_pass(job, optimizer, epochs)
        found.append(job.steps_taken)
    assert found == [8, 8]


def test_a_model_that_averages_by_itself_is_refused() -> None:
    model = nn.DataParallel(two_layers())
    with pytest.raises(DocumentError, match="wrapped in DataParallel"):
        ElasticJob(model, torch.optim.SGD(model.parameters(), lr=0.1), Line(), batch_size=8)


def normalised(num_samples: int, batch_size: int, local: int) -> dict[str, Any]:
    """A pass of a model with batch normalisation over data that leaves few samples for the last step."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    sizes: list[int] = []
    model[1].register_forward_hook(lambda module, inputs, output: sizes.append(len(output)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(
        model,
        optimizer,
        Line(num_samples),
        batch_size=batch_size,
        max_batch_size=batch_size,
        max_local_batch_size=local,
    )
    plain_pass(job, optimizer)
    return {
        "progress": job.progress,
        "sizes": sizes,
        "weights": weights(model),
        "statistics": [float(buffer.sum()) for buffer in model.buffers()],
    }


@pytest.mark.parametrize(
    ("ranks", "num_samples", "batch_size", "local"),
    [(1, 9, 8, 8), (1, 9, 8, 4), (2, 17, 8, 4), (2, 11, 8, 2), (2, 19, 16, 4), (3, 13, 12, 4)],
)
def test_with_batch_normalisation_no_forward_pass_gets_a_single_sample(
    ranks: int, num_samples: int, batch_size: int, local: int
) -> None:
    (answers,) = each(ranks, normalised, (num_samples, batch_size, local))
    for answer in answers:
        assert min(answer["sizes"]) >= 2
        assert max(answer["sizes"]) <= local
        assert answer["progress"] == pytest.approx(num_samples / batch_size)
        assert answer["weights"] == answers[0]["weights"]
        assert answer["statistics"] == answers[0]["statistics"]

"""A checkpoint meets a script whose optimizer is not what it was: another class, number, or other options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line, linear_model
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from pollux_agent.errors import CheckpointError
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.saver import Saver

Made = Callable[[nn.Module], Optimizer | list[Optimizer]]


class OwnSGD(SGD):
    """As scripts derive one."""


def job_of(kept: Path, made: Made, **arguments: Any) -> ElasticJob:
    model = linear_model()
    return ElasticJob(
        model, made(model), Line(), batch_size=8, max_batch_size=8, checkpoint_dir=kept, **arguments
    )


def train(job: ElasticJob, epochs: float) -> None:
    optimizers = job._trained.optimizers
    for _ in job.epochs(epochs):
        for inputs, targets, _ in job.loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            for optimizer in optimizers:
                optimizer.step()


def plain(kind: type[Optimizer], **options: Any) -> Made:
    return lambda model: kind(model.parameters(), **({"lr": 0.01} | options))


def forget_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save as agents did that knew nothing of it."""
    gather = Saver._gather

    def older(saver: Saver) -> dict[str, Any]:
        return {name: value for name, value in gather(saver).items() if name != "given"}

    monkeypatch.setattr(Saver, "_gather", older)


@pytest.mark.parametrize(
    ("before", "now"),
    [(SGD, Adam), (Adam, SGD), (Adam, Adamax), (Adam, RAdam), (AdamW, NAdam), (RMSprop, Adagrad)],
    ids=lambda kind: kind.__name__,
)
def test_another_class_is_named_with_the_fix(
    before: type[Optimizer], now: type[Optimizer], tmp_path: Path
) -> None:
    train(job_of(tmp_path, plain(before)), 0.5)
    with pytest.raises(CheckpointError) as error:
        job_of(tmp_path, plain(now))
    assert f"its optimizer is a {before.__name__}, the script's a {now.__name__}" in str(error.value)
    assert "another place for checkpoints" in str(error.value)


@pytest.mark.parametrize(("before", "now"), [(SGD, Adam), (Adam, SGD)], ids=lambda kind: kind.__name__)
def test_another_class_than_in_a_checkpoint_of_an_older_agent(
    before: type[Optimizer], now: type[Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_what_was_given(monkeypatch)
    train(job_of(tmp_path, plain(before)), 0.5)
    with pytest.raises(CheckpointError, match=f"another class, the script's a {now.__name__}.*it has no "):
        job_of(tmp_path, plain(now))


@pytest.mark.parametrize("made", [plain(SGD, momentum=0.9), plain(Adam)], ids=["SGD", "Adam"])
def test_a_checkpoint_of_an_older_agent_is_gone_on_with(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        forget_what_was_given(patch)
        train(job_of(tmp_path, made), 1)
    job = job_of(tmp_path, made)
    assert job.step == 8
    train(job, 2)
    assert job.step == 16
    assert not caplog.records


@pytest.mark.parametrize(("before", "now"), [(SGD, OwnSGD), (OwnSGD, SGD)], ids=lambda kind: kind.__name__)
def test_a_derived_class_goes_on(before: type[Optimizer], now: type[Optimizer], tmp_path: Path) -> None:
    train(job_of(tmp_path, plain(before, momentum=0.9)), 1)
    job = job_of(tmp_path, plain(now, momentum=0.9))
    train(job, 2)
    assert job.step == 16


def two(model: nn.Module) -> list[Optimizer]:
    return [SGD([model.weight], lr=0.01), SGD([model.bias], lr=0.02)]  # type: ignore[list-item]


def two_groups(model: nn.Module) -> Optimizer:
    return SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}], lr=0.01)


@pytest.mark.parametrize("older", [False, True], ids=["now", "older agent"])
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (plain(SGD), two, "it has 1 optimizers, the script 2"),
        (two, plain(SGD), "it has 2 optimizers, the script 1"),
        (plain(SGD), two_groups, "its optimizer 0 has 1 param_groups, the script's 2"),
        (two_groups, plain(SGD), "its optimizer 0 has 2 param_groups, the script's 1"),
    ],
    ids=["one, then two", "two, then one", "a group, then two", "two groups, then one"],
)
def test_another_number_is_told(
    before: Made, now: Made, said: str, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older:
        forget_what_was_given(monkeypatch)
    job_of(tmp_path, before).finish()
    with pytest.raises(CheckpointError, match=said):
        job_of(tmp_path, now)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (plain(SGD, lr=0.1), plain(SGD, lr=0.01), ["lr 0.1 instead of the script's 0.01"]),
        (
            plain(SGD, weight_decay=0.1, momentum=0.9),
            plain(SGD, weight_decay=0.0, momentum=0.8),
            ["weight_decay 0.1 instead of the script's 0.0", "momentum 0.9 instead of the script's 0.8"],
        ),
        (
            plain(Adam, betas=(0.9, 0.99)),
            plain(Adam, betas=(0.8, 0.99)),
            ["betas [0.9, 0.99] instead of the script's [0.8, 0.99]"],
        ),
        (
            two_groups,
            lambda model: SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.01),
            ["lr 0.02 instead of the script's 0.01 (optimizer 0, group 1)"],
        ),
        (
            plain(AdamW),
            plain(Adam, weight_decay=0.01),
            ["decoupled_weight_decay True instead of the script's False"],
        ),
    ],
    ids=["lr", "weight decay and momentum", "betas", "one group", "AdamW by Adam"],
)
def test_options_that_the_checkpoint_overrules_are_told_once(
    before: Made, now: Made, said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(job_of(tmp_path, before), 1)
    job = job_of(tmp_path, now)
    (warning,) = caplog.messages
    assert all(each in warning for each in said)
    assert warning.count("instead of") == len(said)
    assert "optimizer.param_groups" in warning
    train(job, 2)
    assert caplog.messages == [warning]


def test_the_checkpoints_rate_holds_until_the_script_sets_it_behind_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(job_of(tmp_path, plain(SGD, lr=0.1)), 1)
    job = job_of(tmp_path, plain(SGD, lr=0.01))
    (group,) = job._trained.optimizers[0].param_groups
    assert group["lr"] == 0.1
    group["lr"] = 0.01
    train(job, 2)
    caplog.clear()
    job = job_of(tmp_path, plain(SGD, lr=0.01))
    assert job._trained.optimizers[0].param_groups[0]["lr"] == 0.01
    assert not caplog.records


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: StepLR(optimizer, 3),
        lambda optimizer: LambdaLR(optimizer, lambda step: step / 100),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=100),
    ],
    ids=["falls", "warms up", "one cycle of rate and momentum"],
)
def test_a_rate_that_a_scheduler_has_moved_is_no_difference(
    scheduler: Callable[[Optimizer], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs in (1, 2):
        model = linear_model()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        job = ElasticJob(
            model,
            optimizer,
            Line(),
            batch_size=8,
            max_batch_size=8,
            lr_scheduler=scheduler(optimizer),
            checkpoint_dir=tmp_path,
        )
        train(job, epochs)
    assert job.step == 16
    assert not caplog.records


def test_a_rate_that_the_loop_itself_has_lowered_is_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(tmp_path, plain(SGD, lr=0.1))
    job._trained.optimizers[0].param_groups[0]["lr"] = 0.05
    train(job, 1)
    job = job_of(tmp_path, plain(SGD, lr=0.1))
    assert job._trained.optimizers[0].param_groups[0]["lr"] == 0.05
    assert not caplog.records


def test_what_the_script_keeps_besides_and_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    job_of(tmp_path, plain(SGD)).finish()
    with pytest.raises(CheckpointError, match=r"holds nothing of stateful\['ema'\]"):
        job_of(tmp_path, plain(SGD), stateful={"ema": linear_model()})


def test_what_was_given_is_safe_to_load(tmp_path: Path) -> None:
    """Rates may be tensors, as capturable optimizers want them."""
    job_of(tmp_path, plain(Adam, lr=torch.tensor(0.25))).finish()
    store = CheckpointStore(tmp_path)
    (saved,) = store.load(store.newest() or "")["given"]
    assert saved["classes"][0] == "Adam"
    assert saved["groups"][0]["lr"] == 0.25

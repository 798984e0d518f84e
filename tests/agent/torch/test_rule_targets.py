"""Learning-rate rules do what progress counts on: the same quality after the same progress, at any M."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pollux_agent.torch import ElasticJob
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.tuner import Tuner

EXAMPLES = Path(__file__).parents[3] / "agent" / "examples"
CPU = torch.device("cpu")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hold_batch(monkeypatch: pytest.MonkeyPatch, batch_size: int, micro_batches: int) -> None:
    """The tuner chooses this batch from the first step on."""

    def choose(self: Tuner, *args: Any, **kwargs: Any) -> BatchPlan:
        return BatchPlan(batch_size=batch_size, micro_batches=micro_batches)

    monkeypatch.setattr(Tuner, "choose", choose)


def digits_accuracy(
    monkeypatch: pytest.MonkeyPatch, scale: int, epochs: float, seed: int
) -> tuple[float, int]:
    """(validation accuracy, updates) after ``epochs`` statistical epochs with batches of 8 ``scale``."""
    digits = example("digits")
    hold_batch(monkeypatch, 8 * scale, 1 if scale == 1 else 2)
    torch.manual_seed(seed)
    train_set, validation = digits.load_data()
    model = digits.Net(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0125, momentum=0.9, weight_decay=1e-4)
    job = ElasticJob(
        model,
        optimizer,
        train_set,
        batch_size=8,
        max_local_batch_size=256,
        scaling_rule="adascale",
        lr_schedule=digits.decay,
        seed=seed,
    )
    for _ in job.epochs(epochs):
        for images, labels in job.loader:
            optimizer.zero_grad()
            F.cross_entropy(job.model(images), labels).backward()
            optimizer.step()
    return digits.accuracy(model, validation, CPU), job.step


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(int(os.environ.get("POLLUX_SEEDS", "1"))))
def test_digits_with_adascale_are_as_good_after_the_same_progress(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """At 4 and 16 times M0, with a fraction of the updates, at most 0.03 below M0's validation accuracy."""
    at_m0, updates = digits_accuracy(monkeypatch, 1, 4, seed)
    assert at_m0 > 0.93
    for scale, share in ((4, 0.5), (16, 0.3)):
        larger, fewer = digits_accuracy(monkeypatch, scale, 4, seed)
        assert larger >= at_m0 - 0.03, scale
        assert fewer < share * updates, scale


def language_loss(monkeypatch: pytest.MonkeyPatch, scale: int, epochs: float) -> tuple[float, int]:
    """(validation loss in nats a byte, updates) after ``epochs`` epochs' progress at M = 4 ``scale``."""
    language = example("language_model")
    hold_batch(monkeypatch, 4 * scale, 1 if scale == 1 else 2)
    torch.manual_seed(0)
    train_set, validation = language.load_data(32)
    model = language.Transformer(32, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = ElasticJob(model, optimizer, train_set, batch_size=4, max_local_batch_size=64, scaling_rule="sqrt")
    for _ in job.epochs(epochs):
        for inputs, targets in job.loader:
            optimizer.zero_grad()
            language.loss_of(job.model, inputs, targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return language.evaluate(model, validation, CPU), job.step


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_language_model_with_the_square_root_is_as_good_after_the_same_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 4 and 16 times M0, with a fraction of the updates, at most 0.15 nats a byte above M0's loss."""
    at_m0, updates = language_loss(monkeypatch, 1, 0.5)
    assert at_m0 < 2.5
    for scale, share in ((4, 0.5), (16, 0.2)):
        larger, fewer = language_loss(monkeypatch, scale, 0.5)
        assert larger <= at_m0 + 0.15, scale
        assert fewer < share * updates, scale

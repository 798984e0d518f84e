"""What a script may put in place of the built-in parts of its job."""

import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux_agent.errors import DocumentError
from pollux_agent.model.racks import RackThroughput
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.scaling import Legw


class Tripled:
    """A user's rule."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return 3.0


def small_job(**options: Any) -> tuple[ElasticJob, torch.optim.Optimizer]:
    """One over 64 samples with a learning rate of 0.1 at M0 = 4."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 3)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return ElasticJob(model, optimizer, data, batch_size=4, **options), optimizer


def train(
    job: ElasticJob,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    *,
    each_step: bool = False,
    **figures: float,
) -> None:
    """Logs ``figures`` behind each pass, and the loss with ``each_step``."""
    for _ in job.epochs(epochs):
        batch: tuple[Tensor, Tensor]
        for batch in job.loader:
            optimizer.zero_grad()
            loss = (job.model(batch[0]) - batch[1]).square().mean()
            loss.backward()
            optimizer.step()
            if each_step:
                job.log(loss=loss.item())
        if figures:
            job.log(**figures)


def rates(**options: Any) -> tuple[list[float], ElasticJob]:
    """The learning rate of every update of a small job."""
    job, optimizer = small_job(**options)
    seen: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    optimizer.register_step_pre_hook(note)
    train(job, optimizer, 3, each_step=True)
    return seen, job


def test_a_rule_of_ones_own_scales_every_update() -> None:
    seen, job = rates(scaling_rule=Tripled())
    assert seen == pytest.approx([0.3] * job.step)
    assert job.complete


def test_legw_warms_up_update_by_update() -> None:
    seen, _ = rates(scaling_rule=Legw(warm_up_steps=8), max_batch_size=4)
    assert seen[:10] == pytest.approx([0.1 * min(1.0, step / 8) for step in range(1, 11)])


def test_another_throughput_model_and_a_watched_loss_go_with_a_whole_training() -> None:
    seen, job = rates(throughput=RackThroughput(2), watch="loss", scaling_rule="linear")
    assert job.complete
    assert min(seen) == pytest.approx(0.1)


class Rule:
    """Gives what it is made with."""

    def __init__(self, factor: Any) -> None:
        self.given = factor

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> Any:
        return self.given


class NoNoise:
    """Its signature lacks a keyword."""

    def factor(self, batch_size: int, initial_batch_size: int) -> float:
        return 1.0


NO_RULES = [
    (3, "scaling_rule: 3 has no method `factor`"),
    (None, "scaling_rule: None has no method `factor`"),
    (Tripled, r"scaling_rule: Tripled is a class; give an object, Tripled\(\)"),
    (NoNoise(), r"scaling_rule: NoNoise.factor\(.*cannot be called .*noise_scale"),
]


@pytest.mark.parametrize(("given", "said"), NO_RULES, ids=["number", "None", "class", "signature"])
def test_what_is_no_rule_is_refused_before_training(given: Any, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        small_job(scaling_rule=given)


@pytest.mark.parametrize("factor", ["2", None, math.nan, 0.0, -1.0, math.inf, torch.ones(2), {}], ids=repr)
def test_a_factor_that_is_no_positive_number_is_named_with_its_rule(factor: Any) -> None:
    said = f"scaling_rule: Rule gave {re.escape(repr(factor))} for batch_size=4, .*above 0"
    with pytest.raises(DocumentError, match=said):
        rates(scaling_rule=Rule(factor))


@pytest.mark.parametrize("factor", [3, np.float32(3), torch.tensor(3.0), Fraction(3)], ids=repr)
def test_a_factor_may_be_a_number_of_any_kind(factor: Any) -> None:
    seen, job = rates(scaling_rule=Rule(factor))
    assert seen == pytest.approx([0.3] * job.step)


class Fits:
    """A throughput model that gives what it is made with; counts how often it is asked."""

    def __init__(self, fitted: Any) -> None:
        self.fitted, self.asked = fitted, 0

    def fit(self, profile: Any, prior: Any = None) -> Any:
        self.asked += 1
        if isinstance(self.fitted, Exception):
            raise self.fitted
        return self.fitted


class Times:
    """Step times as they are given, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def step_time(self, num_nodes: Any, num_replicas: Any, local: Any, steps: Any = 0) -> Any:
        return self.seconds * np.asarray(local) * (np.asarray(steps) + 1)

    def node_class(self, num_nodes: Any) -> Any:
        return np.asarray(num_nodes)


class BreaksOff(Times):
    """Answers for few samples alone, as a table does that ends somewhere."""

    def __init__(self) -> None:
        super().__init__(0.001)
        self.asked = 0

    def node_class(self, num_nodes: Any) -> Any:
        self.asked += 1
        if self.asked > 1:
            raise KeyError("no such placement")
        return np.asarray(num_nodes)


class BreaksAtOnce(Times):
    def __init__(self) -> None:
        super().__init__(0.001)

    def step_time(self, num_nodes: Any, num_replicas: Any, local: Any, steps: Any = 0) -> Any:
        raise KeyError(num_nodes)


class Half:
    """Lacks ``node_class``."""

    step_time = Times.step_time


class NoProfile:
    def fit(self) -> None:
        return None


NO_MODELS = [
    (RackThroughput, r"throughput: RackThroughput is a class; give an object, RackThroughput\(\)"),
    ("racks", "throughput: 'racks' has no method `fit`"),
    (Times(1.0), "throughput: .*Times object.* has no method `fit`"),
    (NoProfile(), r"throughput: NoProfile.fit\(.*cannot be called with a profile"),
]


@pytest.mark.parametrize(("given", "said"), NO_MODELS, ids=["class", "name", "fitted", "signature"])
def test_what_cannot_be_fitted_is_refused_before_training(given: Any, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        small_job(throughput=given)


NO_FITS = [
    ({"a": 1.0}, "which has no method step_time and no method node_class"),
    (Half(), "which has no method node_class"),
    (Times(math.nan), "whose step_time gives nan s"),
    (Times(-1.0), "whose step_time gives -1.0 s"),
    (Times, "which is a class"),
    (BreaksAtOnce(), "which cannot be asked: KeyError"),
    (BreaksOff(), "its fit cannot be asked for the best batch: KeyError"),
    (ZeroDivisionError("no points"), "it cannot be fitted: ZeroDivisionError"),
]


@pytest.mark.parametrize(("fitted", "said"), NO_FITS, ids=[said for _, said in NO_FITS])
def test_a_fit_that_cannot_be_used_is_named_once_and_training_goes_on(
    fitted: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Fits(fitted)
    job, optimizer = small_job(throughput=model, scaling_rule="none")
    train(job, optimizer, 12)
    assert job.complete
    assert model.asked > 1
    (warning,) = [each.getMessage() for each in caplog.records if "throughput" in each.getMessage()]
    assert warning.startswith("throughput: Fits is not used: ")
    assert said in warning


@pytest.mark.parametrize(
    ("others", "found"), [({"cost": 1.0, "acc": 0.5}, "only cost, acc were"), ({}, "nothing was")], ids=repr
)
def test_a_watched_figure_that_a_pass_ends_without_is_named_once(
    others: dict[str, float], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    job, optimizer = small_job(watch="losss", max_batch_size=4)
    train(job, optimizer, 2, **others)
    (warning,) = [each.getMessage() for each in caplog.records if "losss" in each.getMessage()]
    assert warning.startswith(f"watch: 'losss' was not logged in 16 steps, {found}; ")


def test_a_watched_figure_may_be_logged_behind_the_pass(caplog: pytest.LogCaptureFixture) -> None:
    job, optimizer = small_job(watch="loss")
    train(job, optimizer, 2, loss=1.0)
    assert "watch" not in caplog.text


@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["large", "negative"])
def test_a_number_that_is_no_float_is_not_logged_but_named(value: int) -> None:
    job, _ = small_job()
    with pytest.raises(DocumentError, match="log: acc is beyond what a float holds; give a number"):
        job.log(acc=value)


@pytest.mark.parametrize("value", ["x", "1.0", None, torch.ones(2), {}], ids=repr)
def test_what_is_no_number_is_not_logged_but_named(value: Any) -> None:
    job, _ = small_job()
    with pytest.raises(DocumentError, match=f"log: acc is {re.escape(repr(value))}; give a number"):
        job.log(loss=torch.tensor(1.0), acc=value)

"""P read from each optimizer's state against the update that the optimizer itself makes."""

from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.utils.data import TensorDataset

from pollux_agent.errors import DocumentError
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.flat import dot, pack
from pollux_agent.torch.precondition import (
    SETTLED_STEPS,
    Identity,
    Metric,
    Preconditioner,
    preconditioner,
)


def stepped(kind: type[optim.Optimizer], **options: Any) -> tuple[list[Tensor], optim.Optimizer]:
    """Two parameters after three steps on random gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, 4, generator=generator).double()) for _ in range(2)]
    optimizer = kind(params, lr=0.01, **options)
    for _ in range(SETTLED_STEPS):
        for param in params:
            param.grad = torch.randn(3, 4, generator=generator).double()
        optimizer.step()
    return params, optimizer


def explicit(kind: type[optim.Optimizer], state: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The papers' diagonals, one parameter at a time, behind a step with the parameter's average square."""
    steps = SETTLED_STEPS
    if issubclass(kind, optim.Adagrad):
        return 1 / ((state["sum"] + state["sum"].mean() / steps).sqrt() + 1e-10)
    if issubclass(kind, optim.RMSprop):
        square = state["square_avg"]
        if options.get("centered"):
            square = square - state["grad_avg"] ** 2
        return 1 / ((0.99 * square + 0.01 * square.mean() / (1 - 0.99**steps)).sqrt() + 1e-8)
    moment = state["max_exp_avg_sq"] if options.get("amsgrad") else state["exp_avg_sq"]
    moment = 0.999 * moment + 0.001 * moment.mean() / (1 - 0.999**steps)
    return 1 / ((moment / (1 - 0.999 ** (steps + 1))).sqrt() + 1e-8)


def squared_norm(
    params: list[Tensor],
    optimizer: optim.Optimizer,
    gradient: dict[int, Tensor],
    custom: Preconditioner | None = None,
) -> float:
    """|P x|^2 of the gradients by their parameter's number, with all parameters in one flat tensor."""
    numbers = list(range(len(params)))[::-1]
    own = [params[number] for number in numbers]
    flat = torch.empty(sum(param.numel() for param in own), dtype=own[0].dtype)
    pack(flat, own, [gradient.get(number) for number in numbers])
    metric = Metric(params, [(optimizer, custom or preconditioner(optimizer))], [numbers])
    assert metric.known
    return float(metric.norm([flat]))


CASES = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.NAdam, {}),
    (optim.Adagrad, {}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"centered": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_norm_under_the_optimizers_diagonal(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    params, optimizer = stepped(kind, **options)
    gradient = {number: torch.full((3, 4), 0.5 + number).double() for number in range(2)}
    want = sum(
        float((explicit(kind, optimizer.state[param], options) * gradient[number]).square().sum())
        for number, param in enumerate(params)
    )
    assert squared_norm(params, optimizer, gradient) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
def test_sgd_measures_plain_gradients(options: dict[str, Any]) -> None:
    params, optimizer = stepped(optim.SGD, **options)
    assert squared_norm(params, optimizer, {1: torch.full((3, 4), 2.0)}) == pytest.approx(48.0)


@pytest.mark.parametrize("kind", [optim.Adam, optim.Adagrad, optim.RMSprop])
def test_before_some_steps_p_is_not_known(kind: type[optim.Optimizer]) -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = kind(params)
    for _ in range(SETTLED_STEPS):
        assert not Metric(params, [(optimizer, preconditioner(optimizer))], [[0]]).known
        params[0].grad = torch.ones(2)
        optimizer.step()
    assert Metric(params, [(optimizer, preconditioner(optimizer))], [[0]]).known


def test_a_parameter_without_state_is_left_out() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = optim.Adam(params)
    params[0].grad = torch.ones(2)
    for _ in range(SETTLED_STEPS):
        optimizer.step()
    both = squared_norm(params, optimizer, {0: torch.ones(2), 1: torch.ones(2)})
    assert both == pytest.approx(squared_norm(params, optimizer, {0: torch.ones(2)}))


class Doubling:
    """P = 2 I."""

    needs_state = False

    def diagonal(self, optimizer: Any, group: Any, params: Any) -> list[Tensor]:
        return [torch.full((), 2.0) for _ in params]


def test_a_custom_preconditioner_is_used_for_its_class() -> None:
    params, optimizer = stepped(optim.SGD)
    custom = preconditioner(optimizer, {optim.SGD: Doubling()})
    assert squared_norm(params, optimizer, {0: torch.ones(3, 4)}, custom) == pytest.approx(48)


def test_an_unknown_optimizer_is_taken_plain_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    found = preconditioner(optim.ASGD(params))
    assert isinstance(found, Identity)
    assert "ASGD" in caplog.text


def test_norms_of_half_precision_do_not_overflow() -> None:
    half = torch.full((100,), 1000.0, dtype=torch.float16)
    assert float(dot(half, half)) == pytest.approx(1e8)


class Stateless:
    """Lacks ``needs_state``."""

    def diagonal(self, optimizer: Any, group: Any, params: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Doubling()], "preconditioners: .* is no mapping"),
        ({"ASGD": Doubling()}, "preconditioners: the key 'ASGD' is no class of optimizers"),
        ({optim.ASGD: Doubling}, r"preconditioners\[ASGD\]: Doubling is a class; give an object"),
        ({optim.ASGD: 2.0}, r"preconditioners\[ASGD\]: 2.0 has no method `diagonal`"),
        ({optim.ASGD: Stateless()}, r"preconditioners\[ASGD\]: .* has no `needs_state`"),
    ],
    ids=["list", "name", "class", "number", "stateless"],
)
def test_a_job_refuses_what_is_no_preconditioner(given: Any, said: str) -> None:
    with pytest.raises(DocumentError, match=said):
        job_of(optim.ASGD, preconditioners=given)


def job_of(kind: type[optim.Optimizer], **options: Any) -> ElasticJob:
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.ones(8, 2))
    return ElasticJob(model, kind(model.parameters(), lr=0.1), data, batch_size=4, **options)


def test_a_job_measures_with_the_preconditioner_that_it_was_given(caplog: pytest.LogCaptureFixture) -> None:
    """phi is the ratio of two norms under P: P = 2 I leaves it, and |P g|^2 is four times |g|^2."""
    seen = {}
    for name, options in (("plain", {}), ("doubled", {"preconditioners": {optim.ASGD: Doubling()}})):
        torch.manual_seed(3)
        job = job_of(optim.ASGD, max_batch_size=4, max_local_batch_size=2, **options)
        (optimizer,) = job._trained.optimizers
        for _ in job.epochs(6):
            for (inputs,) in job.loader:
                optimizer.zero_grad()
                (job.model(inputs) * torch.rand(len(inputs), 1)).mean().backward()
                optimizer.step()
        seen[name] = job._trained.sync.noise
    assert seen["doubled"].grad_sqr == pytest.approx(4 * seen["plain"].grad_sqr)
    assert seen["doubled"].noise_scale == pytest.approx(seen["plain"].noise_scale)
    assert caplog.text.count("no preconditioner is known for ASGD") == 1


class Misshapen:
    """Gives what it is made with."""

    needs_state = False

    def __init__(self, *shapes: int) -> None:
        self.shapes = shapes

    def diagonal(self, optimizer: Any, group: Any, params: Any) -> list[Tensor]:
        return [torch.ones(shape) for shape in self.shapes]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Misshapen(4), "gave 1 diagonals for 2 parameters"),
        (Misshapen(3, 4), r"a diagonal has shape \(3,\), its parameter \(3, 4\)"),
    ],
    ids=["too few", "shape"],
)
def test_a_diagonal_that_fits_no_parameter_is_named(given: Preconditioner, said: str) -> None:
    params, optimizer = stepped(optim.SGD)
    with pytest.raises(DocumentError, match=f"preconditioners: .*{said}"):
        squared_norm(params, optimizer, {0: torch.ones(3, 4)}, given)


class OwnLineSearch(optim.SGD):
    """Asks for a closure, as LBFGS does."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [optim.LBFGS, OwnLineSearch])
def test_an_optimizer_that_needs_a_closure_is_refused(kind: type[optim.Optimizer]) -> None:
    with pytest.raises(DocumentError, match=f"optimizer: {kind.__name__} needs a closure"):
        job_of(kind)


def test_one_optimizer_may_go_through_jobs_one_after_another() -> None:
    """As in a notebook, whose cell that makes the job is run again and again."""
    model = torch.nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(4):
        ElasticJob(model, optimizer, TensorDataset(torch.ones(8, 2)), batch_size=4)

"""Where reading a number means to wait for a GPU, a step's figures come one step later, and are the same."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from pollux_agent.torch.gradients import GradientSync, StepResult


def results(*, late: bool, micro_batches: int, factors: Sequence[float]) -> list[StepResult]:
    """Of a step for each of ``factors``, which the loss is multiplied by; the weights stay where they are."""
    torch.manual_seed(3)
    model = nn.Linear(5, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = GradientSync(model, [optimizer], sample_every=1, late=late)
    found = []
    for factor in factors:
        sync.start_step(micro_batches=micro_batches, step_samples=4 * micro_batches)
        for j in range(micro_batches):
            sync.start_micro_batch(num_samples=4, last=j == micro_batches - 1)
            optimizer.zero_grad()
            (factor * model(torch.randn(4, 5, dtype=torch.float64)).square().mean()).backward()
        found.append(sync.finish_step())
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_late_figures_are_those_of_the_step_before(micro_batches: int) -> None:
    at_once = results(late=False, micro_batches=micro_batches, factors=[1.0] * 6)
    late = results(late=True, micro_batches=micro_batches, factors=[1.0] * 6)
    assert late[0].noise_scale is None and at_once[-1].noise_scale is not None
    for before, after in zip(at_once, late[1:], strict=False):
        assert (after.noise_scale, after.grad_sqr, after.grad_var) == (
            before.noise_scale,
            before.grad_sqr,
            before.grad_var,
        )


def test_gradients_that_are_not_finite_are_no_noise_and_are_named_once_a_streak(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their updates are made, as torch makes them without a GradScaler: to know in time would be to wait."""
    nan = float("nan")
    late = results(late=True, micro_batches=2, factors=[1.0, nan, nan, nan, 1.0, nan, 1.0, 1.0])
    assert not any(each.skip for each in late)
    assert late[-1].noise_scale is not None
    assert [late[at].noise_scale for at in (2, 3, 4)] == [late[1].noise_scale] * 3
    assert caplog.text.count("not finite") == 2

"""Predicted against measured efficiency on the noisy quadratic, where both are known in closed form.

A sample's gradient is w plus noise of covariance sigma^2 I, so phi = d sigma^2 / |w|^2, and with AdaScale at
a small learning rate the steps that training takes to a target are those that the gains add up to.
"""

import numpy as np
import pytest
import torch
from torch import nn

from pollux_agent.model.efficiency import efficiency, gain
from pollux_agent.torch.gradients import GradientSync
from pollux_agent.torch.scaling import AdaScale

INITIAL, RATE, NOISE = 16, 0.02, 32.0


def expected_steps(batch_size: int, target: float, noise: float) -> tuple[int, float]:
    """(steps, sum of gains) until E|w|^2 <= target, by E|w|^2 <- (1 - eta)^2 E|w|^2 + eta^2 sigma^2 / M."""
    square, steps, progress = 1.0, 0, 0.0
    while square > target:
        step_gain = float(gain(noise / square, INITIAL, batch_size))
        eta = RATE * step_gain
        square = (1 - eta) ** 2 * square + eta**2 * noise / batch_size
        steps, progress = steps + 1, progress + step_gain
    return steps, progress


@pytest.mark.parametrize("noise", [0.0, 2.0, 8.0, NOISE])
@pytest.mark.parametrize("scale", [2, 4, 16])
def test_the_steps_that_the_gain_saves_are_saved(scale: int, noise: float) -> None:
    """The recurrence is exact in expectation: gain-weighted steps at M equal the steps at M0."""
    at_m0, _ = expected_steps(INITIAL, 0.1, noise)
    steps, predicted = expected_steps(INITIAL * scale, 0.1, noise)
    assert predicted == pytest.approx(at_m0, rel=0.1)
    mean_efficiency = predicted / steps / scale
    assert at_m0 / steps / scale == pytest.approx(mean_efficiency, rel=0.1)
    if noise == 0.0:
        assert steps == at_m0


def trained_steps(batch_size: int, micro_batches: int, seed: int, target: float = 0.1) -> tuple[int, float]:
    """(steps, sum of gains) of real training to |w|^2 <= target, with phi as the agent measures it."""
    dim = 200
    generator = torch.Generator().manual_seed(seed)
    model = nn.Module()
    model.vector = nn.Parameter(torch.full((dim,), dim**-0.5, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    sync = GradientSync(model, [optimizer], sample_every=1)
    rule, sigma = AdaScale(), (NOISE / dim) ** 0.5
    steps, progress, local = 0, 0.0, batch_size // micro_batches
    while float(model.vector.detach().square().sum()) > target and steps < 2000:
        sync.start_step(micro_batches=micro_batches, step_samples=batch_size)
        for j in range(micro_batches):
            sync.start_micro_batch(num_samples=local, last=j == micro_batches - 1)
            optimizer.zero_grad()
            samples = sigma * torch.randn(local, dim, generator=generator, dtype=torch.float64)
            (0.5 * (model.vector - samples).square().sum(dim=1).mean()).backward()
        noise_scale = sync.finish_step().noise_scale
        factor = rule.factor(batch_size=batch_size, initial_batch_size=INITIAL, noise_scale=noise_scale)
        optimizer.param_groups[0]["lr"] = RATE * factor
        optimizer.step()
        steps, progress = steps + 1, progress + factor
    return steps, progress


@pytest.mark.parametrize("scale", [4, 16])
def test_training_takes_the_steps_that_the_measured_noise_scale_predicts(scale: int) -> None:
    """Median over seeds of real trainings: predicted and measured ratio of steps agree within 10 %."""
    at_m0 = np.median([trained_steps(INITIAL, 2, seed)[0] for seed in range(5)])
    runs = np.array([trained_steps(INITIAL * scale, 4, seed) for seed in range(5)])
    measured = at_m0 / np.median(runs[:, 0])
    predicted = np.median(runs[:, 1] / runs[:, 0])
    assert predicted == pytest.approx(measured, rel=0.1)
    assert 1.0 < measured < scale


def test_without_noise_a_larger_batch_is_worth_nothing() -> None:
    """Equal samples: any batch takes the same steps, so 16 times M0 is a 16th as efficient."""
    assert float(efficiency(0.0, INITIAL, 16 * INITIAL)) == pytest.approx(1 / 16)

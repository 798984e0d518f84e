"""Learning-rate scaling rules: Pollux's plug-in SCALE_LR(M0, M) -> lambda, asked before every update."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from pollux_agent.errors import DocumentError
from pollux_agent.model.efficiency import gain


class ScalingRule(Protocol):
    """Gives the factor lambda by which the learning rate chosen for batch size M0 is multiplied."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        """Factor for the update about to be made with ``batch_size`` (M) samples; 1 at M = M0.

        ``noise_scale`` is the pre-conditioned gradient noise scale phi in samples, None while unknown.
        """
        ...


class AdaScale:
    """Gain of Johnson et al. 2020 (AdaScale SGD, eq. 3): the steps of size M0 that one of size M is worth.

    With sigma^2 = tr / M0 the variance of a gradient at M0 and S = M / M0, their
    r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2) is M / M0 * (phi + M0) / (phi + M), so it comes from the
    same function as the progress of a step.
    """

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        if noise_scale is None:
            return min(1.0, batch_size / initial_batch_size)
        return float(gain(noise_scale, initial_batch_size, batch_size))


class SquareRoot:
    """sqrt(M / M0): keeps the variance of an update, for Adam and its kin (Krizhevsky 2014)."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return math.sqrt(batch_size / initial_batch_size)


class Linear:
    """M / M0 (Goyal et al. 2017)."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return batch_size / initial_batch_size


class Unscaled:
    """1: the learning rate stays as the script set it."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return 1.0


RULES: Mapping[str, type[ScalingRule]] = MappingProxyType(
    {"adascale": AdaScale, "sqrt": SquareRoot, "linear": Linear, "none": Unscaled}
)
"""The rules by the names that a job spec uses."""


def rule(name: str) -> ScalingRule:
    """The rule called ``name``; raises DocumentError naming the known ones."""
    try:
        return RULES[name]()
    except KeyError:
        known = ", ".join(RULES)
        raise DocumentError(f"scaling_rule: no rule called {name!r}; use one of {known}") from None

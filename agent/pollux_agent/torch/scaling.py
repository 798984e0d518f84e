"""Learning-rate scaling rules: Pollux's plug-in SCALE_LR(M0, M) -> lambda, asked before every update."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from pollux_agent.errors import DocumentError
from pollux_agent.model.efficiency import step_gain
from pollux_agent.torch.own import check_own

WARM_UP_STEPS = 200
"""Length of LEGW's warm-up where a job spec names the rule: steps at M0."""


class ScalingRule(Protocol):
    """Gives the factor lambda by which the learning rate chosen for batch size M0 is multiplied.

    A script may give any object with this method as its rule.
    """

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        """Factor for the update about to be made with ``batch_size`` (M) samples; 1 at M = M0.

        ``noise_scale`` is the pre-conditioned gradient noise scale phi in samples, None while unknown.
        """
        ...


@runtime_checkable
class FollowsExamples(Protocol):
    """A rule that also depends on how far training is, so that it is asked anew for every update."""

    def follow(self, examples: Callable[[], int]) -> None:
        """Told once, before the first update, how to ask for the number of samples trained on so far."""
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
        return step_gain(noise_scale, initial_batch_size, batch_size)


class SquareRoot:
    """sqrt(M / M0): keeps the variance of an update, for Adam and its kin (Krizhevsky 2014)."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return math.sqrt(batch_size / initial_batch_size)


class Linear:
    """M / M0 (Goyal et al. 2017)."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return batch_size / initial_batch_size


class Legw:
    """Linear-epoch gradual warm-up (You et al. 2019): sqrt(M / M0), reached over M / M0 times the epochs.

    ``warm_up_steps`` is the length of the warm-up at M0 in steps, so it lasts warm_up_steps M samples: as
    many steps at every batch size. A batch that is raised later warms up for what is left of its length.
    Raises DocumentError for a negative length.
    """

    def __init__(self, warm_up_steps: int = WARM_UP_STEPS) -> None:
        if warm_up_steps < 0:
            raise DocumentError(f"warm_up_steps is {warm_up_steps}; give 0 or more")
        self._warm_up_steps = warm_up_steps
        self._examples: Callable[[], int] | None = None

    def follow(self, examples: Callable[[], int]) -> None:
        self._examples = examples

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        full = math.sqrt(batch_size / initial_batch_size)
        length = self._warm_up_steps * batch_size
        if self._examples is None or length == 0:
            return full
        return full * min(1.0, (self._examples() + batch_size) / length)


class Unscaled:
    """1: the learning rate stays as the script set it."""

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        return 1.0


RULES: Mapping[str, type[ScalingRule]] = MappingProxyType(
    {"adascale": AdaScale, "sqrt": SquareRoot, "linear": Linear, "legw": Legw, "none": Unscaled}
)
"""The rules by the names that a job spec uses."""


def rule(name: str | ScalingRule) -> ScalingRule:
    """The rule called ``name``, or the user's own object; raises DocumentError naming the known ones."""
    if not isinstance(name, str):
        check_own(
            "scaling_rule",
            name,
            "factor",
            lacking=f"give it one, or use one of {', '.join(RULES)}",
            called="the keywords that every rule gets",
            define="define factor(self, *, batch_size, initial_batch_size, noise_scale)",
            keywords={"batch_size": 1, "initial_batch_size": 1, "noise_scale": None},
        )
        return Checked(name)
    try:
        return RULES[name]()
    except KeyError:
        known = ", ".join(RULES)
        raise DocumentError(f"scaling_rule: no rule called {name!r}; use one of {known}") from None


class Checked:
    """A user's rule whose factors are checked: raises DocumentError for one that is no positive number."""

    def __init__(self, own: ScalingRule) -> None:
        self._own = own

    def follow(self, examples: Callable[[], int]) -> None:
        if isinstance(self._own, FollowsExamples):
            self._own.follow(examples)

    def factor(self, *, batch_size: int, initial_batch_size: int, noise_scale: float | None) -> float:
        factor = self._own.factor(
            batch_size=batch_size, initial_batch_size=initial_batch_size, noise_scale=noise_scale
        )
        try:
            value = math.nan if isinstance(factor, str) else float(factor)
        except (TypeError, ValueError, RuntimeError):
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise DocumentError(
                f"scaling_rule: {type(self._own).__name__} gave {factor!r} for batch_size={batch_size}, "
                f"initial_batch_size={initial_batch_size}, noise_scale={noise_scale}; have its method "
                "`factor` return a number above 0"
            )
        return value

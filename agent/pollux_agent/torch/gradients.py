"""From the first backward of an optimizer step to its finished, averaged gradient.

The gradient that user code sees between ``backward()`` and ``optimizer.step()`` of a step's last
micro-batch is that of the mean loss over all samples of the step, whatever their split over ranks and
micro-batches. On the micro-batches before it every ``.grad`` is None after ``backward()``, so that
clipping or unscaling there does nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pollux_agent.torch.noise import NoiseScale


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What all ranks agree on at the end of a step.

    skip: the gradient is not finite somewhere, so there is no update, no progress and no learning-rate
    step on any rank. stop: some rank asked to stop. ``noise_scale`` is phi in samples, ``grad_sqr`` the
    squared norm of the true gradient and ``grad_var`` the trace of the per-sample covariance, both
    pre-conditioned; None while unknown.
    """

    skip: bool
    stop: bool
    noise_scale: float | None
    grad_sqr: float | None
    grad_var: float | None


class GradientSync:
    """Averages gradients over ranks and micro-batches, and measures their noise on the way.

    ``module`` is what forward is called on. Parameters and buffers are made equal to rank 0's when this
    is built. Nothing happens outside a step, so evaluation and warm-up are free.
    """

    module: nn.Module

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], *, sample_every: int = 10
    ) -> None: ...

    @property
    def noise(self) -> NoiseScale:
        """The smoothed noise scale: ``noise_scale``, ``grad_sqr``, ``grad_var``."""
        raise NotImplementedError

    def start_step(self, *, micro_batches: int, step_samples: int) -> None:
        """Begin an optimizer step of ``micro_batches`` (s + 1) micro-batches on every rank.

        ``step_samples`` counts the real samples of the step over all ranks and micro-batches. A step that
        was never finished (a GradScaler that skipped it) is forgotten.
        """
        raise NotImplementedError

    def start_micro_batch(self, *, num_samples: int, last: bool) -> None:
        """Before forward: this rank's micro-batch holds ``num_samples`` real samples.

        0 means that its gradient does not count (a borrowed sample). ``last`` marks the step's last one.
        """
        raise NotImplementedError

    def finish_step(self, *, stop: bool = False) -> StepResult:
        """Before the real optimizer step: one small all-reduce of what ranks must agree on.

        Called again before the next :meth:`start_step` (a second optimizer) it returns the same result.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        raise NotImplementedError

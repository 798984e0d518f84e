"""Measures a step's gradients for the noise scale, on some steps only, without waiting for the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux_agent.torch.noise import NoiseSample, NoiseScale
from pollux_agent.torch.precondition import Metric, Preconditioner, preconditioner

WARM_UP_ESTIMATES = 20
"""So many first estimates come from consecutive steps: the first ones decide the first batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """One step's gradient, copied: parameter number -> tensor."""

    step: int
    num_samples: int
    gradient: dict[int, Tensor]


class NoiseProbe:
    """Turns the gradients of a step into one :class:`NoiseSample`; see :mod:`pollux_agent.torch.noise`.

    With several micro-batches a step (over ranks and accumulation) each gives an estimate; with one, it is
    paired with that of the step before.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        sample_every: int,
        preconditioners: Mapping[type[Optimizer], Preconditioner] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.noise = NoiseScale()
        self._optimizers = [(each, preconditioner(each, preconditioners)) for each in optimizers]
        self._sample_every = max(1, sample_every)
        self._grad_scaler = grad_scaler
        self._step = 0
        self._step_samples = 0
        self._several = False
        self._metric: Metric | None = None
        self._remembered: _Remembered | None = None
        self._remembering: _Remembered | None = None
        self._count: float = 0.0
        self._weighted: Tensor | float = 0.0
        self._mean: Tensor | float = 0.0

    def start_step(self, params: Sequence[Tensor], *, step_samples: int, several: bool) -> bool:
        """Begin a step; whether its gradients are wanted. The same on every rank."""
        self._step_samples, self._several = step_samples, several
        self._count = self._weighted = self._mean = 0.0
        self._metric = None
        self._remembering = None
        pairs = not several and self._remembered is not None and self._remembered.step == self._step - 1
        if self._due(self._step) and (several or pairs):
            metric = Metric(params, self._optimizers)
            self._metric = metric if metric.known else None
        return self._metric is not None or self._remembers

    def see_micro_batch(self, params: Sequence[Tensor], num_samples: int) -> None:
        """A micro-batch's own gradient is in ``.grad``, a mean over ``num_samples`` samples of this rank."""
        if not self._several or self._metric is None or num_samples == 0:
            return
        self._count += 1
        self._weighted = num_samples * self._metric.squared_norm(_gradient(params)) + self._weighted

    def see_mean(self, params: Sequence[Tensor]) -> None:
        """The step's finished gradient is in ``.grad``."""
        if self._metric is None and not self._remembers:
            return
        gradient = _gradient(params)
        if self._several:
            if self._metric is not None:
                self._mean = self._metric.squared_norm(gradient)
            return
        if self._metric is not None and self._remembered is not None:
            self._see_pair(self._metric, self._remembered, gradient)
        if self._remembers:
            parts = torch._foreach_mul(list(gradient.values()), self._inverse_scale())
            copies = dict(zip(gradient, parts, strict=True))
            self._remembering = _Remembered(step=self._step, num_samples=self._step_samples, gradient=copies)

    def figures(self) -> list[Tensor | float]:
        """This rank's share of the step's figures, to be summed over ranks."""
        return [self._count, self._weighted]

    def finish_step(self, sums: Sequence[float]) -> None:
        """The step counts; ``sums`` are :meth:`figures` summed over ranks."""
        count, weighted = sums
        if self._metric is not None and count >= 2:
            samples: float = self._step_samples
            scale = self._inverse_scale() ** 2
            if not self._several and self._remembered is not None:
                samples += self._remembered.num_samples
                scale = 1.0
            self.noise.update(
                NoiseSample(
                    num_estimates=round(count),
                    num_samples=samples,
                    weighted_sqr_sum=weighted * scale,
                    mean_sqr=float(self._mean) * scale,
                )
            )
        self._remembered, self._remembering = self._remembering, None
        self._metric = None
        self._step += 1

    def abandon_step(self) -> None:
        """The step in progress does not count; the next one takes its place."""
        self._remembering = self._metric = None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"step": self._step, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self._step = int(state["step"])
        self.noise.load_state_dict(state["noise"])
        self._remembered = None
        self.abandon_step()

    @property
    def _remembers(self) -> bool:
        return not self._several and self._due(self._step + 1)

    def _due(self, step: int) -> bool:
        return self.noise.count < WARM_UP_ESTIMATES or step % self._sample_every == 0

    def _see_pair(self, metric: Metric, before: _Remembered, gradient: Mapping[int, Tensor]) -> None:
        """Consecutive gradients as two micro-batches of one step, over the parameters that both have.

        sum_i b_i |x_i|^2 = B |x|^2 + b_1 b_2 / B |x_2 - x_1|^2, so two norms are enough.
        """
        common = [number for number in gradient if number in before.gradient]
        if not common:
            return
        first = [before.gradient[number] for number in common]
        second = [gradient[number] for number in common]
        inverse = self._inverse_scale()
        if inverse != 1.0:
            second = list(torch._foreach_mul(second, inverse))
        samples, total = self._step_samples, before.num_samples + self._step_samples
        difference = torch._foreach_sub(second, first)
        mean = torch._foreach_add(first, difference, alpha=samples / total)
        difference_sqr = metric.squared_norm(dict(zip(common, difference, strict=True)))
        mean_sqr = metric.squared_norm(dict(zip(common, mean, strict=True)))
        self._count = 2.0
        self._mean = mean_sqr
        self._weighted = total * mean_sqr + before.num_samples * samples / total * difference_sqr

    def _inverse_scale(self) -> float:
        return 1.0 if self._grad_scaler is None else 1.0 / float(self._grad_scaler.get_scale())


def _gradient(params: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradients present by their parameter's number, dense."""
    return {
        number: param.grad.to_dense() if param.grad.is_sparse else param.grad
        for number, param in enumerate(params)
        if param.grad is not None
    }

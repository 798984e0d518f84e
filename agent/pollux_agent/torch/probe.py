"""Measures a step's gradients for the noise scale, on some steps only, without waiting for the device."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux_agent.torch.flat import dot, pack, views_of, wide
from pollux_agent.torch.noise import NoiseSample, NoiseScale
from pollux_agent.torch.precondition import Metric, Preconditioner, preconditioner, total

WARM_UP_ESTIMATES = 20
"""So many first estimates come from consecutive steps: the first ones decide the first batch size."""
METRIC_AGE = 100
"""Steps for which P is used at most; a tenth of the steps made so far, since early on it changes quickly.

In 100 steps Adam (beta2 = 0.999) renews 10 % of v, so P moves by about 5 %, and an estimate is unbiased
under whatever P its gradients share. The noise scale itself is an average over the last 50 estimates.
"""
_SPARES = 2

Gradients = Sequence[Tensor | None]
"""By parameter, None for one without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """The gradient of a step, for the next one: P x unscaled, a flat tensor a group, with its |P x|^2, and
    which parameters have a gradient. ``metric`` is P from before both.
    """

    step: int
    num_samples: int
    flats: Sequence[Tensor]
    used: Sequence[bool]
    metric: Metric
    sqr: Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What :meth:`NoiseProbe.finish_step` needs to know of the step that its figures are of."""

    step_samples: int
    scale: float


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
        self._metric: Metric | None = None
        self._metric_step = 0
        self._measures = self._remembers = False
        self._remembered: _Remembered | None = None
        self._remembering: _Remembered | None = None
        self._params: Sequence[Tensor] = ()
        self._groups: Sequence[Sequence[int]] = ()
        self._room: list[Tensor] = []
        self._spares: list[Sequence[Tensor]] = []
        self._on_cpu = False
        self._inverse_scale = 1.0
        self._count: float = 0.0
        self._weighted: Tensor | float = 0.0
        self._mean: Tensor | float = 0.0

    def start_step(
        self, params: Sequence[Tensor], groups: Sequence[Sequence[int]], *, step_samples: int, several: bool
    ) -> None:
        """Begin a step on parameters that lie flat in ``groups``. The same on every rank."""
        self._step_samples = step_samples
        self._count = self._weighted = self._mean = 0.0
        self._remembering = None
        before = self._remembered
        if params is not self._params or groups != self._groups:
            self._params, self._groups = params, groups
            self._room.clear()
            self._spares.clear()
            self._on_cpu = all(param.device.type == "cpu" for param in params)
        pairs = before is not None and before.step == self._step - 1 and before.metric.fits(params, groups)
        self._remembers = not several and self._due(self._step + 1)
        self._measures = self._due(self._step) and (several or pairs)
        if not (self._measures or self._remembers):
            return
        scale = 1.0 if self._grad_scaler is None else float(self._grad_scaler.get_scale())
        self._inverse_scale = 1.0 / scale if scale else math.inf  # 0 once it was halved too often
        if several or self._remembers:
            known = self._current_metric(params, groups).known
            self._measures &= known or not several
            self._remembers &= known

    @property
    def measures(self) -> bool:
        """Whether this step gives an estimate."""
        return self._measures

    @property
    def wants_gradient(self) -> bool:
        """Whether a step of one micro-batch is to be shown by :meth:`see_single`."""
        return self._measures or self._remembers

    @property
    def figures(self) -> tuple[float, Tensor | float]:
        """This rank's number of estimates and sum of b_i |x_i|^2, to be summed over ranks."""
        return self._count, self._weighted

    @property
    def mean_sqr(self) -> Tensor | float:
        """|x|^2 of the step's finished gradient."""
        return self._mean

    def count(self) -> None:
        """A micro-batch with samples of this rank is about to be seen, group by group."""
        self._count += 1

    def see(self, group: int, flat: Tensor, factor: float) -> None:
        """A group of the micro-batch's gradient; ``factor`` times its squared norm is b_i |x_i|^2."""
        if self._metric is not None:
            self._weighted = factor * self._metric.sqr(group, flat) + self._weighted

    def see_mean(self, flats: Sequence[Tensor]) -> None:
        """The finished gradient of a step of several micro-batches."""
        if self._metric is not None:
            self._mean = self._metric.norm(flats)

    def see_single(self, gradients: Gradients) -> Tensor | float | None:
        """The only gradient x of the step, by parameter; gives |P x|^2 where it was weighed."""
        before, used = self._remembered, [gradient is not None for gradient in gradients]
        if self._remembers and self._metric is not None:
            flats = self._spares.pop() if self._spares else self._new_flats()
            self._remembering = _Remembered(
                step=self._step,
                num_samples=self._step_samples,
                flats=flats,
                used=used,
                metric=self._metric,
                sqr=_sum([self._weigh(*each, gradients, self._metric) for each in enumerate(flats)]),
            )
        return self._see_pair(before, gradients, used) if self._measures and before is not None else None

    def measured(self, *, several: bool) -> Measured | None:
        """What the step's figures are about, None if it gives none."""
        if not self._measures:
            return None
        if several:
            return Measured(step_samples=self._step_samples, scale=self._inverse_scale**2)
        assert self._remembered is not None
        return Measured(step_samples=self._step_samples + self._remembered.num_samples, scale=1.0)

    def finish_step(self) -> None:
        """The step counts; the next one begins."""
        if self._remembered is not None:
            self._done_with(self._remembered)
        self._remembered, self._remembering = self._remembering, None
        self._measures = self._remembers = False
        self._step += 1

    def learn(self, measured: Measured, count: float, weighted: float, mean_sqr: float) -> None:
        """Take in the sums over ranks of a step's :attr:`figures`, and its :attr:`mean_sqr`."""
        if count < 2:
            return
        self.noise.update(
            NoiseSample(
                num_estimates=round(count),
                num_samples=measured.step_samples,
                weighted_sqr_sum=weighted * measured.scale,
                mean_sqr=mean_sqr * measured.scale,
            )
        )

    def abandon_step(self) -> None:
        """The step in progress does not count; the next one takes its place."""
        self._remembering = None
        self._measures = self._remembers = False

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"step": self._step, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self._step = int(state["step"])
        self.noise.load_state_dict(state["noise"])
        self._remembered = self._metric = None
        self.abandon_step()

    def _see_pair(self, before: _Remembered, gradients: Gradients, used: Sequence[bool]) -> Tensor | float:
        """Consecutive gradients, of ``before`` and of this step, as two micro-batches of one step.

        sum_i b_i |x_i|^2, and B^2 |x|^2 = b_1^2 |x_1|^2 + 2 b_1 b_2 x_1 x_2 + b_2^2 |x_2|^2. A parameter
        that one of them lacks is left out.
        """
        now = self._remembering
        if now is not None and now.metric is not before.metric:
            now = None
        alike = used == before.used
        squares, products, lesser = [], [], []
        for number, (group, room) in enumerate(zip(self._groups, self._shared_room(), strict=True)):
            first, second = before.flats[number], room if now is None else now.flats[number]
            if now is None:
                squares.append(self._weigh(number, room, gradients, before.metric))
            if not alike:
                both = [used[each] and before.used[each] for each in group]
                params = [self._params[each] for each in group]
                first, second = (_kept(flat, params, both) for flat in (first, second))
                lesser.append((dot(first, first), dot(second, second)))
            products.append(dot(first, second))
        first_sqr, second_sqr, product = before.sqr, _sum(squares) if now is None else now.sqr, _sum(products)
        sqr = second_sqr
        if not alike:
            first_sqr, second_sqr = map(_sum, zip(*lesser, strict=True))
        one, two = before.num_samples, self._step_samples
        self._count = 2.0
        self._weighted = one * first_sqr + two * second_sqr
        self._mean = (one * one * first_sqr + 2 * one * two * product + two * two * second_sqr) / (
            one + two
        ) ** 2
        return sqr

    def _weigh(self, number: int, flat: Tensor, gradients: Gradients, metric: Metric) -> Tensor:
        """Write P x, unscaled, of one group into ``flat``; gives its |P x|^2. What is copied is weighed and
        multiplied while it is in the cache."""
        group = self._groups[number]
        pack(flat, [self._params[each] for each in group], [gradients[each] for each in group])
        if self._inverse_scale != 1.0:
            flat.mul_(self._inverse_scale)
        metric.weigh(number, flat)
        return dot(flat, flat)

    def _new_flats(self) -> Sequence[Tensor]:
        """A flat tensor for each group, wide enough for squares."""
        return [
            torch.empty(
                sum(self._params[number].numel() for number in group),
                dtype=wide(self._params[group[0]].dtype),
                device=self._params[group[0]].device,
            )
            for group in self._groups
        ]

    def _shared_room(self) -> Sequence[Tensor]:
        """A flat tensor for each group; on a CPU in one place, which stays in the cache, and is kept."""
        if not self._on_cpu:
            return self._new_flats()
        if not self._room:
            flats = self._new_flats()
            longest = {flat.dtype: flat for flat in sorted(flats, key=len)}
            self._room = [longest[flat.dtype][: len(flat)] for flat in flats]
        return self._room

    def _done_with(self, remembered: _Remembered) -> None:
        """On a CPU its memory is kept, since the first touch of new memory costs more than a copy. (To keep
        the loop's own gradients costs more still: its next ones then lie elsewhere, out of the cache.)"""
        fits = remembered.metric.fits(self._params, self._groups)
        if fits and self._on_cpu and len(self._spares) < _SPARES:
            self._spares.append(remembered.flats)

    def _due(self, step: int) -> bool:
        return self.noise.count < WARM_UP_ESTIMATES or step % self._sample_every == 0

    def _current_metric(self, params: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Metric:
        age = self._step - self._metric_step
        metric = self._metric
        if metric is None or not metric.fits(params, groups) or age >= min(METRIC_AGE, self._step // 10):
            metric = self._metric = Metric(params, self._optimizers, groups)
            self._metric_step = self._step
        return metric


def _sum(parts: Sequence[Tensor]) -> Tensor | float:
    """A plain number on a CPU, where nobody waits for it and the arithmetic is quicker."""
    if all(part.device.type == "cpu" for part in parts):
        return sum(part.item() for part in parts)
    return total(parts)


def _kept(flat: Tensor, params: Sequence[Tensor], kept: Sequence[bool]) -> Tensor:
    """A copy with zeros for the parameters that are not ``kept``."""
    copy = flat.clone()
    for view, keep in zip(views_of(copy, params), kept, strict=True):
        if not keep:
            view.zero_()
    return copy

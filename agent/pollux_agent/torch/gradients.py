"""From the first backward of an optimizer step to its finished, averaged gradient.

The gradient that user code sees between ``backward()`` and ``optimizer.step()`` of a step's last
micro-batch is that of the mean loss over all samples of the step, whatever their split over ranks and
micro-batches. On the micro-batches before it every ``.grad`` is None after ``backward()``, so that
clipping or unscaling there does nothing.

A micro-batch of n of the step's N samples whose loss is a mean has gradient g; n / N g is added to the
step's sum when its backward ends, and the sums of all ranks are added up during the last backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from pollux_agent.errors import LoopError
from pollux_agent.torch.agreement import agree, running_statistics, share_from_rank_0
from pollux_agent.torch.noise import NoiseScale
from pollux_agent.torch.precondition import Preconditioner, squared_norm
from pollux_agent.torch.probe import NoiseProbe
from pollux_agent.torch.reducer import GradientReducer


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
    is built. Nothing happens outside a step, so evaluation and warm-up are free. Noise is measured on
    every step until there are 20 estimates, then on every ``sample_every``-th; ``preconditioners`` adds
    optimizers that :mod:`pollux_agent.torch.precondition` does not know, and ``grad_scaler`` is the
    GradScaler of the loop, if it has one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        sample_every: int = 10,
        preconditioners: Mapping[type[Optimizer], Preconditioner] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.module = model
        self._optimizers = tuple(optimizers)
        self._world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self._world_size > 1:
            share_from_rank_0(model)
        self._statistics = running_statistics(model) if self._world_size > 1 else []
        self._candidates = _parameters(model, self._optimizers)
        self._params: list[Tensor] = []
        self._reducer: GradientReducer | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._probe = NoiseProbe(self._optimizers, sample_every, preconditioners, grad_scaler)
        self._micro_batches = self._step_samples = self._num_samples = 0
        self._last = self._in_micro_batch = self._queued = self._finished = False
        self._result: StepResult | None = None
        if grad_scaler is not None:
            self._patch_scaler(grad_scaler)

    @property
    def noise(self) -> NoiseScale:
        """The smoothed noise scale: ``noise_scale``, ``grad_sqr``, ``grad_var``."""
        return self._probe.noise

    def start_step(self, *, micro_batches: int, step_samples: int) -> None:
        """Begin an optimizer step of ``micro_batches`` (s + 1) micro-batches on every rank.

        ``step_samples`` counts the real samples of the step over all ranks and micro-batches. A step that
        was never finished (a GradScaler that skipped it) is forgotten.
        """
        if micro_batches < 1 or step_samples < 1:
            raise LoopError(
                f"a step needs at least one micro-batch and one sample (got micro_batches={micro_batches}, "
                f"step_samples={step_samples})"
            )
        self._in_micro_batch = self._queued = False
        self._micro_batches, self._step_samples = micro_batches, step_samples
        self._result, self._finished = None, False
        self._follow_frozen()
        sums = self._world_size * micro_batches > 1
        if sums and self._reducer is None:
            self._reducer = GradientReducer(self._params, self._world_size)
        if sums and self._reducer is not None:
            self._reducer.reset()
        measures = self._probe.start_step(self._params, step_samples=step_samples, several=sums)
        self._set_hooks(sums or measures)

    def start_micro_batch(self, *, num_samples: int, last: bool) -> None:
        """Before forward: this rank's micro-batch holds ``num_samples`` real samples.

        0 means that its gradient does not count (a borrowed sample). ``last`` marks the step's last one.
        """
        self._num_samples, self._last, self._in_micro_batch = num_samples, last, True
        if last and self._reduces and self._reducer is not None:
            self._reducer.expect(num_samples / self._step_samples)

    def finish_step(self, *, stop: bool = False) -> StepResult:
        """Before the real optimizer step: one small all-reduce of what ranks must agree on.

        Called again before the next :meth:`start_step` (a second optimizer) it returns the same result.
        """
        if self._result is not None:
            return self._result
        if not self._step_samples:
            raise LoopError("a step was finished that never began; take batches from the elastic loader")
        with torch.no_grad():
            if self._reduces and not self._finished:
                self._backward_done()
            self._in_micro_batch = False
            agreed = agree(self._gradient_sqr(), self._probe.figures(), stop=stop, average=self._statistics)
        if agreed.finite:
            self._probe.finish_step(agreed.figures)
        else:
            self._probe.abandon_step()
        self._result = StepResult(
            skip=not agreed.finite,
            stop=agreed.stop,
            noise_scale=self.noise.noise_scale,
            grad_sqr=self.noise.grad_sqr,
            grad_var=self.noise.grad_var,
        )
        return self._result

    def abandon_step(self) -> None:
        """Drop the step in progress: backward passes from here on are the script's own."""
        self._in_micro_batch = self._queued = False
        self._probe.abandon_step()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return self._probe.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self._probe.load_state_dict(state)

    @property
    def _reduces(self) -> bool:
        return self._world_size * self._micro_batches > 1

    def _gradient_sqr(self) -> Tensor:
        gradients = [param.grad for param in self._params if param.grad is not None]
        dense = [part.coalesce().values() if part.is_sparse else part for part in gradients]
        return squared_norm(dense, self._params[0].device)

    def _gradient_ready(self, number: int, _: Tensor) -> None:
        if not self._in_micro_batch:
            return
        if self._last and self._finished:
            raise LoopError(
                "a second backward pass reached the parameters after the step's gradient was averaged; "
                "add the losses and call backward once per batch, and use checkpoint(use_reentrant=False)"
            )
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._backward_done)
        if self._last and self._reduces and self._reducer is not None:
            self._reducer.ready(number)

    @torch.no_grad()
    def _backward_done(self) -> None:
        self._queued = False
        self._probe.see_micro_batch(self._params, self._num_samples)
        if self._last:
            if self._reduces and self._reducer is not None:
                self._reducer.finish()
            self._probe.see_mean(self._params)
            self._finished = True
        elif self._reducer is not None:
            self._reducer.add(self._num_samples / self._step_samples)

    def _follow_frozen(self) -> None:
        """Parameters may be frozen and unfrozen between steps, on all ranks alike."""
        params = [param for param in self._candidates if param.requires_grad]
        if len(params) == len(self._params) and all(
            new is old for new, old in zip(params, self._params, strict=True)
        ):
            return
        if not params:
            raise LoopError("no parameter of the model or its optimizers requires a gradient; unfreeze some")
        self._set_hooks(False)
        self._params, self._reducer = params, None

    def _set_hooks(self, wanted: bool) -> None:
        if wanted and not self._hooks:
            for number, param in enumerate(self._params):
                hook = partial(self._gradient_ready, number)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._hooks.append(handle)
        elif not wanted and self._hooks:
            for handle in self._hooks:
                handle.remove()
            self._hooks.clear()

    def _patch_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Before a step's last micro-batch there is no gradient to unscale, and nothing to update by."""
        for name in ("unscale_", "step", "update"):
            original = getattr(scaler, name)

            def call(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if self._in_micro_batch and not self._last:
                    return None
                return _original(*args, **kwargs)

            setattr(scaler, name, call)


def _parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Those of the model, then those that only an optimizer knows (of a loss, say), each once."""
    params: dict[Tensor, None] = dict.fromkeys(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params.update(dict.fromkeys(group["params"]))
    return list(params)

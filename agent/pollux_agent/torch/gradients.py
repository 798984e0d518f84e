"""From the first backward of an optimizer step to its finished, averaged gradient.

The gradient that user code sees between ``backward()`` and ``optimizer.step()`` of a step's last
micro-batch is that of the mean loss over all samples of the step, whatever their split over ranks and
micro-batches. On the micro-batches before it every ``.grad`` is None after ``backward()``, so that
clipping or unscaling there does nothing.

A micro-batch of n of the step's N samples whose loss is a mean has gradient g; n / N g is added to the
step's sum when its backward ends, and the sums of all ranks are added up during the last backward.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from pollux_agent.errors import LoopError
from pollux_agent.torch.agreement import Mailbox, running_statistics, share_from_rank_0, split_double
from pollux_agent.torch.flat import all_finite, by_kind
from pollux_agent.torch.noise import NoiseScale
from pollux_agent.torch.precondition import Preconditioner
from pollux_agent.torch.probe import Measured, NoiseProbe
from pollux_agent.torch.reducer import GradientReducer, See

_log = logging.getLogger(__name__)

_QUIET, _ARMED, _BACKWARD, _FINISHED = range(4)
"""Outside a micro-batch; in one, before its backward; within backward; the step's gradient is averaged."""
_NUM_FIGURES = 4
_CACHED, _MOST_AT_ONCE = 2**16, 2**28
"""Elements of a piece of a gradient: on a CPU it stays in a core's cache beside P, and elsewhere the room
that two pieces take for a moment is bounded."""


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

    On one rank without accumulation a step costs next to nothing where no noise is measured: whether the
    gradient is finite is then told by one small parameter near the input, which anything that is not finite
    runs through on its way back. ``late`` (by default where parameters are on a GPU): nothing waits for the
    device, so stop, noise and a gradient that was not finite are known one step later; only a GradScaler
    then skips an update, as in any loop. ``scaler_stepped``: it was asked for the present step's update.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        sample_every: int = 10,
        preconditioners: Mapping[type[Optimizer], Preconditioner] | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        late: bool | None = None,
    ) -> None:
        self.module = model
        self._optimizers = tuple(optimizers)
        self._world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._candidates = _parameters(model, self._optimizers)
        if self._world_size > 1:
            share_from_rank_0([*self._candidates, *model.buffers()])
        self._statistics = running_statistics(model) if self._world_size > 1 else []
        self._params: list[Tensor] = []
        self._groups: list[list[int]] = []
        self._canary = 0
        self._trained: list[bool] = []
        self._hooked: Sequence[int] = ()
        self._reducer: GradientReducer | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._probe = NoiseProbe(self._optimizers, sample_every, preconditioners, grad_scaler)
        if late is None:
            late = any(param.device.type == "cuda" for param in self._candidates)
        self._mailbox: Mailbox[Measured | None] = Mailbox(late=late)
        self._scaled = grad_scaler is not None and _is_enabled(grad_scaler)
        self._said_broken = False
        self.scaler_stepped = False
        self._reduces = False
        self._micro_batches = self._step_samples = self._num_samples = 0
        self._phase = _QUIET
        self._last = self._counts_ready = False
        self._stop_asked: Callable[[], bool] = bool
        self._finite: Tensor | None = None
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
        self._micro_batches, self._step_samples = micro_batches, step_samples
        self._phase, self._result, self._finite = _QUIET, None, None
        self.scaler_stepped = False
        self._follow_frozen()
        self._reduces = self._world_size * micro_batches > 1
        if self._reduces:
            if self._reducer is None:
                self._reducer = GradientReducer(
                    self._params, self._world_size, num_figures=_NUM_FIGURES, statistics=self._statistics
                )
            self._reducer.reset()
        groups = self._reducer.groups if self._reduces and self._reducer is not None else self._groups
        self._probe.start_step(self._params, groups, step_samples=step_samples, several=self._reduces)
        if self._reduces:
            self._set_hooks(range(len(self._params)))
        elif self._probe.wants_gradient:
            self._set_hooks((self._canary,))
        else:
            self._set_hooks(())

    def start_micro_batch(self, *, num_samples: int, last: bool, stop: Callable[[], bool] = bool) -> None:
        """Before forward: this rank's micro-batch holds ``num_samples`` real samples.

        0 means that its gradient does not count (a borrowed sample). ``last`` marks the step's last one, and
        ``stop`` tells at the end of its backward whether this rank wishes to stop behind the step.
        """
        self._num_samples, self._last, self._phase, self._stop_asked = num_samples, last, _ARMED, stop
        if last and self._reduces and self._reducer is not None:
            self._counts_ready = not self._reducer.in_one
            self._reducer.expect(num_samples / self._step_samples, self._figures, self._see())

    def finish_step(self) -> StepResult:
        """Before the real optimizer step; what ranks must agree on came with the gradients.

        Called again before the next :meth:`start_step` (a second optimizer) it returns the same result.
        """
        if self._result is not None:
            return self._result
        if not self._step_samples:
            raise LoopError("a step was finished that never began; take batches from the elastic loader")
        if self._reduces and self._phase != _FINISHED:
            self._backward_done()
        self._phase = _QUIET
        skip, stop = self._agree()
        noise = self.noise
        self._result = StepResult(
            skip=skip,
            stop=stop,
            noise_scale=noise.noise_scale,
            grad_sqr=noise.grad_sqr,
            grad_var=noise.grad_var,
        )
        return self._result

    def abandon_step(self) -> None:
        """Drop the step in progress: backward passes from here on are the script's own."""
        self._phase = _QUIET
        self._probe.abandon_step()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return self._probe.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self._mailbox.clear()
        self._probe.load_state_dict(state)

    def _agree(self) -> tuple[bool, bool]:
        """Whether the update must not be made, and whether any rank asks to stop."""
        probe = self._probe
        measured = probe.measured(several=self._reduces)
        if self._finite is None:
            finite = self._mailbox.late or self._scaled or self._looks_finite()
            if probe.wants_gradient and self._params[self._canary].grad is None:
                self._find_canary()
            if finite and measured is not None:
                count, weighted = probe.figures
                probe.learn(measured, count, float(weighted), float(probe.mean_sqr))
            probe.finish_step() if finite else probe.abandon_step()
            return not finite, self._stop_asked()
        arrived = self._mailbox.exchange(measured, self._numbers(self._finite, measured))
        if arrived is None:
            probe.finish_step()
            return False, self._world_size == 1 and self._stop_asked()
        about, (is_finite, asked, count, high, low, mean_sqr) = arrived
        stop = asked > 0
        if self._world_size == 1:
            stop = self._stop_asked()
        if is_finite and about is not None:
            probe.learn(about, count, high + low, mean_sqr)
        if is_finite or self._mailbox.late:
            probe.finish_step()
        else:
            probe.abandon_step()
        unguarded = not is_finite and self._mailbox.late and not self._scaled
        if unguarded and not self._said_broken:
            _log.warning("a gradient was not finite, and its update was made as torch makes it")
        self._said_broken = unguarded
        return not is_finite and not self._mailbox.late, stop

    def _numbers(self, finite: Tensor, measured: Measured | None) -> Tensor:
        """finite, stop, estimates, sum of b_i |x_i|^2 (as two numbers), |x|^2: over all ranks."""
        if self._world_size > 1 and self._reducer is not None:
            figures = self._reducer.figures
        else:
            figures = self._figures()
        wide = torch.float32 if figures.device.type == "mps" else torch.float64
        mean = self._probe.mean_sqr if measured is not None else 0.0
        mean = torch.as_tensor(mean, dtype=wide, device=figures.device)
        ends = finite.reshape(1).to(figures.device, wide), mean.reshape(1)
        return torch.cat([ends[0], figures.to(wide), ends[1]])

    def _figures(self) -> Tensor:
        """This rank's stop, number of estimates and sum of b_i |x_i|^2 (as two numbers)."""
        like = self._reducer.figures if self._reduces and self._reducer is not None else self._params[0]
        if not like.is_floating_point() or like.dtype not in (torch.float32, torch.float64):
            like = like.float()
        count, weighted = self._probe.figures
        stop = float(self._stop_asked())
        if not count:
            return torch.tensor([stop, 0.0, 0.0, 0.0], dtype=like.dtype).to(like.device, non_blocking=True)
        plain = torch.tensor([stop, count], dtype=like.dtype).to(like.device, non_blocking=True)
        return torch.cat([plain, split_double(weighted, like)])

    def _see(self) -> See | None:
        """What measures the micro-batch's gradient, if its noise is wanted.

        A gradient g times its weight w = n / N is seen, and n |g|^2 = N^2 / n |w g|^2.
        """
        if not self._probe.measures or self._num_samples == 0:
            return None
        self._probe.count()
        factor = self._step_samples**2 / self._num_samples
        return lambda group, flat: self._probe.see(group, flat, factor)

    def _looks_finite(self) -> bool:
        """Whether the gradient of one rank's only micro-batch is finite, told by the canary first."""
        canary = self._params[self._canary].grad
        if canary is not None and not canary.is_sparse and math.isfinite(canary.sum().item()):
            return True
        gradients = [param.grad for param in self._params if param.grad is not None]
        if canary is None:
            self._find_canary()
        dense = [part.coalesce().values() if part.is_sparse else part for part in gradients]
        return not dense or bool(all_finite(dense))

    def _find_canary(self) -> None:
        """Among the parameters that have a gradient, if any has one."""
        used = [number for number, param in enumerate(self._params) if param.grad is not None]
        self._canary = _canary(self._params, used) if used else self._canary

    def _gradient_ready(self, number: int, _: Tensor) -> None:
        phase = self._phase
        if phase == _ARMED:
            self._phase = _BACKWARD
            Variable._execution_engine.queue_callback(self._backward_done)
        elif phase == _QUIET:
            return
        elif phase == _FINISHED:
            raise LoopError(
                "a second backward pass reached the parameters after the step's gradient was averaged; "
                "add the losses and call backward once per batch, and use checkpoint(use_reentrant=False)"
            )
        if self._counts_ready and self._last and self._reducer is not None:
            self._reducer.ready(number)

    @torch.no_grad()
    def _backward_done(self) -> None:
        self._phase = _ARMED
        if not self._last:
            if self._reducer is not None:
                self._reducer.add(self._num_samples / self._step_samples, self._see())
            return
        if self._reduces and self._reducer is not None:
            self._reducer.finish()
            if self._probe.measures:
                self._probe.see_mean(self._reducer.flats)
            self._finite = all_finite(self._reducer.flats)
        elif self._probe.wants_gradient:
            sqr = self._probe.see_single([param.grad for param in self._params])
            if self._mailbox.late and sqr is not None:
                self._finite = torch.as_tensor(sqr).isfinite()
        self._phase = _FINISHED

    def _follow_frozen(self) -> None:
        """Parameters may be frozen and unfrozen between steps, on all ranks alike."""
        trained = [param.requires_grad for param in self._candidates]
        if trained == self._trained:
            return
        params = [param for param in self._candidates if param.requires_grad]
        if not params:
            raise LoopError("no parameter of the model or its optimizers requires a gradient; unfreeze some")
        self._set_hooks(())
        self._trained, self._params, self._reducer = trained, params, None
        self._groups, self._canary = _groups(params), _canary(params, range(len(params)))

    def _set_hooks(self, wanted: Sequence[int]) -> None:
        """Have the gradients of these parameters announced, and no others."""
        if wanted == self._hooked:
            return
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        for number in wanted:
            hook = partial(self._gradient_ready, number)
            handle = self._params[number].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._hooks.append(handle)
        self._hooked = wanted

    def _patch_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Before a step's last micro-batch there is no gradient to unscale, and nothing to update by."""
        for name in ("unscale_", "step", "update"):
            original = getattr(scaler, name)

            def call(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                if self._phase != _QUIET and not self._last:
                    return None
                self.scaler_stepped |= _name == "step"
                return _original(*args, **kwargs)

            setattr(scaler, name, call)


def _groups(params: Sequence[Tensor]) -> list[list[int]]:
    """Parameters whose gradient is measured in one piece where it is the step's only one: those of a kind.

    On a CPU a piece ends where its cache does; elsewhere each call of a kernel costs more than memory.
    """
    groups: list[list[int]] = []
    for kind in by_kind(params):
        most = _CACHED if params[kind[0]].device.type == "cpu" else _MOST_AT_ONCE
        size = 0
        for number in kind:
            size += params[number].numel()
            if size > most or number == kind[0]:
                groups.append([])
                size = params[number].numel()
            groups[-1].append(number)
    return groups


def _canary(params: Sequence[Tensor], numbers: Sequence[int]) -> int:
    """The number of the smallest parameter of the first quarter, which are those nearest to the input; one
    without elements tells nothing."""
    numbers = [number for number in numbers if params[number].numel()] or numbers
    return min(numbers[: max(1, len(numbers) // 4)], key=lambda number: params[number].numel())


def _is_enabled(grad_scaler: Any) -> bool:
    """One that is not enabled unscales nothing and skips nothing."""
    return bool(getattr(grad_scaler, "is_enabled", lambda: True)())


def _parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Those of the model, then those that only an optimizer knows (of a loss, say), each once."""
    params: dict[Tensor, None] = dict.fromkeys(model.parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params.update(dict.fromkeys(group["params"]))
    return list(params)

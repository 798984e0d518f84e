"""One optimizer step out of several micro-batches: what happens inside the user's ``optimizer.step()``."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer, SparseAdam

from pollux_agent.errors import DocumentError
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.torch.gradients import GradientSync, StepResult
from pollux_agent.torch.sampler import MicroBatch
from pollux_agent.torch.scaling import FollowsExamples, ScalingRule


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """A step that all ranks finished; ``skipped``: without an update. ``broken``: since its gradient was not
    finite. ``lr_factor`` is the rule's lambda."""

    samples: int
    skipped: bool
    broken: bool
    stop: bool
    noise_scale: float | None
    lr_factor: float


class Stepper:
    """Patches the optimizers so that a step of the user's loop is one micro-batch of a step of ours.

    Until the last micro-batch ``optimizer.step()`` does nothing. On the last one it updates once, with
    the learning rate multiplied for this update alone: schedulers see the rate that the user chose.
    Outside the loader's loop the optimizers are as they were.
    """

    def __init__(
        self,
        sync: GradientSync,
        optimizers: Sequence[Optimizer],
        *,
        rule: ScalingRule,
        initial_batch_size: int,
        schedule: Callable[[], float],
        stop_asked: Callable[[], bool],
    ) -> None:
        self._sync, self._optimizers, self._rule = sync, optimizers, rule
        self._each_update = isinstance(rule, FollowsExamples)
        self._initial_batch_size = initial_batch_size
        self._schedule, self._stop_asked = schedule, stop_asked
        self._micro: MicroBatch | None = None
        self._result: StepResult | None = None
        self._updated = False
        self._lr_factor = 1.0
        self._lr_asked: tuple[int, float | None] | None = None
        for optimizer in optimizers:
            self._patch(optimizer)

    @property
    def stepped(self) -> bool:
        """Whether the present step's gradient is finished: its update is made, or skipped on all ranks."""
        return self._result is not None

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch is about to be given to the user's loop."""
        if micro.first:
            self._result, self._updated = None, False
            self._sync.start_step(micro_batches=micro.micro_batches, step_samples=micro.step_samples)
        self._sync.start_micro_batch(num_samples=micro.num_samples, last=micro.last, stop=self._stop_asked)
        self._micro = micro

    def end(self) -> FinishedStep | None:
        """The user's loop is done with the micro-batch; the finished step if it was the last.

        A last micro-batch without ``optimizer.step()``, as a GradScaler leaves it that met an inf, is a
        skipped step.
        """
        micro, self._micro = self._micro, None
        if micro is None or not micro.last:
            return None
        result = self._result or self._finish(micro)
        return FinishedStep(
            samples=micro.step_samples,
            skipped=result.skip or not self._updated,
            broken=result.skip or (not self._updated and self._sync.scaler_stepped),
            stop=result.stop,
            noise_scale=result.noise_scale,
            lr_factor=self._lr_factor,
        )

    def abandon(self) -> None:
        """The user's loop ended within a step: what it accumulated is dropped."""
        self._micro = None
        self._sync.abandon_step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _finish(self, micro: MicroBatch) -> StepResult:
        self._result = self._sync.finish_step()
        asked = micro.step_samples, self._result.noise_scale
        if asked != self._lr_asked or self._each_update:
            self._lr_asked = asked
            self._lr_factor = self._rule.factor(
                batch_size=micro.step_samples,
                initial_batch_size=self._initial_batch_size,
                noise_scale=self._result.noise_scale,
            )
        return self._result

    def _patch(self, optimizer: Optimizer) -> None:
        original = optimizer.step

        @functools.wraps(original)
        def step(self_: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            micro = self._micro
            if micro is None:
                return original(closure) if closure is not None else original()
            loss = closure() if closure is not None else None
            if micro.last and not (self._result or self._finish(micro)).skip:
                factor = self._lr_factor * self._schedule()
                if factor == 1:
                    original()
                else:
                    with scaled_lr(optimizer, factor):
                        original()
                self._updated = not _found_inf(optimizer)
            return loss

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _found_inf(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer has left out its update: a GradScaler calls it in any case, and tells it then
    what it found."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def check_steps(optimizers: Sequence[Optimizer]) -> None:
    """Raise DocumentError for an optimizer that computes gradients of its own within a step."""
    for optimizer in optimizers:
        kind = type(optimizer)  # an object's own step may be patched, by an earlier job for one
        closure = inspect.signature(kind.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise DocumentError(
                f"optimizer: {kind.__name__} needs a closure, which it calls again within a step, "
                "but the gradient of a step is averaged once, over all of its batches; use an optimizer "
                "whose step() goes without one, such as SGD or AdamW"
            )


def check_accumulation(optimizers: Sequence[Optimizer], limits: BatchLimits) -> None:
    """Raise DocumentError for an optimizer of sparse gradients where a step may have several batches: their
    sum is dense."""
    if limits.max_batch_size <= limits.max_local_batch_size:
        return
    for optimizer in optimizers:
        if isinstance(optimizer, SparseAdam):
            raise DocumentError(
                f"optimizer: {type(optimizer).__name__} takes sparse gradients alone, but those of a step's "
                "batches are added up densely; use Adam, or give the same max_batch_size as "
                "max_local_batch_size, so that no step has several"
            )


@contextmanager
def scaled_lr(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Every group's learning rate times ``factor``, until the end of the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

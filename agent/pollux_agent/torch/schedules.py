"""Learning-rate schedulers of torch, driven by progress instead of by calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

_ROUNDING = 1e-6
"""Share of a step by which progress, a sum of rounded fractions, may fall short of a whole one."""


class ProgressSchedulers:
    """Steps schedulers once for each whole step of M0's worth of progress.

    A scheduler that was made for batches of M0 samples so keeps its meaning at any batch size, and a skipped
    step does not move it. Calls of ``scheduler.step()`` by the script do nothing from here on. The last step
    of a training may go beyond its target; a scheduler, which may know no more steps, does not.
    """

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._steps = [take_over(scheduler) for scheduler in schedulers]
        self._taken = 0

    def resume(self, progress: float) -> None:
        """The schedulers are where ``progress`` had brought them."""
        self._taken = int(progress + _ROUNDING)

    def advance(self, progress: float, target: float | None = None) -> None:
        """Take the steps that are due at ``progress``, in steps of size M0, up to the ``target``."""
        due = int((progress if target is None else min(progress, target)) + _ROUNDING)
        for _ in range(due - self._taken):
            for step in self._steps:
                step()
        self._taken = max(self._taken, due)


class EpochSchedulers:
    """Steps schedulers once for each statistical epoch, or each so many.

    ``every`` has the epochs between two steps of each. How far a scheduler is stands in its own state, so one
    that a checkpoint left behind catches up.
    """

    def __init__(self, every: Mapping[LRScheduler, int]) -> None:
        self._all = [(each, take_over(each), each.last_epoch, number) for each, number in every.items()]

    def advance(self, statistical_epoch: float) -> None:
        """Take the steps that are due."""
        for scheduler, step, first, every in self._all:
            while scheduler.last_epoch < first + int(statistical_epoch / every + _ROUNDING):
                step()


class _Follower:
    """In front of a scheduler's class: its public step does nothing."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the scheduler follows the job's progress."""


def take_over(scheduler: LRScheduler) -> Callable[[], Any]:
    """The scheduler's own step, once its public one is made to do nothing.

    Its class is changed, not the object, whose attributes are its checkpoint.
    """
    kind = type(scheduler)
    if not issubclass(kind, _Follower):
        scheduler.__class__ = type(kind.__name__, (_Follower, kind), {})
    own: Callable[[], Any] = super(_Follower, scheduler).step  # type: ignore[misc]
    return own

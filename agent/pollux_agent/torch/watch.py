"""Whether training follows its progress: the check on a learning-rate rule that breaks down.

Progress is predicted, not measured: a step of M samples counts for its gain (Pollux Eq. 7) on the trust that
the rule makes as much of it. Where that holds, the loss as a function of progress is one curve, whatever the
batch size; where the rule breaks down (Pollux section 6 leaves this open) the loss falls behind that curve.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pollux_agent.torch.history import History

logger = logging.getLogger(__name__)

POINTS = 8
"""Figures needed before a batch is raised, and after it before the raise is judged."""
_KEPT = 256
_REACH = 1.25
"""A raise is judged once progress is this much above where it was made."""
_LOOKS_BACK = 1.5
"""The curve is that of the figures since progress was lower by this factor, where there are enough."""
_SHARE = 0.5
"""Less than this share of the predicted fall is behind, if the noise does not explain it."""
_ERRORS = 3.0


class ProgressWatch:
    """Watches one figure that falls in training, such as the loss of a step.

    The latest figures before a raise of the batch give the curve, figure = a - b log(progress), that those
    after it must follow. Until a raise is judged there is no further one; one that fell behind is taken back,
    and no batch above the last one that kept up is used any more. What was judged is in ``history``.
    """

    def __init__(self, name: str, history: History) -> None:
        self.name = name
        self._history = history
        self._before: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._after: list[tuple[float, float]] = []
        self._trial: tuple[int, float] | None = None
        self._said = False
        self._others: dict[str, None] | None = {}

    @property
    def limit(self) -> float:
        """The largest batch in samples that may be chosen now; infinite while nothing speaks against more."""
        history = self._history
        if history.held_batch_size:
            return history.held_batch_size
        if self._trial is not None:
            return self._trial[0]
        if len(self._before) >= POINTS:
            return math.inf
        if not self._said:
            self._said = True
            logger.info("the batch is raised once %s was logged %d times", self.name, POINTS)
        return max(history.trusted_batch_size, 1)

    def chosen(self, batch_size: int) -> None:
        """The next steps have ``batch_size`` samples."""
        history = self._history
        if history.trusted_batch_size == 0:
            history.trusted_batch_size = batch_size
        if self._trial is None and batch_size > history.trusted_batch_size and not history.held_batch_size:
            self._trial = (batch_size, history.progress)
            self._after = []

    def logged(self, values: Mapping[str, float]) -> None:
        """Figures were logged; the one that is watched is taken in."""
        if self.name in values:
            self._others = None
            self.observe(float(values[self.name]))
        elif self._others is not None:
            self._others.update(dict.fromkeys(values))

    def pass_ended(self, steps_taken: int) -> None:
        """Warn once if the figure was never logged in the ``steps_taken`` since the start."""
        if self._others is None or steps_taken < POINTS:
            return
        found = f"only {', '.join(self._others)} were" if self._others else "nothing was"
        logger.warning(
            "watch: %r was not logged in %d steps, %s; no batch is raised before it is. Log it with "
            "job.log(%s=...), or name another figure that falls in training",
            self.name,
            steps_taken,
            found,
            self.name,
        )
        self._others = None

    def observe(self, value: float) -> None:
        """Take in the figure at the present progress; not finite means that training came apart."""
        progress = self._history.progress
        if self._trial is None:
            if math.isfinite(value) and progress > 0:
                self._before.append((progress, value))
            return
        batch_size, began = self._trial
        self._after.append((progress, value))
        if not math.isfinite(value):
            self._take_back(f"{self.name} is {value} with batches of {batch_size}")
        elif len(self._after) >= POINTS and progress >= _REACH * began:
            self._judge(batch_size, began)

    def _judge(self, batch_size: int, began: float) -> None:
        curve = _Curve(self._recent(began))
        latest = np.array(self._after[-max(POINTS, len(self._after) // 2) :])
        places = np.log(latest[:, 0])
        predicted, found = curve.at(float(np.mean(places))), float(np.mean(latest[:, 1]))
        start, error = curve.at(math.log(began)), curve.error(places)
        if start - found < _SHARE * (start - predicted) and found - predicted > _ERRORS * error:
            self._take_back(
                f"since batches were raised to {batch_size} at progress {began:.0f}, {self.name} went from "
                f"{start:.4g} to {found:.4g}, but {predicted:.4g} was predicted"
            )
            return
        self._history.trusted_batch_size = batch_size
        self._before.extend(self._after)
        self._trial, self._after = None, []

    def _recent(self, began: float) -> list[tuple[float, float]]:
        """The latest figures before the raise: a loss flattens as it falls, so earlier ones mislead."""
        recent = [point for point in self._before if point[0] >= began / _LOOKS_BACK]
        return recent if len(recent) >= POINTS else list(self._before)

    def _take_back(self, why: str) -> None:
        self._history.held_batch_size = self._history.trusted_batch_size
        self._trial, self._after = None, []
        logger.warning(
            "%s: the learning-rate rule does not carry that far, so batches stay at %d or less",
            why,
            self._history.held_batch_size,
        )


class _Curve:
    """The least-squares line through (progress, figure) points, over the logarithm of progress."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        progress, figures = np.array(points).T
        places = np.log(progress)
        self._centre, self._width = float(np.mean(places)), float(np.sum((places - np.mean(places)) ** 2))
        self._count, self._level = len(points), float(np.mean(figures))
        self._slope = float(np.sum((places - self._centre) * figures)) / self._width if self._width else 0.0
        misses = figures - self._level - self._slope * (places - self._centre)
        self._variance = float(np.sum(misses**2)) / max(1, self._count - 2)

    def at(self, place: float) -> float:
        """The figure at a logarithm of progress."""
        return self._level + self._slope * (place - self._centre)

    def error(self, places: NDArray[np.float64]) -> float:
        """Standard error of the mean figure at ``places`` less the line's: noise of both."""
        away = float(np.mean(places)) - self._centre
        own = 1.0 / self._count + (away**2 / self._width if self._width else 0.0)
        return math.sqrt(self._variance * (1.0 / len(places) + own))

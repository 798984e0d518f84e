"""Notices a training that makes no update any more, and would go on so for ever."""

import logging
from collections.abc import Callable

import torch

from pollux_agent.errors import LoopError
from pollux_agent.torch.saver import Trained
from pollux_agent.torch.stepper import FinishedStep

logger = logging.getLogger(__name__)

WARN_STEPS, RAISE_STEPS = 50, 200
"""Steps in a row without an update: a GradScaler that looks for its scale makes up to some thirty of them."""

_NOT_FINITE = (
    "their gradients were not finite",
    "Lower the learning rate, clip the gradients (torch.nn.utils.clip_grad_norm_), or find what makes the "
    "loss NaN or infinite: broken samples, a division by 0, the log of 0; "
    "torch.autograd.set_detect_anomaly(True) names the operation.",
)
_NOT_CALLED = (
    "optimizer.step() was never called in the loop",
    "Call it for each batch of job.loader, behind backward(); a GradScaler whose step() calls it goes into "
    "the job as grad_scaler.",
)


class Stall:
    """Counts steps in a row without an update, on all ranks alike; over restarts in the job's history.

    ``standing`` says in words which checkpoint there is; ``speaks`` on the one rank that warns.
    """

    def __init__(self, trained: Trained, *, standing: Callable[[], str], speaks: bool) -> None:
        self._trained, self._history = trained, trained.history
        self._standing, self._speaks = standing, speaks
        self._steps, self._broken = 0, False

    def count(self, step: FinishedStep) -> None:
        """A step was skipped, or others before it were."""
        history = self._history
        if not step.skipped:
            self._steps, self._broken = 0, False
            history.idle_steps = history.idle_examples = 0
            return
        self._steps += 1
        self._broken |= step.broken
        history.idle_steps += 1
        history.idle_examples += step.samples
        if self._steps == WARN_STEPS and self._speaks:
            logger.warning("%s. %s", *self._cause())

    def check(self) -> None:
        """Raise LoopError behind RAISE_STEPS of this process and a whole pass over the data.

        A stream whose length is not known has no pass to wait for. Not within :meth:`count`: a loop that is
        left by ``break`` would not hear of it.
        """
        in_a_pass = self._trained.sampler.num_samples or 0
        if self._steps >= RAISE_STEPS and self._history.idle_examples >= in_a_pass:
            what, fix = self._cause()
            raise LoopError(f"{what}. {fix} {self._weights()}")

    def _cause(self) -> tuple[str, str]:
        why, fix = _NOT_FINITE if self._broken else _NOT_CALLED
        history = self._history
        since = history.step - history.idle_steps
        return f"no update since step {since}, in {history.idle_steps} steps in a row: {why}", fix

    def _weights(self) -> str:
        finite = all(
            bool(torch.isfinite(getattr(param, "to_local", lambda own=param: own)()).all())
            for param in self._trained.model.parameters()
        )
        said = "are finite, in checkpoints as well" if finite else "are not finite either"
        return f"The weights {said}; {self._standing()}."

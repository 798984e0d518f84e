"""A throughput model of the user's own: checked when it is given, and again with each fit that it makes."""

import logging
from collections.abc import Sequence

import numpy as np

from pollux_agent.model.fit import Observation, ThroughputModel
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.model.throughput import StepTimes
from pollux_agent.torch.own import check_own

logger = logging.getLogger(__name__)

_METHODS = ("step_time", "node_class")
_SIZES = 16
"""Local batch sizes, spread evenly over the logarithm, that a fit is tried at."""


def check_throughput(model: object) -> None:
    """Raise DocumentError for what cannot be fitted."""
    define = "define fit(self, profile, prior=None)"
    check_own(
        "throughput", model, "fit", lacking=define, called="a profile alone", define=define, arguments=([],)
    )


class OwnModel:
    """Asks the user's model for fits, none of which can end the training; what is wrong is said once."""

    def __init__(
        self, model: ThroughputModel[StepTimes], limits: BatchLimits, num_nodes: int, num_replicas: int
    ) -> None:
        self._model, self._num_nodes, self._num_replicas = model, num_nodes, num_replicas
        self._sizes = np.unique(np.geomspace(1, limits.max_local_batch_size, _SIZES).round().astype(np.int64))
        self._refused = False

    def fit(self, observations: Sequence[Observation]) -> StepTimes | None:
        """A fit that can be used, or None."""
        try:
            fitted = self._model.fit(list(observations))
        except Exception as error:  # noqa: BLE001  (a user's code must not end the training)
            self.refuse(f"it cannot be fitted: {error!r}")
            return None
        problem = self._problem(fitted) if fitted is not None else ""
        if problem:
            self.refuse(f"fit gave {fitted!r}, {problem}")
            return None
        return fitted

    def refuse(self, why: str) -> None:
        """Say what is wrong, the first time."""
        if not self._refused:
            self._refused = True
            logger.warning(
                "throughput: %s is not used: %s; training goes on with its last good fit, or unfitted",
                type(self._model).__name__,
                why,
            )

    def _problem(self, fitted: StepTimes) -> str:
        """What is wrong with a fit on this placement, or nothing."""
        if isinstance(fitted, type):
            return "which is a class; give an object"
        missing = [name for name in _METHODS if not callable(getattr(fitted, name, None))]
        if missing:
            return f"which has no method {' and no method '.join(missing)}"
        nodes, replicas, steps = self._num_nodes, self._num_replicas, np.arange(4)[:, None]
        try:
            seconds = np.asarray(fitted.step_time(nodes, replicas, self._sizes, steps), dtype=np.float64)
            classes = np.asarray(fitted.node_class(np.array([nodes])))
        except Exception as error:  # noqa: BLE001  (a user's code must not end the training)
            return f"which cannot be asked: {error!r}"
        if not np.all(np.isfinite(seconds) & (seconds > 0)):
            bad = seconds[~(np.isfinite(seconds) & (seconds > 0))].flat[0]
            return f"whose step_time gives {bad} s; a time is a number above 0"
        if classes.dtype.kind not in "iu":
            return f"whose node_class gives {classes!r}; give whole numbers"
        return ""

"""The throughput model of Pollux section 3.2: seconds per step from placement, local batch, accumulation."""

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MIN_GAMMA, MAX_GAMMA = 1.0, 10.0
MIN_SANE_S, MAX_SANE_S = 1e-9, 1e6
"""No pass over a sample is shorter, and no share of a step longer, than this; beyond it is garbage."""


class StepTimes(Protocol):
    """A fitted throughput model, as goodput uses it; implement it to put another one in the paper's place.

    For given s the time must be convex in m, as every sum of a rising line and a constant is, however the
    two overlap; and it must rise with s. Where the model can say so, it is the parameters that are shared
    by the paper's equations: a :class:`ThroughputParams`, or a subclass with another T_sync, is searched
    several times faster.
    """

    def step_time(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        local_batch_size: ArrayLike,
        accumulation_steps: ArrayLike = 0,
    ) -> FloatArray:
        """Seconds of one optimizer step with s accumulation steps, over broadcast arrays."""
        ...

    def node_class(self, num_nodes: ArrayLike) -> IntArray:
        """The least number of nodes that is as fast as each given one; the number itself where all differ."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputParams:
    """The seven parameters theta_sys of Pollux Eq. 12; seconds, but ``gamma``.

    T_grad = alpha_grad + beta_grad m. T_sync has a pair (alpha, beta) for one node (local) and one for
    several nodes (node). gamma in [1, 10] joins the two times.
    """

    alpha_grad: float
    beta_grad: float
    alpha_sync_local: float
    beta_sync_local: float
    alpha_sync_node: float
    beta_sync_node: float
    gamma: float

    def sync_time(self, num_nodes: ArrayLike, num_replicas: ArrayLike) -> FloatArray:
        """Seconds to average the gradients of K replicas on N nodes; :func:`sync_time`."""
        return sync_time(self, num_nodes, num_replicas)

    def step_time(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        local_batch_size: ArrayLike,
        accumulation_steps: ArrayLike = 0,
    ) -> FloatArray:
        """Seconds of one optimizer step with s accumulation steps; :func:`step_time`."""
        return step_time(self, num_nodes, num_replicas, local_batch_size, accumulation_steps)

    def node_class(self, num_nodes: ArrayLike) -> IntArray:
        """1 for one node, 2 for several: T_sync asks for no more."""
        return np.minimum(np.asarray(num_nodes, dtype=np.int64), 2)

    def is_sane(self) -> bool:
        """Whether this can be a fit at all: finite, not negative, not absurd, some time to compute."""
        seconds = [getattr(self, name) for name in self.__dataclass_fields__ if name != "gamma"]
        return (
            all(isfinite(value) and 0 <= value <= MAX_SANE_S for value in seconds)
            and isfinite(self.gamma)
            and MIN_GAMMA <= self.gamma <= MAX_GAMMA
            and self.alpha_grad + self.beta_grad >= MIN_SANE_S
        )


def is_sane(params: ThroughputParams) -> bool:
    """Whether the parameters can be a fit at all; :meth:`ThroughputParams.is_sane`."""
    return params.is_sane()


def grad_time(params: ThroughputParams, local_batch_size: ArrayLike) -> FloatArray:
    """Seconds of one forward and backward pass over m samples; T_grad, Pollux Eq. 8."""
    return params.alpha_grad + params.beta_grad * np.asarray(local_batch_size, dtype=np.float64)


def sync_time(params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike) -> FloatArray:
    """Seconds to average the gradients of K replicas on N nodes; T_sync, Pollux Eq. 9. 0 for K = 1."""
    nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
    beyond_two = np.maximum(replicas - 2.0, 0.0)
    local = params.alpha_sync_local + params.beta_sync_local * beyond_two
    across = params.alpha_sync_node + params.beta_sync_node * beyond_two
    seconds = np.where(nodes > 1, across, local)
    return np.where(replicas > 1, seconds, 0.0).astype(np.float64)


def step_time(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> FloatArray:
    """Seconds of one optimizer step with s accumulation steps, over broadcast arrays; Pollux Eq. 10 and 11.

    T_iter = s T_grad + (T_grad^gamma + T_sync^gamma)^(1 / gamma).
    """
    grad = grad_time(params, local_batch_size)
    sync = params.sync_time(num_nodes, num_replicas)
    longer, shorter = np.maximum(grad, sync), np.minimum(grad, sync)
    ratio = np.divide(shorter, longer, out=np.zeros(np.shape(longer)), where=longer > 0)
    joined = longer * (1.0 + ratio**params.gamma) ** (1.0 / params.gamma)
    return np.asarray(np.asarray(accumulation_steps) * grad + joined, dtype=np.float64)

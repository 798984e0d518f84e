"""A throughput model with one tier more than the paper's: placements that cross a rack's switch.

The example of how to replace the paper's model. A class that says how long a step takes (here the paper's
parameters and one more pair for T_sync) and a class that fits it; the search for the best batch split, the
tuner and the limits take it as it is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pollux_agent.model.throughput import FloatArray, IntArray, ThroughputParams
from pollux_agent.model.tiers import Profile, fit_tiers, usable


@dataclass(frozen=True, slots=True, kw_only=True)
class RackParams(ThroughputParams):
    """The paper's parameters, and (alpha, beta) of a sync over more nodes than one rack holds."""

    alpha_sync_rack: float
    beta_sync_rack: float
    nodes_per_rack: int

    def sync_time(self, num_nodes: ArrayLike, num_replicas: ArrayLike) -> FloatArray:
        """T_sync by tier: nothing, within a node, within a rack, across racks."""
        nodes, replicas = np.broadcast_arrays(num_nodes, num_replicas)
        tier = rack_tier(nodes, replicas, self.nodes_per_rack)
        alphas = np.array([0.0, self.alpha_sync_local, self.alpha_sync_node, self.alpha_sync_rack])
        betas = np.array([0.0, self.beta_sync_local, self.beta_sync_node, self.beta_sync_rack])
        return np.asarray(alphas[tier] + betas[tier] * np.maximum(replicas - 2.0, 0.0))

    def node_class(self, num_nodes: ArrayLike) -> IntArray:
        """1, 2, or one more than a rack holds."""
        nodes = np.asarray(num_nodes, dtype=np.int64)
        return np.where(nodes > self.nodes_per_rack, self.nodes_per_rack + 1, np.minimum(nodes, 2))


class RackThroughput:
    """Fits a :class:`RackParams`; placements are taken to fill one rack before the next.

    Raises ValueError unless a rack holds at least one node.
    """

    def __init__(self, nodes_per_rack: int) -> None:
        if nodes_per_rack < 1:
            raise ValueError(f"nodes_per_rack is {nodes_per_rack}; a rack holds at least 1 node")
        self.nodes_per_rack = nodes_per_rack

    def fit(self, profile: Profile, *, prior: RackParams | None = None) -> RackParams | None:
        """By the paper's objective; what was not tried costs what ``prior`` says, or little. Never raises."""
        prior = prior if prior is not None and prior.is_sane() else None
        points = usable(profile, lambda nodes, replicas: rack_tier(nodes, replicas, self.nodes_per_rack), 3)
        if points is None:
            return prior
        theta = fit_tiers(points, None if prior is None else _vector(prior))
        if theta is None:
            return prior
        values = dict(zip(_ORDER, theta.tolist(), strict=True))
        params = RackParams(**values, nodes_per_rack=self.nodes_per_rack)
        return params if params.is_sane() else prior


def rack_tier(num_nodes: ArrayLike, num_replicas: ArrayLike, nodes_per_rack: int) -> IntArray:
    """0 for one replica, 1 within a node, 2 within a rack, 3 across racks."""
    nodes, replicas = np.asarray(num_nodes), np.asarray(num_replicas)
    across = np.where(nodes > nodes_per_rack, 3, np.where(nodes > 1, 2, 1))
    return np.where(replicas > 1, across, 0)


_ORDER = (
    "alpha_grad",
    "beta_grad",
    "alpha_sync_local",
    "beta_sync_local",
    "alpha_sync_node",
    "beta_sync_node",
    "alpha_sync_rack",
    "beta_sync_rack",
    "gamma",
)


def _vector(params: RackParams) -> FloatArray:
    return np.array([getattr(params, name) for name in _ORDER])

"""The throughput model of Pollux section 3.2: seconds per step from placement, local batch, accumulation."""

from dataclasses import dataclass


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

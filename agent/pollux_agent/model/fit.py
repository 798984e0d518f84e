"""The fit of the paper's throughput model to measured step times; Pollux section 4.1."""

from dataclasses import fields
from typing import Protocol, TypeVar

import numpy as np

from pollux_agent.model.throughput import FloatArray, IntArray, StepTimes, ThroughputParams, is_sane
from pollux_agent.model.tiers import FAR_OVER_NEAR, Objective, Observation, Profile, fit_tiers, usable

__all__ = [
    "FAR_OVER_NEAR",
    "Observation",
    "PaperThroughput",
    "Profile",
    "ThroughputModel",
    "fit_throughput",
    "objective",
]

Fitted = TypeVar("Fitted", bound=StepTimes)


class ThroughputModel(Protocol[Fitted]):
    """What a job fits to its step times: the plug-in point for another throughput model than the paper's."""

    def fit(self, profile: Profile, *, prior: Fitted | None = None) -> Fitted | None:
        """The best explanation of the observations, None (or ``prior``) if there is none. Never raises."""
        ...


class PaperThroughput:
    """The model of Pollux section 3.2."""

    def fit(self, profile: Profile, *, prior: ThroughputParams | None = None) -> ThroughputParams | None:
        return fit_throughput(profile, prior=prior)


def fit_throughput(profile: Profile, *, prior: ThroughputParams | None = None) -> ThroughputParams | None:
    """The parameters that best explain the observations, None if not one of them is usable.

    :func:`pollux_agent.model.tiers.fit_tiers` with the paper's two tiers, one node and several. ``prior`` is
    the fit of an earlier run of the same model; it stands in for what this run has not tried. Never raises:
    observations that cannot be (not finite, not positive, absurd) are left out.
    """
    prior = prior if prior is not None and is_sane(prior) else None
    points = usable(profile, paper_tier, 2)
    if points is None:
        return prior
    theta = fit_tiers(points, None if prior is None else _vector(prior))
    if theta is None:
        return prior
    names = (field.name for field in fields(ThroughputParams))
    params = ThroughputParams(**dict(zip(names, theta.tolist(), strict=True)))
    return params if is_sane(params) else prior


def objective(params: ThroughputParams, profile: Profile) -> float:
    """What :func:`fit_throughput` minimises, at ``params``; NaN if not one observation is usable."""
    points = usable(profile, paper_tier, 2)
    return float("nan") if points is None else Objective(points)(_vector(params))[0]


def paper_tier(num_nodes: FloatArray, num_replicas: FloatArray) -> IntArray:
    """0 for one replica, 1 for one node, 2 for several; the cases of Pollux Eq. 9."""
    return np.where(num_replicas > 1, np.where(num_nodes > 1, 2, 1), 0)


def _vector(params: ThroughputParams) -> FloatArray:
    return np.array([getattr(params, field.name) for field in fields(ThroughputParams)])

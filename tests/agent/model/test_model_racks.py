"""A throughput model in the paper's place: one with a rack's switch, through fit, search and tuner."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from pollux_agent.model.fit import Observation
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.racks import RackParams, RackThroughput
from pollux_agent.model.throughput import FloatArray, IntArray, ThroughputParams
from pollux_agent.torch.profile import Profile
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.tuner import Tuner

TRUTH = RackParams(
    alpha_grad=0.05,
    beta_grad=0.002,
    alpha_sync_local=0.03,
    beta_sync_local=0.0005,
    alpha_sync_node=0.12,
    beta_sync_node=0.002,
    alpha_sync_rack=0.6,
    beta_sync_rack=0.004,
    gamma=1.6,
    nodes_per_rack=2,
)
LIMITS = BatchLimits(initial_batch_size=128, max_batch_size=4096, max_local_batch_size=256)
PLACEMENTS = ((1, 1), (1, 2), (1, 4), (2, 4), (2, 8), (3, 12), (4, 16), (4, 12))


def observe(*placements: tuple[int, int], locals_: tuple[int, ...] = (32, 64, 128)) -> list[Observation]:
    return [
        Observation(
            num_nodes=nodes,
            num_replicas=replicas,
            local_batch_size=local,
            optim_step_time_s=float(TRUTH.step_time(nodes, replicas, local)),
            accum_step_time_s=TRUTH.alpha_grad + TRUTH.beta_grad * local,
        )
        for nodes, replicas in placements
        for local in locals_
    ]


def test_the_racks_switch_is_found_and_predicts_what_was_not_measured() -> None:
    found = RackThroughput(nodes_per_rack=2).fit(observe(*PLACEMENTS))
    assert found is not None
    for nodes, replicas, local in ((3, 9, 48), (4, 10, 200), (2, 6, 100)):
        got = float(found.step_time(nodes, replicas, local, 2))
        assert got == pytest.approx(float(TRUTH.step_time(nodes, replicas, local, 2)), rel=0.03)


def test_racks_that_were_not_tried_cost_a_tenth_more_than_nodes() -> None:
    found = RackThroughput(nodes_per_rack=2).fit(observe((1, 1), (2, 4), (2, 8)))
    assert found is not None
    assert found.alpha_sync_rack == pytest.approx(1.1 * found.alpha_sync_node)
    prior = RackThroughput(nodes_per_rack=2).fit(observe((1, 1), (2, 4), (2, 8)), prior=TRUTH)
    assert prior is not None
    assert prior.alpha_sync_rack == pytest.approx(TRUTH.alpha_sync_rack)


def test_the_search_tells_racks_apart() -> None:
    model = GoodputModel(TRUTH, 2000.0, LIMITS)
    nodes, replicas = np.array([1, 2, 3, 4]), 4
    best = model.best(nodes, replicas)
    assert best.goodput[1] > best.goodput[2] == best.goodput[3]
    for index, count in enumerate(nodes):
        alone = model.best(int(count), replicas)
        assert float(alone.goodput) == pytest.approx(float(best.goodput[index]))


class Squared:
    """No subclass of ours: T_iter = (s + 1)(1 + (m / 100)^2) + N / 10, every number of nodes another time."""

    def step_time(
        self,
        num_nodes: ArrayLike,
        num_replicas: ArrayLike,
        local_batch_size: ArrayLike,
        accumulation_steps: ArrayLike = 0,
    ) -> FloatArray:
        local, steps = np.asarray(local_batch_size), np.asarray(accumulation_steps)
        grad = 1.0 + (local / 100.0) ** 2 + 0.0 * np.asarray(num_replicas)
        return np.asarray((steps + 1) * grad + np.asarray(num_nodes) / 10.0)

    def node_class(self, num_nodes: ArrayLike) -> IntArray:
        return np.asarray(num_nodes, dtype=np.int64)


def test_any_model_that_says_how_long_a_step_takes_can_be_searched() -> None:
    model = GoodputModel(Squared(), 1000.0, LIMITS)
    local, steps = np.arange(1, 257)[:, None], np.arange(0, 64)
    for nodes, replicas in ((1, 1), (2, 3), (3, 8)):
        batch = replicas * local * (steps + 1)
        legal = (batch >= 128) & (batch <= 4096)
        if replicas == 1:
            legal &= (batch == 128) | (steps >= 1)
        want = np.max(model.goodput(nodes, replicas, local, steps), where=legal, initial=0.0)
        assert float(model.best(nodes, replicas).goodput) >= 0.995 * want


def test_the_tuner_works_with_the_users_model_and_reports_the_papers_fit() -> None:
    profile = Profile()
    for seen in observe((1, 2), (4, 8)):
        key = (seen.num_nodes, seen.num_replicas, seen.local_batch_size)
        profile.record(key, accum_s=[seen.accum_step_time_s or 0.0], optim_s=seen.optim_step_time_s)
    tuner = Tuner(LIMITS, adaptive=True, num_nodes=4, num_replicas=8, throughput=RackThroughput(2))
    tuner.refit(profile)
    assert isinstance(tuner.model, RackParams)
    assert type(tuner.params) is ThroughputParams
    plan = tuner.choose(5000.0, BatchPlan(batch_size=128, micro_batches=1), largest_batch_size=4096)
    assert plan.batch_size > 128


seconds = st.one_of(st.floats(), st.floats(1e-6, 1e3), st.just(0.0))
observations = st.builds(
    Observation,
    num_nodes=st.integers(-1, 6),
    num_replicas=st.integers(-1, 12),
    local_batch_size=st.integers(-1, 4096),
    optim_step_time_s=seconds,
    accum_step_time_s=st.one_of(st.none(), seconds),
    count=st.integers(0, 1000),
)


@given(profile=st.lists(observations, max_size=8), prior=st.sampled_from([None, TRUTH]))
@settings(deadline=None, max_examples=60)
def test_it_never_raises_and_what_it_gives_is_sane(
    profile: list[Observation], prior: RackParams | None
) -> None:
    found = RackThroughput(nodes_per_rack=2).fit(profile, prior=prior)
    if found is not None:
        assert found.is_sane()
        assert np.isfinite(float(found.step_time(3, 8, 64, 3)))
    broken = RackThroughput(nodes_per_rack=2).fit(profile, prior=replace(TRUTH, alpha_grad=float("nan")))
    assert broken is None or broken.is_sane()


def test_a_rack_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="nodes_per_rack is 0"):
        RackThroughput(nodes_per_rack=0)

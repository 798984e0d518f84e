"""The best batch split against exhaustive search, and the limits that it must keep."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from fitted import FIT as PARAMS
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pollux_agent.model.goodput import BatchLimits, GoodputModel, best_of_jobs
from pollux_agent.model.throughput import ThroughputParams

LIMITS = BatchLimits(initial_batch_size=128, max_batch_size=4096, max_local_batch_size=256)

REPLICAS = (1, 2, 3, 7, 16)


def exponent(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


params = st.builds(
    ThroughputParams,
    alpha_grad=exponent(-3, 0),
    beta_grad=exponent(-5, -2),
    alpha_sync_local=exponent(-3, 0),
    beta_sync_local=exponent(-4, -2),
    alpha_sync_node=exponent(-3, 0),
    beta_sync_node=exponent(-4, -2),
    gamma=st.floats(1, 10),
)
limits = st.builds(
    lambda initial, factor, local, least: BatchLimits(
        initial_batch_size=initial,
        max_batch_size=initial * factor,
        max_local_batch_size=local + least,
        min_local_batch_size=least,
    ),
    st.integers(1, 200),
    st.integers(1, 40),
    st.integers(0, 150),
    st.integers(1, 10),
)


def exhaustive(model: GoodputModel, nodes: int, replicas: int) -> float:
    """The highest goodput over all whole (m, s) with M0 <= M <= limit; 0 if there is none."""
    bounds = model.limits
    local = np.arange(bounds.min_local_batch_size, bounds.max_local_batch_size + 1)[:, None]
    steps = np.arange(0, bounds.max_batch_size // replicas + 1)
    batch = replicas * local * (steps + 1)
    legal = (batch >= bounds.initial_batch_size) & (batch <= bounds.max_batch_size)
    if replicas == 1:
        legal &= (batch == bounds.initial_batch_size) | (steps >= 1)
    return float(np.max(model.goodput(nodes, replicas, local, steps), where=legal, initial=0.0))


@given(params=params, noise=exponent(-1, 6), limits=limits)
@settings(deadline=None, max_examples=60)
def test_the_best_split_is_within_half_a_percent_of_all_splits(
    params: ThroughputParams, noise: float, limits: BatchLimits
) -> None:
    model = GoodputModel(params, noise, limits)
    found = model.best(np.array([[1], [2]]), np.array(REPLICAS)).goodput
    for row, nodes in enumerate((1, 2)):
        for column, replicas in enumerate(REPLICAS):
            assert found[row, column] >= 0.995 * exhaustive(model, nodes, replicas)


@pytest.mark.parametrize("most", [100_000, 2**31 - 1])
def test_limits_far_apart_cost_neither_memory_nor_the_best_split(most: int) -> None:
    """One sample a GPU at a time and a huge total: as many accumulation steps are possible."""
    bounds = BatchLimits(initial_batch_size=1, max_batch_size=most, max_local_batch_size=1)
    model = GoodputModel(PARAMS, 1e5, bounds)
    tracemalloc.start()
    found = model.best(1, np.array(REPLICAS)).goodput
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20e6
    steps = np.arange(1, 100_000)
    for replicas, goodput in zip(REPLICAS, found, strict=True):
        legal = replicas * (steps + 1) <= most
        assert goodput >= 0.995 * np.max(model.goodput(1, replicas, 1, steps), where=legal, initial=0.0)


@given(params=params, noise=exponent(-1, 6), limits=limits, adaptive=st.booleans(), fitted=st.booleans())
@settings(deadline=None, max_examples=60)
def test_no_limit_is_ever_passed(
    params: ThroughputParams, noise: float, limits: BatchLimits, adaptive: bool, fitted: bool
) -> None:
    model = GoodputModel(params if fitted else None, noise, limits, adaptive)
    replicas = np.arange(1, 65)
    best = model.best(np.where(replicas > 4, 2, 1), replicas)
    batch = replicas * best.local_batch_size * (best.accumulation_steps + 1)
    usable = best.goodput > 0
    assert np.all(batch <= limits.max_batch_size)
    assert np.all(best.local_batch_size <= limits.max_local_batch_size)
    assert np.all(best.local_batch_size[usable] >= limits.min_local_batch_size)
    rounding = replicas * (best.accumulation_steps + 1)
    assert np.all(batch[usable] > limits.initial_batch_size - rounding[usable])
    assert np.all(best.accumulation_steps >= 0)
    if batch[0] > max(limits.initial_batch_size, limits.min_local_batch_size):
        assert best.accumulation_steps[0] >= 1
    possible = replicas * limits.min_local_batch_size <= limits.max_batch_size
    assert not np.any(usable & ~possible)


@given(params=params, noise=exponent(0, 6), limits=limits)
@settings(deadline=None, max_examples=50)
def test_reported_goodput_is_that_of_the_reported_split(
    params: ThroughputParams, noise: float, limits: BatchLimits
) -> None:
    model = GoodputModel(params, noise, limits)
    best = model.best(1, 4)
    assume(best.goodput > 0)
    again = model.goodput(1, 4, best.local_batch_size, best.accumulation_steps)
    assert float(again) == pytest.approx(float(best.goodput))


@given(params=params, noise=exponent(-1, 6), limits=limits, replicas=st.integers(1, 64), spread=st.booleans())
@settings(deadline=None, max_examples=150)
def test_one_placement_is_searched_to_within_half_a_percent(
    params: ThroughputParams, noise: float, limits: BatchLimits, replicas: int, spread: bool
) -> None:
    model = GoodputModel(params, noise, limits)
    nodes = 2 if spread and replicas > 1 else 1
    assert float(model.best(nodes, replicas).goodput) >= 0.995 * exhaustive(model, nodes, replicas)


@given(
    jobs=st.lists(st.tuples(params, exponent(-1, 6), limits), min_size=1, max_size=5),
)
@settings(deadline=None, max_examples=20)
def test_many_jobs_at_once_and_one_placement_alone_give_the_same(
    jobs: list[tuple[ThroughputParams, float, BatchLimits]],
) -> None:
    models = [GoodputModel(*job) for job in jobs]
    models += [GoodputModel.unfitted(jobs[0][2]), GoodputModel(*jobs[0], adaptive=False)]
    nodes, replicas = np.array([[1], [2], [4]]), np.arange(0, 9)
    together = best_of_jobs(models, nodes, replicas)
    for row, model in enumerate(models):
        table = model.best(nodes, replicas)
        assert np.allclose(together.goodput[row], table.goodput, rtol=1e-9)
        for index, placement in enumerate(zip(*np.broadcast_arrays(nodes, replicas), strict=True)):
            for column, (n, k) in enumerate(zip(*placement, strict=True)):
                alone = model.best(int(n), int(k))
                assert float(alone.goodput) == pytest.approx(table.goodput[index, column], rel=1e-9)
                batch = alone.local_batch_size * (alone.accumulation_steps + 1) * k
                assert batch <= model.limits.max_batch_size


@given(
    values=st.lists(st.one_of(st.floats(), st.sampled_from([0.0, 1e6, -1.0])), min_size=7, max_size=7),
    noise=st.floats(),
)
@settings(deadline=None, max_examples=100)
def test_garbage_never_raises_nor_gives_a_batch_beyond_the_limits(values: list[float], noise: float) -> None:
    garbage = ThroughputParams(**dict(zip(ThroughputParams.__dataclass_fields__, values, strict=True)))
    with np.errstate(all="ignore"):
        best = GoodputModel(garbage, noise, LIMITS).best(1, 4)
    assert int(best.local_batch_size) * (int(best.accumulation_steps) + 1) * 4 <= LIMITS.max_batch_size


def test_goodput_by_hand() -> None:
    model = GoodputModel(replace(PARAMS, gamma=1.0), 128.0, LIMITS)
    # 2 replicas, m = 192, s = 0: M = 384; T = 0.05 + 0.192 + 0.02; efficiency = 256 / 512
    assert float(model.goodput(1, 2, 192, 0)) == pytest.approx(384 / 0.262 * 0.5)


def test_without_noise_the_batch_stays_at_m0() -> None:
    best = GoodputModel(PARAMS, 0.0, LIMITS).best(1, [1, 2, 4])
    assert best.local_batch_size.tolist() == [128, 64, 32]
    assert best.accumulation_steps.tolist() == [0, 0, 0]


def test_with_endless_noise_the_batch_grows_to_the_limit() -> None:
    best = GoodputModel(PARAMS, 1e300, LIMITS).best(2, 16)
    assert (int(best.local_batch_size), int(best.accumulation_steps)) == (256, 0)


def test_one_gpu_accumulates_as_soon_as_the_batch_is_above_m0() -> None:
    roomy = replace(LIMITS, max_local_batch_size=4096)
    best = GoodputModel(PARAMS, 1e6, roomy).best(1, 1)
    assert int(best.accumulation_steps) == 1


def test_a_fixed_batch_is_split_as_evenly_as_it_goes_and_never_more_efficient_than_one() -> None:
    model = GoodputModel(PARAMS, None, LIMITS, adaptive=False)
    best = model.best(1, [1, 2, 3])
    assert best.local_batch_size.tolist() == [128, 64, 43]
    # the 129th sample of 3 x 43 is no progress
    seconds = (0.093**1.5 + 0.021**1.5) ** (1 / 1.5)
    assert best.goodput[2] == pytest.approx(128 / seconds)


def test_where_rounding_up_passes_the_limit_the_batch_is_rounded_down() -> None:
    tight = BatchLimits(initial_batch_size=128, max_batch_size=128, max_local_batch_size=256)
    for adaptive in (True, False):
        best = GoodputModel(PARAMS, 1000.0, tight, adaptive).best(1, 3)
        assert int(best.local_batch_size) == 42
        assert best.goodput > 0


def test_more_gpus_than_samples_are_worth_nothing() -> None:
    small = BatchLimits(initial_batch_size=4, max_batch_size=8, max_local_batch_size=8)
    assert GoodputModel(PARAMS, 10.0, small).best(1, [8, 9]).goodput[1] == 0
    assert GoodputModel.unfitted(small).best(1, [8, 9]).goodput.tolist() == [8.0, 0.0]


def test_before_the_first_measurement_goodput_is_the_number_of_gpus_at_m0() -> None:
    for model in (GoodputModel.unfitted(LIMITS), GoodputModel(PARAMS, None, LIMITS)):
        best = model.best([[1], [2]], [1, 2, 4])
        assert not model.is_fitted
        assert best.goodput.tolist() == [[1.0, 2.0, 4.0]] * 2
        assert best.local_batch_size.tolist() == [[128, 64, 32]] * 2


def test_nothing_runs_on_no_gpu() -> None:
    best = GoodputModel(PARAMS, 100.0, LIMITS).best([0, 1], [0, 1])
    assert best.goodput[0] == 0 and best.goodput[1] > 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_batch_size": 127}, "max_batch_size is 127"),
        ({"max_local_batch_size": 1, "min_local_batch_size": 2}, "max_local_batch_size is 1"),
        ({"min_local_batch_size": 0}, "min_local_batch_size is 0"),
    ],
)
def test_contradicting_limits_are_named(change: dict[str, int], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(LIMITS, **change)

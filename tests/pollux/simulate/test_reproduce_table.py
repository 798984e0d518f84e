"""How simulations are compared with published results: medians of seeds, means over workloads, peers."""

from collections.abc import Iterable

import pytest

from pollux.simulate.reproduce import Case, judge


def case(
    group: str, workload: str, *, seed: int = 0, reference_s: float | None = 100.0, peer: str = ""
) -> Case:
    policy = group.split()[0]
    return Case(
        group=group,
        workload=workload,
        policy=policy,
        seed=seed,
        reference_s=reference_s,
        peer=peer,
        options={},
    )


def results(parts: Iterable[Case], *averages: float, unfinished: int = 0) -> dict[str, dict[str, float]]:
    each = zip(parts, averages, strict=True)
    return {part.name: {"avg_jct_s": average, "unfinished": unfinished} for part, average in each}


def test_a_workload_counts_with_the_median_of_its_seeds() -> None:
    parts = [case("pollux load 1.0", "philly-1.0/workload-1", seed=seed) for seed in range(3)]
    verdict = judge("pollux load 1.0", parts, results(parts, 101.0, 150.0, 102.0))
    assert verdict.ratio == pytest.approx(1.02)
    assert verdict.met is True


def test_the_mean_over_workloads_is_held_to_the_bar_and_each_one_of_a_baseline() -> None:
    for group, met in (("pollux load 1.0", True), ("tiresias load 1.0", False)):
        parts = [case(group, f"philly-1.0/workload-{index}") for index in (1, 3)]
        verdict = judge(group, parts, results(parts, 105.0, 99.0))
        assert verdict.ratio == pytest.approx(1.02)
        assert verdict.worst == pytest.approx(1.05)
        assert verdict.met is met


def test_nothing_is_met_until_everything_is_simulated() -> None:
    parts = [case("pollux load 1.0", f"philly-1.0/workload-{index}") for index in (1, 3)]
    verdict = judge("pollux load 1.0", parts, results(parts[:1], 90.0))
    assert (verdict.done, verdict.cases, verdict.met) == (1, 2, None)


def test_ours_is_compared_with_our_sia_on_the_same_workload() -> None:
    sia = case("sia on sia-helios", "sia-helios/workload-1", reference_s=None)
    ours = case("ours on sia-helios", "sia-helios/workload-1", reference_s=None, peer=sia.name)
    verdict = judge("ours on sia-helios", [ours], results([sia, ours], 200.0, 180.0))
    assert verdict.ratio == pytest.approx(0.9)
    assert verdict.met is True
    assert judge("sia on sia-helios", [sia], results([sia], 200.0)).met is None


def test_no_bar_is_met_by_leaving_jobs_unfinished() -> None:
    parts = [case("pollux load 1.0", "philly-1.0/workload-1")]
    assert judge("pollux load 1.0", parts, results(parts, 90.0)).met is True
    verdict = judge("pollux load 1.0", parts, results(parts, 90.0, unfinished=2))
    assert (verdict.met, verdict.unfinished) == (False, 2)

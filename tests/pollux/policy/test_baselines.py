"""What tiresias, optimus and fifo decide on small clusters."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from snapshot_builder import SCALES_WELL, after_decision, make_job, make_snapshot

from pollux.plan import plan
from pollux.policy import decide
from pollux.policy.tiresias import DEMOTION_GPU_S
from pollux.snapshot import Decision, Job, Oracle, PolicySettings, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel


def rigid(job_id: str, gpus: int, **change: object) -> Job:
    plain: dict[str, object] = {"kind": "rigid", "min_gpus": gpus, "max_gpus": gpus, "max_gpus_seen": gpus}
    return make_job(job_id, **(plain | change))


def snapshot_of(policy: str, *jobs: Job, nodes: int = 2, avoid: bool = False) -> Snapshot:
    settings = PolicySettings(name=policy, avoid_interference=avoid)
    return make_snapshot(list(jobs), nodes={f"node-{index}": 4 for index in range(nodes)}, policy=settings)


def gpus_of(decision: Decision) -> dict[str, int]:
    return {name: sum(job.placement.values()) for name, job in decision.jobs.items()}


def test_tiresias_lets_later_jobs_fill_what_an_earlier_one_cannot_use() -> None:
    decision = decide(snapshot_of("tiresias", rigid("a", 6), rigid("b", 4), rigid("c", 2)))
    assert gpus_of(decision) == {"a": 6, "b": 0, "c": 2}
    assert dict(decision.jobs["a"].placement) == {"node-0": 4, "node-1": 2}


def test_tiresias_preempts_a_job_that_was_served_enough_for_one_that_was_not() -> None:
    served = rigid("a", 8, placement={"node-0": 4, "node-1": 4}, attained_gpu_s=DEMOTION_GPU_S)
    first = snapshot_of("tiresias", served, rigid("b", 4))
    decision = decide(first)
    assert gpus_of(decision) == {"a": 0, "b": 4}
    assert decision.state == {"demoted": ["a"]}
    assert [action.kind for action in plan(first, decision)] == ["stop", "start"]


def test_tiresias_keeps_the_order_of_demotion() -> None:
    late = rigid("late", 8, attained_gpu_s=DEMOTION_GPU_S)
    early = rigid("early", 8, attained_gpu_s=2 * DEMOTION_GPU_S)
    snapshot = replace(snapshot_of("tiresias", late, early), state={"demoted": ["early"]})
    assert gpus_of(decide(snapshot)) == {"late": 0, "early": 8}


@pytest.mark.parametrize("state", [{"demoted": 5}, {"demoted": [3, None]}, {"demoted": ["gone"]}])
def test_tiresias_lives_with_any_state(state: dict[str, object]) -> None:
    assert gpus_of(decide(replace(snapshot_of("tiresias", rigid("a", 4)), state=state))) == {"a": 4}


def test_a_job_that_may_not_be_preempted_keeps_its_gpus_under_tiresias() -> None:
    held = {"node-0": 4, "node-1": 4}
    pinned = rigid("a", 8, placement=held, attained_gpu_s=DEMOTION_GPU_S, preemptible=False)
    assert gpus_of(decide(snapshot_of("tiresias", pinned, rigid("b", 4)))) == {"a": 8, "b": 0}


@pytest.mark.parametrize("policy", ["tiresias", "fifo", "optimus"])
def test_where_interference_is_avoided_a_second_job_does_not_span_a_node(policy: str) -> None:
    jobs = [rigid("a", 6), rigid("b", 6), rigid("c", 2)]
    together = decide(snapshot_of(policy, *jobs, nodes=3))
    assert gpus_of(together)["b"] == 6
    snapshot = snapshot_of(policy, *jobs, nodes=3, avoid=True)
    apart = decide(snapshot)
    assert gpus_of(apart)["b"] == 0
    plan(snapshot, apart)


def test_fifo_lets_nobody_overtake() -> None:
    snapshot = snapshot_of("fifo", rigid("a", 6), rigid("b", 4), rigid("c", 2))
    decision = decide(snapshot)
    assert gpus_of(decision) == {"a": 6, "b": 0, "c": 0}
    assert decision.jobs["c"].reason == "waits behind b"
    later = decide(after_decision(snapshot, decision))
    assert gpus_of(later) == gpus_of(decision)


def scaling(job_id: str, times: tuple[float, ...], remaining: float, **change: object) -> Job:
    plain: dict[str, object] = {
        "kind": "strong_scaling",
        "max_gpus": len(times),
        "max_gpus_seen": len(times),
        "oracle": Oracle(step_time_s=times, remaining_steps=remaining),
    }
    return make_job(job_id, **(plain | change))


def test_optimus_minimises_the_sum_of_remaining_times_where_gains_fall() -> None:
    """With gains that fall from GPU to GPU, one at a time to the largest gain is the optimum."""
    curves = {"a": (8.0, 4.5, 3.2, 2.6, 2.3), "b": (6.0, 3.1, 2.2, 1.9, 1.8), "c": (9.0, 5.0, 4.0, 3.5, 3.2)}
    steps = {"a": 10.0, "b": 30.0, "c": 5.0}
    for times in curves.values():
        gains = [now - then for now, then in pairwise(times)]
        assert gains == sorted(gains, reverse=True)
    decision = decide(snapshot_of("optimus", *(scaling(name, curves[name], steps[name]) for name in curves)))
    counts = gpus_of(decision)

    def total(each: tuple[int, ...]) -> float:
        return sum(steps[name] * curves[name][gpus - 1] for name, gpus in zip(curves, each, strict=True))

    best = min(total(each) for each in product(range(1, 6), repeat=3) if sum(each) <= 8)
    assert total(tuple(counts[name] for name in curves)) == pytest.approx(best)


def test_optimus_looks_one_gpu_ahead_and_so_stalls_where_the_next_one_costs() -> None:
    stalls = scaling("a", (8.0, 4.0, 3.0, 2.0, 2.5, 1.0), 100.0)
    assert gpus_of(decide(snapshot_of("optimus", stalls))) == {"a": 4}


def test_optimus_leaves_a_job_where_it_is_if_its_number_of_gpus_stays() -> None:
    times = (8.0, 4.0, 3.0, 2.0)
    jobs = [scaling("a", times, 10.0, placement={"node-1": 4}), scaling("b", times, 10.0)]
    decision = decide(snapshot_of("optimus", *jobs))
    assert {name: dict(job.placement) for name, job in decision.jobs.items()} == {
        "a": {"node-1": 4},
        "b": {"node-0": 4},
    }


def test_optimus_without_an_oracle_goes_by_the_fits() -> None:
    jobs = [make_job("a", kind="strong_scaling", progress=10.0, target_progress=1000.0), make_job("b")]
    assert sum(gpus_of(decide(snapshot_of("optimus", *jobs))).values()) == 8


@pytest.mark.parametrize("steps", [(1e5, 1e5), (1e4, 9e5), (3e5, 2e4)])
def test_optimus_that_scales_batches_minimises_remaining_times_at_the_best_batch_of_each_count(
    steps: tuple[float, float],
) -> None:
    jobs = [
        make_job(name, noise_scale=noise, target_progress=left, max_gpus_seen=8)
        for name, noise, left in (("calm", 10.0, steps[0]), ("noisy", 1e6, steps[1]))
    ]
    decision = decide(snapshot_of("optimus-scaling", *jobs, nodes=1))
    assert decision.policy == "optimus-scaling"

    def seconds(job: Job, gpus: int) -> float:
        limits = BatchLimits(
            initial_batch_size=job.initial_batch_size,
            max_batch_size=job.max_batch_size,
            max_local_batch_size=job.max_local_batch_size,
            min_local_batch_size=job.min_local_batch_size,
        )
        goodput = float(GoodputModel(SCALES_WELL, job.noise_scale, limits).best(1, gpus).goodput)
        return (job.target_progress or 0.0) * job.initial_batch_size / goodput

    best = min(range(1, 4), key=lambda first: seconds(jobs[0], first) + seconds(jobs[1], 4 - first))
    assert gpus_of(decision) == {"calm": best, "noisy": 4 - best}


def test_optimus_counts_nodes_where_jobs_go_by_their_fits() -> None:
    """A job that loses on a second node takes no GPU there, and the other one gets them."""
    jobs = [
        make_job(name, fits={"gpu": fit}, target_progress=1e5, max_gpus_seen=8, max_gpus=8)
        for name, fit in (("local", replace(SCALES_WELL, alpha_sync_node=50.0)), ("wide", SCALES_WELL))
    ]
    assert gpus_of(decide(snapshot_of("optimus-scaling", *jobs)))["local"] <= 4

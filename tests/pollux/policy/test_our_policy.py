"""Our policy: who weighs more, what a restart has to bring, and what it makes of jobs that tell nothing."""

from dataclasses import replace
from typing import Any

import pytest
from snapshot_builder import SCALES_BADLY, SCALES_WELL, make_job, make_snapshot, new_job

from pollux.policy import decide
from pollux.policy.options import options_of
from pollux.policy.ours import noise_growth, remaining_s
from pollux.snapshot import GoodputCurve, Job, Node, PolicySettings, Snapshot

OURS = PolicySettings(name="ours")


def ours(jobs: list[Job], **nodes: int) -> Snapshot:
    return make_snapshot(jobs, nodes=nodes, policy=OURS)


def gpus_of(snapshot: Snapshot) -> dict[str, int]:
    return {name: sum(answer.placement.values()) for name, answer in decide(snapshot).jobs.items()}


def test_a_job_with_little_left_gets_more_than_an_equal_one_with_much_left() -> None:
    jobs = [make_job("long", target_progress=1e6), make_job("short", target_progress=1e4)]
    counts = gpus_of(ours(jobs, n0=4, n1=2))
    assert counts == {"short": 4, "long": 2}


def test_priority_turns_that_round() -> None:
    jobs = [make_job("long", target_progress=1e6, priority=100.0), make_job("short", target_progress=1e4)]
    counts = gpus_of(ours(jobs, n0=4, n1=2))
    assert counts == {"short": 2, "long": 4}


def test_a_job_that_scales_badly_leaves_gpus_to_others_even_if_it_is_short() -> None:
    bad = make_job("bad", target_progress=1e3, fits={"gpu": SCALES_BADLY})
    counts = gpus_of(ours([bad, make_job("good", target_progress=1e5)], n0=4, n1=1))
    assert counts == {"bad": 1, "good": 4}


def test_no_restart_for_a_job_that_is_nearly_done() -> None:
    near = make_job("job", placement={"n0": 1}, restart_s=60.0, progress=9990.0, target_progress=10_000.0)
    assert gpus_of(ours([near], n0=4)) == {"job": 1}
    assert gpus_of(ours([replace(near, target_progress=100_000.0)], n0=4)) == {"job": 4}


def test_jobs_that_do_not_tell_their_end_count_as_the_median_of_those_that_do() -> None:
    told = [make_job(f"job-{index}", target_progress=10.0 ** (index + 3)) for index in range(3)]
    silent = [make_job("silent"), new_job("new", target_progress=5.0)]
    snapshot = ours([*told, *silent], n0=4, n1=4)
    remaining = remaining_s(snapshot, options_of(snapshot))
    assert remaining[3] == remaining[4] == remaining[1]


@pytest.mark.parametrize("order", [("young", "old"), ("old", "young")])
def test_of_two_jobs_alike_the_younger_gets_more_since_its_noise_will_soon_allow_larger_batches(
    order: tuple[str, str],
) -> None:
    for_large_batches = replace(SCALES_WELL, alpha_grad=0.1, beta_grad=0.0005, alpha_sync_local=0.1)
    job = make_job(fits={"gpu": for_large_batches}, noise_scale=64.0, target_progress=1e5)
    age_s = {"young": 60.0, "old": 36_000.0}
    jobs = [replace(job, job_id=name, age_s=age_s[name]) for name in order]
    assert gpus_of(ours(jobs, n0=4, n1=2)) == {"young": 4, "old": 2}


def test_noise_grows_with_the_age_of_a_job_until_it_may_change_again() -> None:
    snapshot = ours([make_job(f"job-{age_s}", age_s=age_s) for age_s in (0.0, 60.0, 200.0, 3600.0)], n0=4)
    assert noise_growth(snapshot) == pytest.approx([1 + 200 / 60, 1 + 200 / 60, 2.0, 1 + 1 / 18])


def test_more_waiting_jobs_than_gpus_leaves_none_idle() -> None:
    jobs = [new_job(f"job-{index}") for index in range(9)]
    assert sum(gpus_of(ours(jobs, n0=4, n1=2)).values()) == 6


def test_what_was_measured_decides_the_type_of_gpu() -> None:
    slow = replace(SCALES_WELL, alpha_grad=0.05, beta_grad=0.01)
    jobs = [make_job(name, max_gpus=1, fits={"a": SCALES_WELL, "b": slow}) for name in ("one", "two")]
    jobs[1] = replace(jobs[1], fits={"a": SCALES_WELL, "b": SCALES_WELL})
    snapshot = ours(jobs, n0=1, n1=1)
    nodes = (replace(snapshot.nodes[0], gpu_type="a"), replace(snapshot.nodes[1], gpu_type="b"))
    decision = decide(replace(snapshot, nodes=nodes))
    assert decision.jobs["one"].placement == {"n0": 1}
    assert decision.jobs["two"].placement == {"n1": 1}


def test_a_job_that_restarted_seldom_is_moved_for_less_than_one_that_restarted_often() -> None:
    slower = replace(SCALES_WELL, beta_grad=SCALES_WELL.beta_grad * 1.4)
    job = make_job(
        placement={"n0": 1}, max_gpus=1, restart_s=250.0, age_s=36_000.0, fits={"a": slower, "b": SCALES_WELL}
    )
    for restarts, want in ((1, {"n1": 1}), (100, {"n0": 1})):
        snapshot = ours([replace(job, restarts=restarts)], n0=1, n1=1)
        kinds = tuple(replace(node, gpu_type=kind) for node, kind in zip(snapshot.nodes, "ab", strict=True))
        assert decide(replace(snapshot, nodes=kinds)).jobs["job"].placement == want


def test_a_job_that_has_just_restarted_is_not_shrunk_for_the_sake_of_one_that_weighs_more() -> None:
    """Beside many jobs with less to do, whose weights leave it next to nothing."""
    node = {"n0": 4}
    long = make_job("long", placement=node, restart_s=250.0, target_progress=1e7, max_gpus=4)
    rivals = [
        make_job(f"job-{index}", placement={f"m{index}": 1}, max_gpus=1 + (index == 0), target_progress=1e5)
        for index in range(9)
    ]
    sizes = {"n0": 4, **{f"m{index}": 1 for index in range(9)}}
    for trained_s, stays in ((60.0, True), (20_000.0, False)):
        jobs = [replace(long, trained_s=trained_s), *rivals]
        assert (decide(ours(jobs, **sizes)).jobs["long"].placement == node) is stays


BROKEN = {
    "a restart of a year": {"restart_s": 3e7},
    "a restart of an age": {"restart_s": 1e12},
    "days to synchronise nodes": {"fits": {"gpu": replace(SCALES_WELL, alpha_sync_node=1e5)}},
    "weeks to synchronise nodes": {"fits": {"gpu": replace(SCALES_WELL, alpha_sync_node=1e6)}},
    "weeks to synchronise GPUs": {"fits": {"gpu": replace(SCALES_WELL, alpha_sync_local=1e6)}},
    "an estimate next to nothing": {
        "estimator": "own",
        "estimates": {"gpu": GoodputCurve(one_node=(1e-9, 1.0, 2.0, 3.0))},
    },
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_a_job_says_of_itself_keeps_no_gpu_from_the_others(broken: dict[str, Any]) -> None:
    others = [
        make_job(f"job-{index}", target_progress=5_000.0 + index, max_gpus_seen=8) for index in range(5)
    ]
    bad = make_job("bad", target_progress=1e6, placement={"n0": 1}, **broken)
    counts = gpus_of(ours([*others, bad], n0=4, n1=4, n2=4, n3=4))
    assert sum(counts.values()) == 16
    assert counts.pop("bad") <= 4
    assert min(counts.values()) >= 1


def test_the_fair_share_is_of_the_types_that_the_job_may_use() -> None:
    fast = replace(SCALES_WELL, alpha_grad=0.001, beta_grad=0.0002)
    here = {"gpu_types": ("t4",), "target_progress": 5_000.0}
    jobs = [make_job(f"job-{index}", fits={"t4": SCALES_WELL}, **here) for index in range(3)]
    jobs.append(make_job("knows", fits={"t4": SCALES_WELL, "a100": fast}, **here))
    nodes = tuple(Node(name=kind, gpus=4, gpu_type=kind) for kind in ("t4", "a100"))
    snapshot = make_snapshot(jobs, policy=OURS)
    snapshot = replace(snapshot, nodes=nodes)
    assert len(set(options_of(snapshot).fair.tolist())) == 1
    assert set(gpus_of(snapshot).values()) == {1}


def test_a_job_that_can_never_run_does_not_end_the_patience_with_others() -> None:
    high = [make_job(f"high-{index}", priority=100.0) for index in range(2)]
    low = make_job("low", priority=0.01)
    hopeless = make_job("hopeless", min_gpus=64, max_gpus=64)
    for jobs in ([*high, low], [*high, low, hopeless]):
        snapshot = replace(ours(jobs, n0=4, n1=4), state={"waiting": {"low": 50, "hopeless": 50}})
        assert gpus_of(snapshot)["low"] >= 1

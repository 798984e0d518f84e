"""What every policy keeps, whatever the snapshot, and that a decision can be replayed from its file."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import SCALES_WELL, make_job, make_snapshot, new_job, snapshots

from pollux.errors import ConfigError
from pollux.plan import check
from pollux.policy import POLICIES, decide
from pollux.policy import pollux as policy
from pollux.snapshot import Decision, Node, PolicySettings, Snapshot
from pollux_agent.protocol import decode, encode


def named(snapshot: Snapshot, name: str) -> Snapshot:
    return replace(snapshot, policy=replace(snapshot.policy, name=name))


@pytest.mark.parametrize("name", list(POLICIES))
@given(snapshot=snapshots())
@settings(deadline=None, max_examples=60)
def test_every_decision_keeps_every_rule(name: str, snapshot: Snapshot) -> None:
    check(snapshot, decide(named(snapshot, name)))


@given(snapshot=snapshots())
@settings(deadline=None, max_examples=40)
def test_the_search_keeps_every_rule_too(snapshot: Snapshot) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_EXHAUSTIVE", 0)
        check(snapshot, decide(snapshot))


@pytest.mark.parametrize("name", list(POLICIES))
@given(snapshot=snapshots())
@settings(deadline=None, max_examples=20)
def test_a_snapshot_read_back_from_its_file_gives_the_same_bytes(name: str, snapshot: Snapshot) -> None:
    snapshot = named(snapshot, name)
    once = encode(decide(snapshot))
    assert encode(decide(decode(Snapshot, encode(snapshot)))) == once
    assert encode(decode(Decision, once)) == once


def garbage_states() -> st.SearchStrategy[Any]:
    leaf = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.text(max_size=5), st.floats())
    tree = st.recursive(leaf, lambda inner: st.lists(inner, max_size=6), max_leaves=20)
    numbers = st.lists(st.integers(-3, 10), max_size=12)
    return st.fixed_dictionaries(
        {"jobs": st.one_of(tree, st.just(["a", "b"])), "nodes": st.one_of(tree, st.just(["n0"]))},
        optional={"population": st.one_of(tree, st.lists(numbers, max_size=4))},
    )


@given(state=garbage_states())
@settings(deadline=None, max_examples=40)
def test_a_state_that_makes_no_sense_does_no_harm(state: dict[str, Any]) -> None:
    jobs = [new_job("a"), make_job("b", placement={"n0": 1}), make_job("c")]
    settings_ = PolicySettings(name="pollux", population=10, generations=3)
    snapshot = make_snapshot(jobs, nodes={"n0": 4, "n1": 4, "n2": 4}, policy=settings_, state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_EXHAUSTIVE", 0)
        check(snapshot, decide(snapshot))


ABSURD = {
    "age_s": 1e308,
    "attained_gpu_s": 1e308,
    "restart_s": 1e308,
    "trained_s": 1e308,
    "progress": 1e308,
    "target_progress": 1.7e308,
    "latency_limit_s": 1e308,
    "noise_scale": 1.7e308,
    "restarts": 2**53,
    "max_gpus_seen": 2**53,
    "max_gpus": 2**40,
    "initial_batch_size": 2**40,
    "max_batch_size": 2**40,
    "max_local_batch_size": 2**40,
}
"""The largest figures that a snapshot may hold: a report may say anything."""


@pytest.mark.parametrize("name", list(POLICIES))
@pytest.mark.parametrize("field", [*ABSURD, "all"])
def test_no_figure_of_one_job_costs_another_its_gpus(name: str, field: str) -> None:
    change: dict[str, Any] = ABSURD if field == "all" else {field: ABSURD[field]}
    odd = replace(make_job("odd", placement={"node-0": 1}), **change)
    others = [make_job("plain", placement={"node-1": 1}), new_job("new")]
    snapshot = named(make_snapshot([odd, *others]), name)
    decision = decide(snapshot)
    check(snapshot, decision)
    assert decode(Decision, encode(decision)) == decision
    assert decision.jobs["plain"].placement


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    snapshot = make_snapshot([new_job("a")], policy=PolicySettings(name="polux"))
    with pytest.raises(ConfigError, match=r"'polux'.*pollux, sia, .*fifo-fixed"):
        decide(snapshot)


@pytest.mark.parametrize("name", list(POLICIES))
def test_without_gpus_every_job_waits(name: str) -> None:
    snapshot = named(make_snapshot([new_job("a")], nodes={"node-0": 0}), name)
    decision = decide(snapshot)
    assert decision.jobs["a"].placement == {}
    assert "waits" in decision.jobs["a"].reason


@pytest.mark.parametrize("name", list(POLICIES))
def test_without_jobs_there_is_nothing_to_decide(name: str) -> None:
    assert decide(named(make_snapshot([]), name)).jobs == {}


def test_the_state_is_bounded_however_large_the_cluster() -> None:
    jobs = [make_job(f"{'a-long-deployment-name-' * 3}{index}") for index in range(40)]
    snapshot = make_snapshot(
        jobs,
        nodes={f"node-{index}": 8 for index in range(16)},
        policy=PolicySettings(name="pollux", population=40, generations=2),
    )
    decision = decide(snapshot)
    assert decision.state
    assert len(encode(decision)) - len(encode(replace(decision, state={}))) <= 31_000


def test_fifo_gives_the_least_in_order_of_submission_and_never_changes_it() -> None:
    jobs = [
        make_job("a", min_gpus=2, max_gpus=4),
        make_job("b", min_gpus=3, max_gpus=4),
        make_job("c", max_gpus=4, placement={"node-0": 1}),
        make_job("d", max_gpus=4),
    ]
    decision = decide(named(make_snapshot(jobs), "fifo-fixed"))
    assert {name: dict(job.placement) for name, job in decision.jobs.items()} == {
        "a": {"node-1": 2},
        "b": {},
        "c": {"node-0": 1},
        "d": {"node-0": 1},
    }


def test_a_job_with_a_type_gets_only_that_type() -> None:
    nodes = (Node(name="big", gpus=4, gpu_type="a100"), Node(name="small", gpus=2, gpu_type="t4"))
    jobs = [
        make_job("any", fits={"a100": SCALES_WELL}),
        make_job("picky", gpu_types=("t4",), fits={"t4": SCALES_WELL}),
        make_job("hopeless", gpu_types=("h100",)),
        make_job("wide", min_gpus=5),
    ]
    decision = decide(replace(make_snapshot(jobs), nodes=nodes))
    assert decision.jobs["picky"].placement == {"small": 2}
    assert decision.jobs["any"].placement == {"big": 4}
    assert "no node has a GPU of a type that it accepts (h100)" in decision.jobs["hopeless"].reason
    assert "it needs 5 GPUs of one type at once, and there are 4 at most" in decision.jobs["wide"].reason

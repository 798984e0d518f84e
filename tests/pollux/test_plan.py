"""Plans: the order of actions, what is a move, and decisions that may not be carried out."""

from collections.abc import Mapping

import pytest
from snapshot_builder import make_job, make_snapshot

from pollux.errors import DecisionError
from pollux.plan import Action, check, plan
from pollux.policy import decide
from pollux.snapshot import Decision, JobDecision, Node, Snapshot
from pollux_agent.protocol import decode, encode

NODES = {"n0": 4, "n1": 4}


def answer(snapshot: Snapshot, placements: Mapping[str, Mapping[str, int]]) -> Decision:
    return Decision(
        decision=snapshot.decision,
        policy="by hand",
        objective=1.0,
        jobs={
            name: JobDecision(placement=dict(placement), reason=f"because of {name}")
            for name, placement in placements.items()
        },
    )


def test_what_gives_gpus_back_comes_first_then_moves_then_the_rest() -> None:
    jobs = [
        make_job("grows", placement={"n0": 1}),
        make_job("starts"),
        make_job("moves", placement={"n0": 1}),
        make_job("stays", placement={"n1": 1}),
        make_job("shrinks", placement={"n0": 2}),
        make_job("stops", placement={"n1": 2}, decision=3),
    ]
    snapshot = make_snapshot(jobs, nodes=NODES)
    decision = answer(
        snapshot,
        {
            "grows": {"n0": 3},
            "starts": {"n1": 1},
            "moves": {"n1": 1},
            "stays": {"n1": 1},
            "shrinks": {"n0": 1},
            "stops": {},
        },
    )
    actions = plan(snapshot, decision)
    assert [(action.job_id, action.kind) for action in actions] == [
        ("shrinks", "shrink"),
        ("stops", "stop"),
        ("moves", "move"),
        ("grows", "grow"),
        ("starts", "start"),
    ]
    assert [action.only_gives_back for action in actions] == [True, True, False, False, False]
    stop = actions[1]
    assert (stop.before, stop.after, stop.expected, stop.reason) == ({"n1": 2}, {}, 3, "because of stops")
    assert decode(Action, encode(stop)) == stop


def test_a_shrink_that_needs_other_gpus_waits_for_those_that_only_give_back() -> None:
    jobs = [make_job("elsewhere", placement={"n0": 2}), make_job("smaller", placement={"n1": 3})]
    snapshot = make_snapshot(jobs, nodes={"n0": 4, "n1": 3})
    decision = answer(snapshot, {"elsewhere": {"n1": 1}, "smaller": {"n1": 2}})
    assert [action.job_id for action in plan(snapshot, decision)] == ["smaller", "elsewhere"]


def test_nothing_changes_nothing_to_do() -> None:
    snapshot = make_snapshot([make_job("a", placement={"n0": 4}, max_gpus=4)], nodes=NODES)
    assert plan(snapshot, decide(snapshot)) == ()


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({"a": {"n0": 3}, "b": {"n0": 2}}, "node n0 has 4 GPUs, but the decision gives 5"),
        ({"a": {"n9": 1}, "b": {}}, "job a is given GPUs on unknown nodes: n9"),
        ({"a": {}}, r"differ in \['b'\]"),
        ({"a": {"n0": 1}, "b": {}}, "job a is given 1 GPUs, but may have 0 or 2 to 4"),
        ({"a": {"n0": 4, "n1": 1}, "b": {}}, "job a is given 5 GPUs, but may have 0 or 2 to 4"),
        ({"a": {"n0": 1, "n1": 1}, "b": {"n0": 1, "n1": 1}}, "more than one job that spans nodes: a, b"),
    ],
    ids=["given twice", "unknown node", "left out", "below min", "above the limit", "two that span"],
)
def test_a_decision_that_breaks_a_rule_is_refused(
    placements: Mapping[str, Mapping[str, int]], message: str
) -> None:
    jobs = [make_job("a", min_gpus=2, max_gpus_seen=2), make_job("b")]
    snapshot = make_snapshot(jobs, nodes=NODES)
    with pytest.raises(DecisionError, match=message):
        plan(snapshot, answer(snapshot, placements))


def test_a_pinned_job_may_not_change() -> None:
    snapshot = make_snapshot([make_job("a", placement={"n0": 2}, preemptible=False)], nodes=NODES)
    check(snapshot, answer(snapshot, {"a": {"n0": 2}}))
    with pytest.raises(DecisionError, match="job a may not be preempted"):
        check(snapshot, answer(snapshot, {"a": {"n0": 3}}))


def test_types_are_kept_and_never_mixed() -> None:
    nodes = (Node(name="n0", gpus=2, gpu_type="a100"), Node(name="n1", gpus=2, gpu_type="t4"))
    jobs = (make_job("a", gpu_types=("t4",)), make_job("b"))
    snapshot = Snapshot(decision=7, now_unix_s=0.0, interval_s=60.0, nodes=nodes, jobs=jobs)
    with pytest.raises(DecisionError, match="job a is given GPUs of type a100; it takes one type of t4"):
        check(snapshot, answer(snapshot, {"a": {"n0": 1}, "b": {}}))
    with pytest.raises(DecisionError, match="job b is given GPUs of type a100, t4"):
        check(snapshot, answer(snapshot, {"a": {}, "b": {"n0": 1, "n1": 1}}))


def test_a_decision_for_another_snapshot_is_refused() -> None:
    old = make_snapshot([make_job("a")])
    new = make_snapshot([make_job("a")], decision=8)
    with pytest.raises(DecisionError, match="decision 7 answers snapshot 8"):
        plan(new, decide(old))

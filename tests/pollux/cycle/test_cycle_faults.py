"""What a cycle that dies, or that another overtakes, leaves behind."""

from collections.abc import Callable

import pytest
from cycle_builder import World

from pollux.cycle import CycleResult


class Killed(BaseException):
    """The scheduling process is gone: nothing of it runs any more, not even its clean-up."""


class KillAt:
    """Dies at its ``number``-th call, before or after the call's effect, and at all that follow."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, method: str) -> None:
        self.left -= 1
        if self.left <= 0:
            raise Killed(method)


def crowded(make_world: Callable[..., World]) -> World:
    """One job holds all four GPUs and two more wait: the next cycle shrinks it and starts them."""
    world = make_world(lag=1)
    world.watch()
    world.submit("one")
    for _ in range(4):
        world.cycle()
        world.settle()
        world.report("one", max_gpus_seen=4)
    assert world.placements(["one"]) == {"one": {"node-0": 2, "node-1": 2}}
    world.submit("two", "three")
    return world


def num_calls(make_world: Callable[..., World]) -> int:
    """Calls to the cluster in the cycle that shrinks one job and starts two."""
    world = crowded(make_world)
    calls: list[str] = []
    world.watch(calls.append)
    world.cycle()
    return len(calls)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cycle_killed_at_any_call_is_repaired_by_the_next(
    make_world: Callable[..., World], when: str
) -> None:
    for number in range(1, num_calls(make_world) + 1):
        world = crowded(make_world)
        kill = KillAt(number)
        if when == "before":
            world.watch(kill)
        else:
            check = world.cluster.after
            world.cluster.after = lambda method, check=check, kill=kill: (check(method), kill(method))[0]
        with pytest.raises(Killed):
            world.cycle("killed")
        world.watch()
        world.settle()
        for _ in range(3):
            assert not world.cycle("next").skipped
            world.settle()
        held = {job.job_id: sum(job.status.held.values()) for job in world.cluster.jobs}
        assert set(held) == {"one", "two", "three"}
        assert min(held.values()) >= 1
        assert len({record.run_id for record in world.store.reports().values()}) == 3


@pytest.mark.parametrize(
    "method", ["observe", "patch_allocation", "set_run", "next_decision"], ids=lambda method: f"at {method}"
)
def test_an_older_cycle_that_a_newer_one_overtakes_changes_nothing(
    make_world: Callable[..., World], method: str
) -> None:
    """The older one's lease has run out while it hung; the newer one then runs from beginning to end."""
    world = crowded(make_world)
    newer: list[CycleResult] = []

    def overtake(called: str) -> None:
        if called == method and not newer:
            world.watch()
            world.now += 3600
            newer.append(world.cycle("newer"))
            world.settle()

    world.watch(overtake)
    older = world.cycle("older")
    world.watch()
    assert not newer[0].skipped
    allocations = {job.job_id: job.allocation for job in world.cluster.jobs}
    assert older.decision is not None
    if method == "next_decision":
        assert older.decision > (newer[0].decision or 0)
    else:
        assert older.decision < (newer[0].decision or 0)
        assert older.decision not in {allocation.decision for allocation in allocations.values()}
        assert "done" not in {action.outcome for action in older.actions}


def test_a_cluster_that_stops_answering_between_two_actions_is_told_and_repaired(
    make_world: Callable[..., World],
) -> None:
    from pollux.errors import ClusterUnavailable

    world = crowded(make_world)
    patched: list[str] = []

    def go_away(method: str) -> None:
        if method == "patch_allocation":
            patched.append(method)
        if len(patched) > 1 and method not in ("next_decision", "lease", "release"):
            raise ClusterUnavailable("the service is gone")

    world.watch(go_away)
    result = world.cycle()
    outcomes = [action.outcome for action in result.actions]
    assert outcomes[0] == "done"
    assert set(outcomes[1:]) == {"unavailable"}
    world.watch()
    world.settle()
    world.cycle()
    world.settle()
    assert all(world.job(job_id).status.held for job_id in ("one", "two", "three"))


def test_a_job_that_vanishes_or_changes_between_snapshot_and_act_harms_only_itself(
    make_world: Callable[..., World],
) -> None:
    world = crowded(make_world)
    ended: list[str] = []

    def end_two(method: str) -> None:
        if method == "patch_allocation" and not ended:
            ended.append("two")
            world.cluster.end("two", "failed")

    world.watch(end_two)
    outcomes = {action.job_id: action.outcome for action in world.cycle().actions}
    assert outcomes["two"] == "refused"
    assert outcomes["one"] == outcomes["three"] == "done"

"""A cycle that only looks, and jobs whose agent is of another version."""

import json
from collections.abc import Callable
from dataclasses import replace

from cycle_builder import World, a_report
from mlflow import MlflowClient

from pollux.record import Records
from pollux.snapshot import Decision
from pollux_agent.protocol import REPORT_TAG, decode, to_plain

WRITES = {"lease", "next_decision", "patch_allocation", "set_run", "stop", "submit"}


def shadow_cycle(world: World) -> tuple[list[str], Decision]:
    """One shadow cycle: the cluster's methods that it called, and what it decided."""
    settings = replace(world.settings, shadow=True)
    calls: list[str] = []
    world.cluster.before = calls.append
    own, world.records = world.records, Records(settings.decisions)
    try:
        result = world.cycle(settings=settings)
    finally:
        world.records = own
        world.cluster.before = lambda method: None
    assert result.skipped == ""
    path = settings.decisions / str(result.decision) / "decision.json"
    return calls, decode(Decision, path.read_bytes())


def test_it_decides_for_waiting_jobs_and_writes_nothing_anywhere(world: World) -> None:
    world.submit("one", "two")
    calls, decision = shadow_cycle(world)
    assert not WRITES & set(calls)
    assert all(decision.jobs[job_id].placement for job_id in ("one", "two"))
    assert world.placements(["one", "two"]) == {"one": {}, "two": {}}
    assert world.job("one").mlflow_run_id is None
    assert world.store.reports() == {}
    assert not world.settings.decisions.exists()


def test_it_leaves_the_numbers_and_lease_of_the_acting_cycle_alone(world: World) -> None:
    world.submit("one")
    assert world.cycle().decision == 1
    with world.cluster.lease("somebody else", world.settings.interval):
        shadow_cycle(world)
        shadow_cycle(world)
    before = world.job("one")
    world.cycle()
    assert world.job("one").mlflow_run_id == before.mlflow_run_id
    assert [path.name for path in sorted(world.settings.decisions.iterdir())] == ["1", "2"]
    shadow = replace(world.settings, shadow=True).decisions
    assert {path.name for path in shadow.iterdir()} == {"2", "3"}


def test_its_figures_have_an_experiment_of_their_own(world: World) -> None:
    world.submit("one")
    world.cycle()
    shadow_cycle(world)
    assert replace(world.settings, shadow=True).decisions_recorded_in != world.settings.decisions_experiment


def test_a_run_that_was_closed_stays_so(world: World) -> None:
    world.submit("one")
    world.cycle()
    run_id = str(world.job("one").mlflow_run_id)
    MlflowClient(world.uri).set_terminated(run_id)
    shadow_cycle(world)
    assert MlflowClient(world.uri).get_run(run_id).info.status == "FINISHED"


def test_a_job_with_a_newer_agent_keeps_what_it_has_and_says_so(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.submit("one")
    for _ in range(3):
        world.cycle()
        world.settle()
        world.report("one", max_gpus_seen=4)
    held = world.placements(["one"])["one"]
    assert sum(held.values()) > 1
    newer = json.dumps(to_plain(a_report("one")) | {"schema": 2, "something": "new"})
    MlflowClient(world.uri).set_tag(world.job("one").mlflow_run_id, REPORT_TAG, newer)
    world.submit("two", "three", "four")
    number = 0
    for _ in range(2):
        number = world.cycle().decision or 0
        world.settle()
    assert world.placements(["one"])["one"] == held
    reason = (
        decode(Decision, (world.settings.decisions / str(number) / "decision.json").read_bytes())
        .jobs["one"]
        .reason
    )
    assert "newer than this scheduler" in reason
    assert "upgraded" in reason

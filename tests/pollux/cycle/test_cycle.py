"""The cycle over the cluster in memory and a real store."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from cycle_builder import START_UNIX_S, World, a_spec, an_identity, decision_folder
from mlflow import MlflowClient

from pollux.cycle import lease_ttl, run_once
from pollux.errors import ConfigError
from pollux.plan import plan
from pollux.policy import decide
from pollux.snapshot import Decision, Snapshot
from pollux_agent.protocol import REPORT_TAG, JobFolder, decode, encode
from pollux_agent.report.outbox import Point
from pollux_agent.report.unsent import keep_unsent


def test_a_new_job_gets_one_run_and_a_gpu_and_everything_is_on_disk(world: World) -> None:
    world.submit("one")
    result = world.cycle()
    assert (result.skipped, result.decision) == ("", 1)
    assert [(action.job_id, action.outcome) for action in result.actions] == [("one", "done")]
    job = world.job("one")
    assert sum(job.allocation.placement.values()) == 1
    assert job.allocation.gpu_type == "gpu"
    assert job.allocation.reason
    assert job.mlflow_run_id in {record.run_id for record in world.store.reports().values()}
    folder = decision_folder(world.settings, 1)
    assert {path.name for path in folder.iterdir()} == {
        "snapshot.json",
        "decision.json",
        "plan.json",
        "result.json",
    }
    told = json.loads((folder / "result.json").read_text())
    assert told["actions"] == [{"job_id": "one", "outcome": "done", "message": ""}]
    assert set(told["wall_clock_s"]) == {"observe", "snapshot", "decide", "plan", "act", "record"}


def test_a_saved_snapshot_replays_to_the_same_decision_and_plan(world: World) -> None:
    world.submit("one", "two")
    world.cycle()
    world.report("one", "two")
    number = world.cycle().decision
    assert number is not None
    folder = decision_folder(world.settings, number)
    snapshot = decode(Snapshot, (folder / "snapshot.json").read_bytes())
    decision = decide(snapshot)
    assert encode(decision) == (folder / "decision.json").read_text()
    actions = json.loads((folder / "plan.json").read_text())["actions"]
    assert [action["job_id"] for action in actions] == [action.job_id for action in plan(snapshot, decision)]
    assert snapshot.jobs[0].fits
    assert snapshot.jobs[0].noise_scale == 400.0


def test_a_job_is_shrunk_before_another_starts_on_its_gpus(make_world: Callable[..., World]) -> None:
    world = make_world(lag=2)
    world.watch()
    world.submit("one")
    for _ in range(4):
        world.cycle()
        world.settle()
        world.report("one", max_gpus_seen=4)
    assert world.job("one").status.held == {"node-0": 2, "node-1": 2}
    world.submit("two", "three")
    results = [world.cycle() for _ in range(2)]
    world.settle()
    assert not any(result.skipped for result in results)
    assert all(world.job(job_id).status.held for job_id in ("one", "two", "three"))
    assert {"one", "two", "three"} == {action.job_id for result in results for action in result.actions}


def test_a_grow_whose_gpus_stay_in_use_waits_for_the_next_cycle(make_world: Callable[..., World]) -> None:
    world = make_world()
    world.watch()
    world.submit("one", max_gpus=4)
    for _ in range(4):
        world.cycle()
        world.settle()
        world.report("one", max_gpus_seen=4)
    world.cluster.lag = 100_000
    world.submit("two", "three", "four")
    result = world.cycle(settings=replace(world.settings, free_wait_s=0.3))
    waiting = {action.job_id: action.message for action in result.actions if action.outcome == "waits"}
    assert waiting
    assert all("one" in message for message in waiting.values())
    assert all(not world.job(job_id).allocation.placement for job_id in waiting)
    world.cluster.lag = 0
    world.settle()
    world.cycle()
    assert all(world.job(job_id).status.held for job_id in ("one", "two", "three", "four"))


def test_a_jobs_own_estimator_is_asked_and_its_answers_are_saved(make_world: Callable[..., World]) -> None:
    world = make_world()
    for name, estimator in (("served", "cycle_builder:OneGpuIsEnough"), ("unknown", "nobody")):
        spec = replace(a_spec(name), estimator=estimator)
        world.cluster.submit(name, identity=an_identity(name), spec=spec, run_id=None)
    for _ in range(3):
        world.cycle(settings=replace(world.settings, estimators=("cycle_builder",)))
        world.settle()
    assert sum(world.job("served").status.held.values()) == 1
    saved = decision_folder(world.settings, 3) / "snapshot.json"
    served, unknown = sorted(decode(Snapshot, saved.read_text()).jobs, key=lambda job: job.job_id)
    assert set(served.estimates["gpu"].one_node) == {5.0}
    assert "is no entry point" in " ".join(unknown.remarks)


def test_shadow_mode_decides_and_records_but_changes_nothing(world: World) -> None:
    world.submit("one")
    result = world.cycle(settings=replace(world.settings, shadow=True))
    assert [action.outcome for action in result.actions] == ["shadow"]
    assert world.job("one").allocation.placement == {}
    assert result.decision is not None
    assert decision_folder(world.settings, result.decision).is_dir()


def test_a_garbage_report_is_not_fitted_and_named_in_the_reason(world: World) -> None:
    world.submit("one")
    world.cycle()
    run_id = world.job("one").mlflow_run_id
    MlflowClient(world.uri).set_tag(run_id, REPORT_TAG, '{"schema": 1, "fits": "none"}')
    number = world.cycle().decision
    assert number is not None
    folder = decision_folder(world.settings, number)
    job = decode(Snapshot, (folder / "snapshot.json").read_bytes()).jobs[0]
    assert job.fits == {}
    assert any("not fitted yet" in remark and "malformed" in remark for remark in job.remarks)
    assert "not fitted" in decode(Decision, (folder / "decision.json").read_bytes()).jobs["one"].reason


def test_without_mlflow_a_cycle_is_skipped_with_the_reason_and_jobs_keep_what_they_have(
    world: World, make_world: Callable[..., World]
) -> None:
    world.submit("one")
    world.cycle()
    before = world.job("one").allocation
    away = make_world(tracking_uri="http://127.0.0.1:9")
    result = run_once(
        world.cluster,
        away.store,
        world.settings,
        now=world.now + 60,
        holder="minute",
        records=world.records,
    )
    assert "MLflow" in result.skipped
    assert result.decision is None
    assert world.job("one").allocation == before
    assert not world.cycle().skipped


def test_however_slow_mlflow_is_each_cycle_makes_a_waiting_jobs_run(world: World) -> None:
    """With next to no time for it, three jobs take three cycles; none waits for ever."""
    world.submit("one", "two", "three")
    hurried = replace(world.settings, interval_s=1e-6)
    left_out = [set(world.cycle(settings=hurried).left_out) for _ in range(3)]
    assert left_out == [{"two", "three"}, {"three"}, set()]


def test_a_late_cycle_and_one_beside_another_are_skipped(world: World) -> None:
    world.submit("one")
    late = run_once(
        world.cluster,
        world.store,
        world.settings,
        now=START_UNIX_S + 61,
        due=START_UNIX_S,
        holder="late",
        records=world.records,
    )
    assert "late" in late.skipped
    with world.cluster.lease("other", timedelta(hours=1)):
        assert "another scheduler is at work" in world.cycle().skipped
    assert world.job("one").allocation.decision == 0


def test_gpus_of_other_deployments_and_of_jobs_that_end_are_not_given(
    make_world: Callable[..., World],
) -> None:
    world = make_world(lag=3)
    world.watch()
    world.submit("theirs", deployment="other")
    number = world.cluster.next_decision()
    allocation = replace(world.job("theirs").allocation, decision=number, placement={"node-0": 2})
    world.cluster.patch_allocation("theirs", expected=0, allocation=allocation)
    world.settle()
    world.submit("ending")
    world.cycle()
    world.settle()
    held = dict(world.job("ending").status.held)
    world.cluster.lag = 100_000
    world.cluster.stop("ending", "clear")
    world.submit("one", "two")
    number = world.cycle(settings=replace(world.settings, free_wait_s=0.0)).decision
    snapshot = decode(Snapshot, (decision_folder(world.settings, number or 0) / "snapshot.json").read_bytes())
    assert {job.job_id for job in snapshot.jobs} == {"one", "two"}
    assert {node.name: node.gpus for node in snapshot.nodes} == {"node-0": 0, "node-1": 2 - held["node-1"]}


@pytest.mark.parametrize(
    ("phase", "status"), [("done", "FINISHED"), ("failed", "FAILED"), ("ended", "KILLED")]
)
def test_the_run_of_a_job_that_is_over_is_closed_as_the_job_ended(
    world: World, phase: str, status: str
) -> None:
    world.submit("one")
    world.cycle()
    run_id = world.job("one").mlflow_run_id
    world.cluster.end("one", phase)  # type: ignore[arg-type]
    assert world.cycle().closed_runs == ("one",)
    assert MlflowClient(world.uri).get_run(run_id).info.status == status
    assert world.cycle().closed_runs == ()


def test_figures_that_the_workers_of_a_job_could_not_send_are_in_its_run_before_that_is_closed(
    world: World,
) -> None:
    world.submit("one")
    world.cycle()
    run_id = world.job("one").mlflow_run_id
    world.cluster.end("one", "done")
    unsent = JobFolder(world.settings.jobs / "one").unsent
    keep_unsent(
        unsent, [Point("accuracy", step / 1000, step, 1_700_000_000_000 + step) for step in range(1001)]
    )
    assert world.cycle().closed_runs == ("one",)
    client = MlflowClient(world.uri)
    assert len(client.get_metric_history(run_id, "accuracy")) == 1001
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics["accuracy"]) == ("FINISHED", 1.0)
    assert not unsent.exists()


def test_an_open_run_whose_job_the_cluster_does_not_know_is_named_and_stays(world: World) -> None:
    run_id = world.store.ensure_run("coming", an_identity("coming"), a_spec("coming"), world.now)
    assert world.cycle().unknown_jobs == ("coming",)
    assert MlflowClient(world.uri).get_run(run_id).info.status == "RUNNING"
    assert world.store.reports()["coming"].identity == an_identity("coming")


def test_figures_that_mlflow_refuses_keep_no_run_open(world: World) -> None:
    world.submit("one")
    world.cycle()
    world.cluster.end("one", "done")
    unsent = JobFolder(world.settings.jobs / "one").unsent
    keep_unsent(unsent, [Point("a name?!", 1.0, 1, 1_700_000_000_000)])
    assert world.cycle().closed_runs == ("one",)
    assert not unsent.exists()


def test_a_job_that_is_tried_again_continues_its_own_run(world: World) -> None:
    world.submit("one")
    world.cycle()
    world.report("one")
    run_id = world.job("one").mlflow_run_id
    world.cluster.end("one", "failed")
    world.cycle()
    world.submit("one")
    number = world.cycle().decision
    assert world.job("one").mlflow_run_id == run_id
    assert MlflowClient(world.uri).get_run(run_id).info.status == "RUNNING"
    snapshot = decode(Snapshot, (decision_folder(world.settings, number or 0) / "snapshot.json").read_bytes())
    assert snapshot.jobs[0].fits


def test_a_run_that_its_agent_has_just_finished_stays_so_while_the_workers_end(world: World) -> None:
    world.submit("one")
    world.cycle()
    world.settle()
    assert world.job("one").status.held
    run_id = world.job("one").mlflow_run_id
    client = MlflowClient(world.uri)
    client.set_terminated(run_id, "FINISHED")
    assert not world.cycle().left_out
    assert client.get_run(run_id).info.status == "FINISHED"
    world.cluster.end("one", "done")
    world.cycle()
    assert client.get_run(run_id).info.status == "FINISHED"


def test_decisions_and_what_they_came_to_are_figures_in_mlflow(world: World) -> None:
    world.submit("one")
    world.cycle()
    world.report("one")
    first = world.cycle()
    world.settle()
    world.report("one", goodput=512.0)
    second = world.cycle()
    assert second.realised["one"][1] == 512.0
    client = MlflowClient(world.uri)
    experiment = client.get_experiment_by_name(world.settings.decisions_experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["gpus"] == 4.0
    points = client.get_metric_history(run.info.run_id, "objective")
    assert [point.step for point in points] == [1, first.decision, second.decision]
    (realised,) = client.get_metric_history(run.info.run_id, "realised_goodput")
    assert (realised.step, realised.value) == (first.decision, 512.0)
    assert any(name.startswith("wall_clock/") for name in run.data.metrics)


def test_a_job_that_is_silent_while_it_holds_gpus_is_named_and_keeps_its_fit(world: World) -> None:
    world.submit("one")
    world.cycle()
    world.report("one")
    world.now += 400
    number = world.cycle().decision
    snapshot = decode(Snapshot, (decision_folder(world.settings, number or 0) / "snapshot.json").read_bytes())
    (job,) = snapshot.jobs
    assert job.fits
    assert any("one has not reported for" in remark for remark in job.remarks)


def test_old_decisions_stay_unless_a_number_to_keep_is_set(world: World) -> None:
    for _ in range(4):
        world.cycle()
    assert len(list(world.settings.decisions.iterdir())) == 4
    world.cycle(settings=replace(world.settings, keep_decisions=2))
    assert {path.name for path in world.settings.decisions.iterdir()} == {"4", "5"}


def test_a_lease_outlasts_a_cycle_but_no_killed_one_keeps_others_out_for_long(world: World) -> None:
    for interval_s, want_s in ((5, 30), (60, 54), (86_400, 3600)):
        settings = replace(world.settings, interval_s=interval_s, free_wait_s=20.0)
        assert lease_ttl(settings).total_seconds() == pytest.approx(want_s)


@pytest.mark.parametrize("name", ["ours-misled", "best", ""])
def test_a_policy_that_is_none_to_run_jobs_by_is_refused_before_anything_is_done(
    world: World, name: str
) -> None:
    world.submit("one")
    with pytest.raises(ConfigError, match=f"POLLUX_POLICY is '{name}'.*use one of pollux, sia, ours"):
        world.cycle(settings=replace(world.settings, policy=name))
    assert world.job("one").mlflow_run_id is None
    assert world.cycle().decision == 1

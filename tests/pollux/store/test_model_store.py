"""The model store on a real MLflow store in SQLite."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest
from mlflow import MlflowClient

from pollux.cluster.base import JobIdentity
from pollux.errors import StoreError, StoreUnavailable
from pollux.store import ModelStore
from pollux.store.runs import DEPLOYMENT_TAG, DROPPED, FATE_PARAM, JOB_TAG, KEPT
from pollux_agent.protocol import JobSpec

SPEC = JobSpec(
    name="digits",
    script="digits.py",
    initial_batch_size=32,
    max_local_batch_size=128,
    max_gpus=4,
    env={"TOKEN": "secret"},
)
START_UNIX_S = 1_700_000_000.0


def identity(job_id: str) -> JobIdentity:
    return JobIdentity(deployment="airflow", dag_id="train", run_id=job_id, task_id="train", map_index=3)


@pytest.fixture
def experiment(new_experiment: Callable[[str], str]) -> str:
    return new_experiment("jobs")


@pytest.fixture
def make_store(
    mlflow_uri: str, experiment: str, new_experiment: Callable[[str], str]
) -> Callable[[], ModelStore]:
    decisions = new_experiment("decisions")
    return lambda: ModelStore(mlflow_uri, experiment=experiment, decisions_experiment=decisions)


@pytest.fixture
def store(make_store: Callable[[], ModelStore]) -> ModelStore:
    return make_store()


@pytest.fixture
def client(mlflow_uri: str) -> MlflowClient:
    return MlflowClient(mlflow_uri)


def runs_of(client: MlflowClient, store: ModelStore, job_id: str) -> list[str]:
    found = client.search_runs([store.experiment_id], f"tags.\"{JOB_TAG}\" = '{job_id}'")
    return [run.info.run_id for run in found]


def test_a_jobs_run_is_made_once_with_its_spec_and_identity(client: MlflowClient, store: ModelStore) -> None:
    run_id = store.ensure_run("one", identity("one"), SPEC, START_UNIX_S)
    assert store.ensure_run("one", identity("one"), SPEC, START_UNIX_S + 99) == run_id
    run = client.get_run(run_id)
    assert run.info.run_name == "digits"
    assert run.info.start_time == int(START_UNIX_S * 1000)
    assert run.data.params["initial_batch_size"] == "32"
    assert run.data.params["max_batch_size"] == "1024"
    assert run.data.tags["pollux.map_index"] == "3"
    assert "secret" not in str(run.to_dictionary())


def test_arguments_longer_than_mlflow_takes_do_not_keep_a_job_from_its_run(
    client: MlflowClient, store: ModelStore
) -> None:
    spec = replace(SPEC, arguments=("--config", "x" * 20_000))
    run = client.get_run(store.ensure_run("long", identity("long"), spec, START_UNIX_S))
    assert run.data.params["arguments"].startswith("--config xxx")
    assert run.data.params["arguments"].endswith("...")


@pytest.mark.parametrize("attempt", range(4))
def test_all_who_ask_at_once_get_the_same_run_and_no_other_is_left(
    client: MlflowClient, store: ModelStore, make_store: Callable[[], ModelStore], attempt: int
) -> None:
    start = threading.Barrier(8)
    found: list[str] = []

    def ask(number: int) -> None:
        own = make_store()
        start.wait()
        found.append(own.ensure_run("one", identity("one"), SPEC, START_UNIX_S - number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert set(found) == set(runs_of(client, store, "one"))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("fates", "wanted"),
    [
        pytest.param(["", ""], 0, id="two that were made before anyone decided: the earlier"),
        pytest.param(["", KEPT], 1, id="one that is kept already, though it is later"),
        pytest.param([DROPPED, ""], 1, id="a duplicate whose finder died before deleting it"),
        pytest.param([DROPPED, DROPPED], None, id="only duplicates: a new one"),
    ],
)
def test_what_a_racer_that_died_left_behind_is_settled(
    client: MlflowClient, store: ModelStore, fates: list[str], wanted: int | None
) -> None:
    made = []
    for number, fate in enumerate(fates):
        run = client.create_run(
            store.experiment_id, start_time=1000 + number, tags={JOB_TAG: "one", DEPLOYMENT_TAG: "airflow"}
        )
        made.append(run.info.run_id)
        if fate:
            client.log_param(run.info.run_id, FATE_PARAM, fate)
    run_id = store.ensure_run("one", identity("one"), SPEC, START_UNIX_S)
    assert runs_of(client, store, "one") == [run_id]
    assert run_id == made[wanted] if wanted is not None else run_id not in made
    assert client.get_run(run_id).data.params["script"] == "digits.py"


def test_more_active_runs_than_mlflow_gives_at_once_are_all_read(
    client: MlflowClient, store: ModelStore, mlflow_uri: str
) -> None:
    """The oldest comes first, so a reader that stops at 1000 would miss the newest."""
    insert_runs(mlflow_uri, int(store.experiment_id), 1001)
    closed = store.ensure_run("closed", identity("closed"), SPEC, START_UNIX_S)
    store.close_run(closed, "FINISHED", how="done")
    started_s = time.monotonic()
    records = store.reports()
    assert time.monotonic() - started_s < 30
    assert set(records) == {f"job-{number}" for number in range(1001)}
    assert client.get_run(closed).data.tags["pollux.end"] == "done"


def insert_runs(uri: str, experiment_id: int, count: int) -> None:
    """Active runs with a job's tags, in one transaction: over the client it would take half a minute."""
    from sqlalchemy import create_engine, text

    engine = create_engine(uri)
    runs = [
        {
            "run": uuid4().hex,
            "job": f"job-{number}",
            "experiment": experiment_id,
            "start": 1_000_000 + number,
        }
        for number in range(count)
    ]
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO runs (run_uuid, name, status, start_time, lifecycle_stage, artifact_uri, "
                "experiment_id, source_type, user_id) "
                "VALUES (:run, :job, 'RUNNING', :start, 'active', '', :experiment, 'LOCAL', 'me')"
            ),
            runs,
        )
        for key, value in ((JOB_TAG, ":job"), (DEPLOYMENT_TAG, "'airflow'")):
            connection.execute(
                text(f"INSERT INTO tags (\"key\", value, run_uuid) VALUES ('{key}', {value}, :run)"), runs
            )
    engine.dispose()


def test_other_deployments_runs_are_not_read(mlflow_uri: str, experiment: str, store: ModelStore) -> None:
    other = ModelStore(mlflow_uri, experiment=experiment, deployment="other")
    theirs = JobIdentity(deployment="other", dag_id="a", run_id="b", task_id="c")
    other.ensure_run("theirs", theirs, SPEC, START_UNIX_S)
    store.ensure_run("ours", identity("ours"), SPEC, START_UNIX_S)
    assert set(store.reports()) == {"ours"}
    assert set(other.reports()) == {"theirs"}


def test_a_run_that_was_closed_is_opened_again_and_one_that_is_gone_is_named(
    client: MlflowClient, store: ModelStore
) -> None:
    run_id = store.ensure_run("one", identity("one"), SPEC, START_UNIX_S)
    store.close_run(run_id, "FAILED", how="ended by user", message="stopped on request")
    assert client.get_run(run_id).data.tags["pollux.end"] == "ended by user"
    assert store.reopen_run("one", run_id).run_id == run_id
    assert client.get_run(run_id).info.status == "RUNNING"
    assert not [name for name in client.get_run(run_id).data.tags if name.startswith("pollux.end")]
    client.delete_run(run_id)
    assert "deleted" in store.reopen_run("one", run_id).remarks[0]
    assert "gone" in store.reopen_run("one", "0" * 32).remarks[0]


def test_decisions_of_a_day_share_a_run_and_the_next_day_begins_another(
    client: MlflowClient, store: ModelStore
) -> None:
    def record(decision: int, now_unix_s: float) -> str:
        return store.record_decision(
            decision=decision,
            now_unix_s=now_unix_s,
            figures={"objective": float(decision), "not_finite": float("nan")},
            earlier={decision - 1: {"realised_goodput": 5.0}},
            wall_clock_s={"decide": 0.25},
            documents={"decision.json": "{}", "snapshot.json": "x" * 100_000},
        )

    first = record(7, START_UNIX_S)
    assert record(8, START_UNIX_S + 60) == first
    second = record(9, START_UNIX_S + 86_400)
    assert second != first
    assert client.get_run(first).info.status == "FINISHED"
    assert client.get_run(second).info.status == "RUNNING"
    points = client.get_metric_history(first, "objective")
    assert [(point.step, point.value) for point in points] == [(7, 7.0), (8, 8.0)]
    assert [point.step for point in client.get_metric_history(first, "realised_goodput")] == [6, 7]
    assert client.get_run(first).data.metrics["wall_clock/decide"] == 0.25
    assert "not_finite" not in client.get_run(first).data.metrics
    files = client.list_artifacts(first, "decisions/7")
    assert [file.path for file in files] == ["decisions/7/decision.json"]


def test_a_dead_mlflow_is_noticed_quickly_and_no_password_is_told() -> None:
    store = ModelStore("http://user:hunter2@127.0.0.1:9")
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        store.reports()
    assert time.monotonic() - started_s < 10
    assert "hunter2" not in str(caught.value)


def test_an_experiment_that_somebody_deleted_is_named_with_the_fix(
    client: MlflowClient, mlflow_uri: str, experiment: str
) -> None:
    client.delete_experiment(client.get_experiment_by_name(experiment).experiment_id)
    with pytest.raises(StoreError, match="restore"):
        ModelStore(mlflow_uri, experiment=experiment).reports()

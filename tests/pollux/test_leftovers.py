"""A driver's pod goes once its job and its task are over and its run is closed, and no other does."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow_store import mlflow_uri, new_experiment

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.errors import Refused, StoreUnavailable, UnknownJob
from pollux.leftovers import close_runs, remove_left
from pollux.operators.schedule import tidy_up
from pollux.orphans import ALIVE_STATES, GONE
from pollux.settings import Settings
from pollux.store import ModelStore
from pollux_agent.protocol import JobSpec

__all__ = ["mlflow_uri", "new_experiment"]

SPEC = JobSpec(name="digits", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2)


@dataclass
class Pods:
    """``gone`` and ``refused`` are jobs whose pods somebody else removed, or may not be removed."""

    removed: list[tuple[str, str]] = field(default_factory=list)
    gone: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def left(self, deployment: str) -> dict[str, ClusterJob]:
        return {}

    def remove(self, job_id: str, *, uid: str = "") -> None:
        if job_id in self.gone:
            raise UnknownJob(job_id)
        if job_id in self.refused:
            raise Refused("pods is forbidden: cannot delete")
        self.removed.append((job_id, uid))


@pytest.fixture
def store(mlflow_uri: str, new_experiment: Callable[[str], str]) -> ModelStore:
    return ModelStore(
        mlflow_uri, experiment=new_experiment("jobs"), decisions_experiment=new_experiment("decisions")
    )


def over(store: ModelStore, job_id: str) -> ClusterJob:
    """A job that was done, with its run still open."""
    identity = JobIdentity(deployment="airflow", dag_id="dag", run_id=job_id, task_id="train")
    run_id = store.ensure_run(job_id, identity, SPEC, 1_700_000_000.0)
    return ClusterJob(
        job_id=job_id,
        identity=identity,
        spec=SPEC,
        submitted_unix_s=1_700_000_000.0,
        mlflow_run_id=run_id,
        status=JobStatus(phase="done"),
    )


def test_pods_go_in_the_second_cycle_with_their_runs_closed(
    store: ModelStore, mlflow_uri: str, tmp_path: Path
) -> None:
    left = {"u-a": over(store, "a"), "u-b": over(store, "b")}
    pods, states = Pods(), {"a": "success", "b": "up_for_retry"}
    cycle = lambda: remove_left(  # noqa: E731
        pods, store, left, lambda identity: states[identity.run_id], memory=tmp_path / "leftovers.json"
    )
    assert cycle() == ()
    assert cycle() == ("a",)
    assert pods.removed == [("a", "u-a")]
    client = MlflowClient(mlflow_uri)
    status = {job.job_id: client.get_run(job.mlflow_run_id).info.status for job in left.values()}
    assert status == {"a": "FINISHED", "b": "RUNNING"}


@pytest.mark.parametrize("state", sorted(ALIVE_STATES))
def test_a_task_that_comes_back_keeps_the_pod(store: ModelStore, tmp_path: Path, state: str) -> None:
    left = {"u": replace(over(store, "a"), status=JobStatus(phase="failed"))}
    pods = Pods()
    for _ in range(3):
        assert remove_left(pods, store, left, lambda _: state, memory=tmp_path / "l.json") == ()


def test_a_pod_of_the_same_job_made_anew_is_another_one(store: ModelStore, tmp_path: Path) -> None:
    job = over(store, "a")
    pods = Pods()
    for uid in ("first", "second", "third"):
        assert remove_left(pods, store, {uid: job}, lambda _: GONE, memory=tmp_path / "l.json") == ()
    assert pods.removed == []


def test_one_that_may_not_be_removed_harms_no_other(
    store: ModelStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = {job_id: over(store, job_id) for job_id in ("a", "b", "c")}
    pods = Pods(gone=("a",), refused=("b",))
    cycle = lambda: remove_left(pods, store, left, lambda _: "failed", memory=tmp_path / "l")  # noqa: E731
    cycle()
    assert cycle() == ("c",)
    assert "1 driver pods stay, the first one that of b: pods is forbidden" in caplog.text


def test_without_mlflow_pods_stay_for_the_runs_end_is_read_from_them(
    store: ModelStore, tmp_path: Path
) -> None:
    left = {"u": over(store, "a")}
    away = ModelStore("http://127.0.0.1:9", experiment="none", decisions_experiment="none")
    pods, memory = Pods(), tmp_path / "l.json"
    assert remove_left(pods, away, left, lambda _: "success", memory=memory) == ()
    with pytest.raises(StoreUnavailable):
        remove_left(pods, away, left, lambda _: "success", memory=memory)
    assert pods.removed == []
    assert remove_left(pods, store, left, lambda _: "success", memory=memory) == ("a",)


def test_runs_of_jobs_that_nobody_knows_are_closed_once_their_task_is_over(
    store: ModelStore, mlflow_uri: str, tmp_path: Path
) -> None:
    """As where the cluster was away in all of a task's tries, or somebody removed the job's pod."""
    states = {"won": "success", "lost": "failed", "coming": "up_for_retry"}
    for job_id in states:
        over(store, job_id)
    runs = store.reports()
    cycle = lambda: close_runs(  # noqa: E731
        store, runs, lambda identity: states[identity.run_id], memory=tmp_path / "unknown.json"
    )
    assert cycle() == ()
    assert set(cycle()) == {"won", "lost"}
    client = MlflowClient(mlflow_uri)
    found = {job_id: client.get_run(run.run_id) for job_id, run in runs.items()}
    status = {job_id: run.info.status for job_id, run in found.items()}
    assert status == {"won": "FINISHED", "lost": "KILLED", "coming": "RUNNING"}
    assert "its task is failed" in found["lost"].data.tags["pollux.end_message"]


def test_a_cycle_that_finds_nothing_comes_between(store: ModelStore, tmp_path: Path) -> None:
    """What was found before it and is found after it was not found in two cycles in a row."""
    login = tmp_path / "login.json"
    login.write_text('{"admin": "secret"}')
    memories = tmp_path / "leftovers.json", tmp_path / "unknown.json"
    for memory in memories:
        memory.write_text('["u"]')
    config = Settings(state=tmp_path, airflow_url="http://127.0.0.1:9", airflow_login=login)
    tidy_up(Pods(), store, (), config, logging.getLogger())  # type: ignore[arg-type]
    assert [json.loads(memory.read_text()) for memory in memories] == [[], []]

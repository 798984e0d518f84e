"""The trigger: one event a job's end, and only a person's act on the task ends a job."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import TriggerEvent
from airflow_rim import EndingCluster, ending

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.errors import Refused
from pollux.triggers.training import PolluxTrainingTrigger
from pollux_agent.protocol import JobSpec, from_plain

SPEC = JobSpec(name="digits", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2)
IDENTITY = JobIdentity(deployment="airflow", dag_id="dag", run_id="run-1", task_id="train")
JOB_ID = "digits-0123456789"


def submit(cluster: EndingCluster) -> None:
    cluster.submit(JOB_ID, identity=IDENTITY, spec=SPEC, run_id=None)


def trigger(*, map_index: int = -1) -> PolluxTrainingTrigger:
    made = PolluxTrainingTrigger(JOB_ID, poll_interval_s=0.01)
    made.task_instance = SimpleNamespace(
        dag_id="dag", run_id="run-1", task_id="train", map_index=map_index, try_number=1
    )
    return made


def events(made: PolluxTrainingTrigger) -> list[TriggerEvent]:
    async def collect() -> list[TriggerEvent]:
        return [event async for event in made.run()]

    return asyncio.run(collect())


def test_it_survives_the_metadata_database() -> None:
    made = PolluxTrainingTrigger(JOB_ID, cluster="local", poll_interval_s=3.5)
    classpath, arguments = made.serialize()
    module, _, name = classpath.rpartition(".")
    assert (module, name) == (PolluxTrainingTrigger.__module__, PolluxTrainingTrigger.__qualname__)
    again = PolluxTrainingTrigger(**json.loads(json.dumps(arguments)))
    assert again.serialize() == made.serialize()


@pytest.mark.parametrize(
    "status",
    [
        ending("done"),
        ending("failed", error="KeyError: 'x'", traceback="Traceback ..."),
        ending("failed", final=True),
        JobStatus(phase="ended", stop="clear"),
    ],
    ids=["done", "failed", "failed for good", "ended"],
)
def test_each_end_is_one_event_with_the_whole_job(cluster: EndingCluster, status: JobStatus) -> None:
    submit(cluster)
    cluster.ends = [status]
    (event,) = events(trigger())
    job = from_plain(ClusterJob, json.loads(json.dumps(event.payload))["job"])
    assert job == cluster.job(JOB_ID)
    assert job.status == status


def test_the_event_is_free_of_the_jobs_environment(cluster: EndingCluster) -> None:
    spec = replace(SPEC, env={"TOKEN": "s3cret"})
    cluster.submit(JOB_ID, identity=IDENTITY, spec=spec, run_id=None)
    cluster.ends = [ending("done")]
    (event,) = events(trigger())
    assert "s3cret" not in json.dumps(event.payload)


def test_a_job_that_the_cluster_lost_is_an_event_too(cluster: EndingCluster) -> None:
    (event,) = events(trigger())
    assert "no job" in event.payload["error"]


def test_a_cluster_that_refuses_to_tell_of_a_job_is_an_event_too(cluster: EndingCluster) -> None:
    submit(cluster)

    def refuse(method: str) -> None:
        raise Refused(f"{method}: 422: no such query")

    cluster.before = refuse
    (event,) = events(trigger())
    assert "422" in event.payload["error"]


def test_it_waits_for_a_cluster_that_comes_back(cluster: EndingCluster) -> None:
    submit(cluster)
    cluster.ends = [ending("done")]
    calls = []

    def away_for_a_while(method: str) -> None:
        calls.append(method)
        cluster.away = len(calls) < 5
        cluster._check(method)

    cluster.before = away_for_a_while
    assert len(events(trigger())) == 1
    assert len(calls) >= 5


def test_the_triggerers_shutdown_leaves_the_job_alone(cluster: EndingCluster) -> None:
    submit(cluster)
    made = trigger()

    async def run_then_shut_down() -> None:
        running = asyncio.create_task(made.run().__anext__())
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await made.cleanup()

    asyncio.run(run_then_shut_down())
    assert cluster.stops == []


@pytest.mark.parametrize(
    ("state_after", "want"),
    [
        ("failed", "failed"),
        ("upstream_failed", "failed"),
        ("success", "success"),
        (None, "clear"),
        ("queued", "clear"),
        ("deferred", "clear"),
        ("removed", "failed"),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("map_index", [-1, 2], ids=["unmapped", "mapped"])
def test_on_kill_asks_what_the_person_did(
    cluster: EndingCluster,
    monkeypatch: pytest.MonkeyPatch,
    state_after: str | None,
    want: str,
    map_index: int,
) -> None:
    """Airflow's answer names a mapped task by its id and index."""
    key = "train" if map_index < 0 else f"train_{map_index}"
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", airflow_tells({"run-1": {key: state_after}}))
    submit(cluster)
    cluster.settle(JOB_ID, JobStatus(phase="running", held={"node-0": 1}))
    asyncio.run(trigger(map_index=map_index).on_kill())
    assert cluster.stops == [want]


def airflow_tells(answer: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    def states(**query: Any) -> dict[str, Any]:
        assert query["task_ids"] == ["train"]
        return answer

    return staticmethod(states)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "want"),
    [({}, "failed"), ({"run-1": {}}, "failed"), (RuntimeError("no API server"), "clear")],
    ids=["the run is deleted", "the task is deleted", "Airflow does not answer"],
)
def test_on_kill_when_airflow_knows_no_state(
    cluster: EndingCluster, monkeypatch: pytest.MonkeyPatch, answer: Any, want: str
) -> None:
    def states(**query: Any) -> dict[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", staticmethod(states))
    submit(cluster)
    asyncio.run(trigger().on_kill())
    assert cluster.stops == [want]


def test_on_kill_of_a_job_that_is_over_or_unknown_does_nothing(
    cluster: EndingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", airflow_tells({"run-1": {"train": "failed"}}))
    asyncio.run(trigger().on_kill())
    submit(cluster)
    cluster.settle(JOB_ID, ending("done"))
    asyncio.run(trigger().on_kill())
    assert cluster.stops == []


def test_on_kill_gets_through_to_a_cluster_that_comes_back(
    cluster: EndingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pollux.triggers.training._ON_KILL_RETRY_S", 0.01)
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", airflow_tells({"run-1": {"train": "failed"}}))
    submit(cluster)
    calls = []

    def away_for_a_while(method: str) -> None:
        calls.append(method)
        cluster.away = len(calls) < 3
        cluster._check(method)

    cluster.before = away_for_a_while
    asyncio.run(trigger().on_kill())
    assert cluster.stops == ["failed"]


def test_on_kill_gets_done_although_airflow_goes_on_cancelling(
    cluster: EndingCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RuntimeTaskInstance, "get_task_states", airflow_tells({"run-1": {"train": "failed"}}))
    submit(cluster)
    begun, go_on = threading.Event(), threading.Event()

    def slowly(method: str) -> None:
        begun.set()
        go_on.wait(10)

    cluster.before = slowly

    async def kill_and_cancel() -> None:
        killing = asyncio.create_task(asyncio.wait_for(trigger().on_kill(), timeout=30))
        await asyncio.to_thread(begun.wait, 10)
        for _ in range(3):
            killing.cancel("user-action")
            await asyncio.sleep(0.01)
        go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
        async with asyncio.timeout(10):
            while not cluster.stops:
                await asyncio.sleep(0.01)

    asyncio.run(kill_and_cancel())
    assert cluster.stops == ["failed"]

"""The operator and its trigger on Kubernetes: lost drivers, what stays of a pod, what a row holds."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferred
from airflow_rim import EndingCluster, ending

from pollux.cluster.base import ClusterJob
from pollux.errors import DriverLost
from pollux.operators.kube import MAX_LOSSES
from pollux.operators.training import PolluxTrainingOperator
from pollux.triggers.training import PolluxTrainingTrigger
from pollux_agent.protocol import to_plain

Context = Callable[..., dict[str, Any]]

SPEC = {"script": "train.py", "initial_batch_size": 8, "max_local_batch_size": 8, "max_gpus": 2}


@dataclass
class LosingCluster(EndingCluster):
    """Loses the driver of the next so many looks at a job, and notes whose pods were removed.

    The driver of a job that is over goes on for the next ``closing`` looks.
    """

    losses: int = 0
    closing: int = 0
    removed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        EndingCluster.__init__(self)

    def job(self, job_id: str) -> ClusterJob:
        if self.losses:
            self.losses -= 1
            raise DriverLost(f"the driver of {job_id} is gone: Evicted")
        return super().job(job_id)

    def is_closing(self, job_id: str) -> bool:
        self.closing -= 1
        return self.closing >= 0

    def remove(self, job_id: str) -> None:
        self.removed.append(job_id)


@pytest.fixture
def kube(state: Path, monkeypatch: pytest.MonkeyPatch) -> LosingCluster:
    cluster = LosingCluster()
    for module in ("pollux.operators.training", "pollux.triggers.training"):
        monkeypatch.setattr(f"{module}.connect_kubernetes", lambda *_: cluster)
    return cluster


def operator(**arguments: Any) -> PolluxTrainingOperator:
    plain = {"task_id": "train", "cluster": "kubernetes", "poll_interval": 0.01, "image": "train:1"}
    return PolluxTrainingOperator(**plain | SPEC | arguments)


def deferred(call: Callable[[], Any]) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as raised:
        call()
    return raised.value


def test_a_lost_driver_is_made_again_in_the_same_try(kube: LosingCluster, context: Context) -> None:
    task = operator()
    waits = deferred(lambda: task.execute(context()))
    again = deferred(
        lambda: task.execute_complete(context(), {"lost": "evicted", "lived_s": 2.0}, **waits.kwargs)
    )
    assert len(kube.submissions) == 2
    assert again.kwargs["losses"] == 1
    kube.ends = [ending("done")]
    event = {"job": json.loads(json.dumps(to_plain(kube.job(task.job_id))))}
    assert task.execute_complete(context(), event, **again.kwargs)["step"] == 7


def test_in_the_tasks_own_process_too(kube: LosingCluster, context: Context) -> None:
    kube.losses, kube.ends = 2, [ending("done")]
    assert operator(deferrable=False).execute(context())["step"] == 7
    assert len(kube.submissions) == 3


def test_drivers_lost_again_and_again_cost_a_retry_but_not_those_that_lived_long(
    kube: LosingCluster, context: Context
) -> None:
    task = operator()
    lost = {"lost": "no memory", "lived_s": 2.0}
    with pytest.raises(AirflowException, match="no memory"):
        task.execute_complete(context(), lost, fresh=False, losses=MAX_LOSSES)
    again = deferred(
        lambda: task.execute_complete(context(), lost | {"lived_s": 1e4}, fresh=False, losses=MAX_LOSSES)
    )
    assert again.kwargs["losses"] == 1


def test_the_tasks_own_deadline_fails_it_for_good(kube: LosingCluster, context: Context) -> None:
    with pytest.raises(AirflowFailException, match="active_deadline_seconds"):
        operator().execute_complete(context(), {"lost": "Failed, DeadlineExceeded"}, fresh=False)
    assert kube.stops == ["failed"], "its workers would go on, and its run stay open"


@pytest.mark.parametrize(
    ("arguments", "end", "removed"),
    [
        pytest.param({}, ending("done"), True, id="done"),
        pytest.param({}, ending("failed", final=True), True, id="failed for good"),
        pytest.param({}, ending("failed"), False, id="a retry goes on from the pod's state"),
        pytest.param({"on_finish_action": "keep_pod"}, ending("done"), False, id="kept as asked"),
        pytest.param(
            {"on_finish_action": "delete_succeeded_pod"},
            ending("failed", final=True),
            False,
            id="kept if failed",
        ),
    ],
)
def test_the_drivers_pod_goes_with_the_last_verdict(
    kube: LosingCluster, context: Context, arguments: dict[str, Any], end: Any, removed: bool
) -> None:
    kube.ends = [end]
    task = operator(deferrable=False, **arguments)
    try:
        task.execute(context())
    except AirflowException:
        assert end.phase == "failed"
    assert kube.removed == ([task.job_id] if removed else [])


@pytest.mark.parametrize(
    ("looks", "removed"),
    [pytest.param(2, True, id="a moment longer"), pytest.param(1_000, False, id="MLflow is away")],
)
def test_a_driver_that_sends_last_figures_is_left_alone(
    kube: LosingCluster, context: Context, monkeypatch: pytest.MonkeyPatch, looks: int, removed: bool
) -> None:
    monkeypatch.setattr("pollux.operators.kube._DRIVER_ENDS_S", 0.2)
    monkeypatch.setattr("pollux.operators.kube._LOOK_EVERY_S", 0.01)
    kube.ends, kube.closing = [ending("done")], looks
    task = operator(deferrable=False)
    assert task.execute(context())["step"] == 7
    assert kube.removed == ([task.job_id] if removed else [])


def test_the_trigger_tells_of_a_lost_driver_and_its_row_holds_names_only(
    kube: LosingCluster, context: Context, tmp_path: Path
) -> None:
    secret = tmp_path / "kubeconfig"
    secret.write_text("token: s3cret")
    waits = deferred(lambda: operator(config_file=str(secret), namespace="team").execute(context()))
    row = json.loads(json.dumps(waits.trigger.serialize()))
    assert "s3cret" not in str(row)
    assert row[1]["kube"]["config_file"] == str(secret)
    kube.losses = 1

    async def first_event() -> dict[str, Any]:
        async for event in PolluxTrainingTrigger(**row[1]).run():
            return event.payload
        raise AssertionError("no event")

    event = asyncio.run(first_event())
    assert "Evicted" in event["lost"]

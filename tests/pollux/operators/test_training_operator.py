"""The operator over a cluster in memory: what fails at once, what costs a retry, what never succeeds."""

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, TaskDeferred
from airflow_rim import EndingCluster, ending

from pollux.cluster.base import JobStatus
from pollux.operators.training import PolluxTrainingOperator
from pollux_agent.protocol import to_plain

Context = Callable[..., dict[str, Any]]

SPEC = {"script": "train.py", "initial_batch_size": 8, "max_local_batch_size": 8, "max_gpus": 2}


def operator(**arguments: Any) -> PolluxTrainingOperator:
    return PolluxTrainingOperator(
        **{"task_id": "train", "deferrable": False, "poll_interval": 0.01, **SPEC} | arguments
    )


def deferred(task: PolluxTrainingOperator, context: dict[str, Any]) -> TaskDeferred:
    with pytest.raises(TaskDeferred) as raised:
        task.execute(context)
    return raised.value


def resume(
    task: PolluxTrainingOperator, context: dict[str, Any], waits: TaskDeferred, cluster: EndingCluster
) -> Any:
    """As Airflow does when the trigger has fired with the job as it is now."""
    event = {"job": json.loads(json.dumps(to_plain(cluster.job(task.job_id))))}
    return getattr(task, waits.method_name)(context, event=event, **(waits.kwargs or {}))


def test_it_keeps_the_vocabulary_of_its_base() -> None:
    task = operator(image="x", on_finish_action="keep_pod")
    assert isinstance(task, KubernetesPodOperator)
    assert set(KubernetesPodOperator.template_fields) < set(task.template_fields)
    assert PolluxTrainingOperator(task_id="t", **SPEC).deferrable is True


def test_defaults_are_three_retries_after_ten_seconds_mapped_or_not() -> None:
    with DAG("defaults", schedule=None):
        plain = PolluxTrainingOperator(task_id="a", **SPEC)
        mapped = PolluxTrainingOperator.partial(task_id="b", **SPEC).expand(epochs=[1, 2])
        own = PolluxTrainingOperator(task_id="c", retries=0, retry_delay=timedelta(seconds=1), **SPEC)
    assert (plain.retries, plain.retry_delay) == (3, timedelta(seconds=10))
    assert (mapped.retries, mapped.retry_delay) == (3, timedelta(seconds=10))
    assert (own.retries, own.retry_delay) == (0, timedelta(seconds=1))


def test_a_done_job_succeeds_with_a_small_result(cluster: EndingCluster, context: Context) -> None:
    cluster.ends = [ending("done")]
    result = operator().execute(context())
    assert result == {
        "job_id": cluster.submissions[0]["job_id"],
        "mlflow_run_id": None,
        "step": 7,
        "progress": 0.0,
        "restarts": 0,
    }


@pytest.mark.parametrize("deferrable", [False, True], ids=["in the task", "deferred"])
@pytest.mark.parametrize(
    ("status", "want"),
    [
        (ending("failed", error="KeyError: 'x'"), AirflowException),
        (ending("failed", error="KeyError: 'x'", final=True), AirflowFailException),
        (JobStatus(phase="done"), AirflowException),
        (JobStatus(phase="ended", stop="failed"), AirflowFailException),
        (JobStatus(phase="ended", stop="success"), AirflowSkipException),
        (JobStatus(phase="ended", stop="orphan"), AirflowException),
    ],
    ids=["mid-training", "final", "no marker", "marked failed", "marked success", "orphan"],
)
def test_how_ends_become_exceptions(
    cluster: EndingCluster, context: Context, status: JobStatus, want: type[Exception], deferrable: bool
) -> None:
    cluster.ends = [status]
    task = operator(deferrable=deferrable)
    with pytest.raises(Exception) as raised:
        if deferrable:
            resume(task, context(), deferred(task, context()), cluster)
        else:
            task.execute(context())
    assert type(raised.value) is want


def test_the_scripts_traceback_is_in_the_log(
    cluster: EndingCluster, context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.ends = [
        ending("failed", final=True, error="KeyError: 'x'", traceback="Traceback: line 3 in train")
    ]
    with pytest.raises(AirflowFailException, match="KeyError: 'x'"):
        operator().execute(context())
    assert "line 3 in train" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"script": None}, ["script", "missing"]),
        ({"initial_batch_size": "8"}, ["initial_batch_size", "'8'"]),
        ({"min_gpus": 3}, ["max_gpus", "2", "min_gpus", "3", "raise"]),
        ({"spec": {"scrpt": "x"}}, ["scrpt", "unknown field"]),
        ({"kind": "hybrid_parallel"}, ["hybrid", "not supported yet"]),
        ({"cluster": "mesos"}, ["mesos", "local", "kubernetes"]),
        ({"fresh": "perhaps"}, ["fresh", "perhaps", "true or false"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_fails_at_once_with_field_value_and_fix(
    state: Path, context: Context, wrong: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(AirflowFailException) as raised:
        operator(**wrong).execute(context())
    for word in words:
        assert word in str(raised.value)


def test_a_setting_that_is_missing_fails_at_once(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    monkeypatch.delenv("POLLUX_STATE", raising=False)
    with pytest.raises(AirflowFailException, match="POLLUX_STATE"):
        operator().execute(context())


def test_a_refused_job_fails_at_once(cluster: EndingCluster, context: Context) -> None:
    cluster.refuses = "script /x/train.py does not exist"
    with pytest.raises(AirflowFailException, match="does not exist"):
        operator().execute(context())


def test_a_cluster_that_is_away_costs_a_retry(cluster: EndingCluster, context: Context) -> None:
    cluster.away = True
    with pytest.raises(AirflowException) as raised:
        operator().execute(context())
    assert not isinstance(raised.value, AirflowFailException)


def test_the_service_of_a_stack_that_is_down_costs_a_retry(state: Path, context: Context) -> None:
    with pytest.raises(AirflowException) as raised:
        operator().execute(context())
    assert not isinstance(raised.value, AirflowFailException)


def test_identity_ignores_the_try_and_tells_mapped_tasks_apart(
    cluster: EndingCluster, context: Context
) -> None:
    for case in ({"try_number": 1}, {"try_number": 2}, {"map_index": 0}, {"map_index": 1}):
        deferred(operator(deferrable=True), context(**case))
    ids = [submission["job_id"] for submission in cluster.submissions]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    identity = cluster.submissions[3]["identity"]
    assert (identity.deployment, identity.dag_id, identity.run_id, identity.task_id, identity.map_index) == (
        "airflow",
        "dag",
        "run-1",
        "train",
        1,
    )


def test_a_retry_finds_the_same_job_and_resumes_it(cluster: EndingCluster, context: Context) -> None:
    cluster.ends = [ending("failed", error="OSError: disk"), ending("done")]
    with pytest.raises(AirflowException):
        operator().execute(context())
    assert operator().execute(context(try_number=2)) is not None
    assert cluster.submissions[0]["job_id"] == cluster.submissions[1]["job_id"]


@pytest.mark.parametrize(
    ("arguments", "conf", "try_number", "max_tries", "want"),
    [
        ({}, {}, 1, 3, False),
        ({"fresh": True}, {}, 1, 3, True),
        ({"fresh": "True"}, {}, 1, 3, True),
        ({}, {"fresh": True}, 1, 3, True),
        ({"fresh": True}, {}, 2, 3, False),
        ({"fresh": True}, {}, 3, 5, True),
        ({"fresh": "False"}, {}, 1, 3, False),
    ],
    ids=["not asked", "asked", "from a template", "by conf", "a retry", "after a clear", "template says no"],
)
def test_fresh_counts_once_a_round(
    cluster: EndingCluster,
    context: Context,
    arguments: dict[str, Any],
    conf: dict[str, Any],
    try_number: int,
    max_tries: int,
    want: bool,
) -> None:
    task = operator(deferrable=True, **arguments)
    deferred(task, context(try_number=try_number, max_tries=max_tries, **conf))
    assert cluster.submissions[0]["fresh"] is want


def test_fresh_stops_a_job_that_is_still_at_work_and_opens_it_again(
    cluster: EndingCluster, context: Context
) -> None:
    deferred(operator(deferrable=True), context())
    job_id = cluster.submissions[0]["job_id"]
    cluster.settle(job_id, JobStatus(phase="running", held={"node-0": 1}))
    deferred(operator(deferrable=True, fresh=True), context(try_number=2, max_tries=4))
    assert cluster.stops == ["failed"]
    assert cluster.submissions[-1]["fresh"] is True
    status = cluster.job(job_id).status
    assert (status.phase, status.stop, status.try_number) == ("waiting", None, 2)


def test_a_clear_that_overtakes_the_new_try_resubmits_within_it(
    cluster: EndingCluster, context: Context
) -> None:
    task = operator(deferrable=True)
    waits = deferred(task, context(try_number=2, max_tries=4))
    cluster.stop(task.job_id, "clear")
    with pytest.raises(TaskDeferred):
        resume(task, context(try_number=2, max_tries=4), waits, cluster)
    assert cluster.job(task.job_id).status.phase == "waiting"


def test_a_cluster_that_lost_the_job_costs_a_retry(cluster: EndingCluster, context: Context) -> None:
    task = operator(deferrable=True)
    with pytest.raises(AirflowException, match="no job"):
        task.execute_complete(context(), event={"error": "the cluster has no job 'x'"})


def test_deferral_takes_the_execution_timeout_and_its_end_stops_the_job(
    cluster: EndingCluster, context: Context
) -> None:
    task = operator(deferrable=True, execution_timeout=timedelta(minutes=5))
    assert deferred(task, context()).timeout == timedelta(minutes=5)
    fresh_process = operator(deferrable=True)
    with pytest.raises(AirflowException):
        fresh_process.resume_execution("__fail__", {"error": "Trigger timeout"}, context())
    assert cluster.stops == ["failed"]


def test_a_trigger_that_broke_leaves_the_job_to_the_retry(cluster: EndingCluster, context: Context) -> None:
    deferred(operator(deferrable=True), context())
    with pytest.raises(AirflowException):
        operator(deferrable=True).resume_execution("__fail__", {"error": "Trigger failure"}, context())
    assert cluster.stops == []


@pytest.mark.parametrize("way", ["its trigger broke", "the cluster refuses to tell of it"])
def test_a_job_that_no_try_comes_back_for_is_stopped(
    cluster: EndingCluster, context: Context, way: str
) -> None:
    deferred(operator(deferrable=True), context())
    last, task = context(try_number=4, max_tries=3), operator(deferrable=True)
    with pytest.raises(AirflowException):
        if way == "its trigger broke":
            task.resume_execution("__fail__", {"error": "Trigger failure"}, last)
        else:
            task.execute_complete(last, event={"error": "403: no right to get pods"})
    assert cluster.stops == ["failed"]
    assert [job.status.stop for job in cluster.jobs] == ["failed"]


@pytest.mark.parametrize("deferrable", [False, True], ids=["waiting", "before it defers"])
def test_a_task_process_that_is_killed_leaves_its_job_alone_and_the_next_try_finds_it(
    cluster: EndingCluster, context: Context, deferrable: bool
) -> None:
    class Killed(BaseException):
        """Nothing of the process runs any more."""

    def kill(method: str) -> None:
        if method == ("submit" if deferrable else "logs"):
            raise Killed

    cluster.after = kill
    with pytest.raises(Killed):
        operator(deferrable=deferrable).execute(context())
    cluster.after = lambda method: None
    task = operator(deferrable=deferrable)
    if deferrable:
        waits = deferred(task, context(try_number=2))
        cluster.ends = [ending("done")]
        assert resume(task, context(try_number=2), waits, cluster) is not None
    else:
        cluster.ends = [ending("done")]
        assert task.execute(context(try_number=2)) is not None
    (job,) = cluster.jobs
    assert (cluster.stops, job.status.try_number) == ([], 1)


def test_sigterm_while_the_task_waits_asks_for_a_checkpoint_and_never_succeeds(
    cluster: EndingCluster, context: Context
) -> None:
    task = operator()
    polled = threading.Event()
    cluster.after = lambda method: polled.set() if method == "logs" else None
    old = signal.signal(signal.SIGTERM, lambda number, frame: task.on_kill())
    try:
        killer = threading.Thread(target=lambda: (polled.wait(10), os.kill(os.getpid(), signal.SIGTERM)))
        killer.start()
        with pytest.raises(AirflowException, match="killed") as raised:
            task.execute(context())
        killer.join()
    finally:
        signal.signal(signal.SIGTERM, old)
    assert not isinstance(raised.value, AirflowFailException)
    assert cluster.stops == ["clear"]


def test_sigterm_before_the_deferral_does_not_defer(cluster: EndingCluster, context: Context) -> None:
    task = operator(deferrable=True)
    cluster.after = lambda method: task.on_kill() if method == "submit" else None
    with pytest.raises(AirflowException, match="killed"):
        task.execute(context())
    assert cluster.stops == ["clear"]


def test_without_mlflow_the_job_is_submitted_and_the_log_says_that_it_waits(
    cluster: EndingCluster,
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    cluster.ends = [ending("done")]
    operator().execute(context())
    assert cluster.submissions[0]["run_id"] is None
    assert "waits until the scheduling cycle has made one" in capsys.readouterr().out


def test_one_run_for_all_tries_and_a_refused_jobs_run_is_closed(
    cluster: EndingCluster, context: Context, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for try_number in (1, 2):
        deferred(operator(deferrable=True), context(try_number=try_number))
    first, second = (submission["run_id"] for submission in cluster.submissions)
    assert first is not None
    assert first == second
    cluster.refuses = "no such script"
    with pytest.raises(AirflowFailException):
        operator().execute(context(map_index=5))
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([client.get_run(first).info.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FAILED", "RUNNING"]


def test_the_link_leads_to_the_run_or_to_the_page_that_looks_it_up(
    cluster: EndingCluster, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = PolluxTrainingOperator.operator_extra_links[0]
    task = operator(deferrable=True)
    assert link.get_link(task, ti_key=context()["ti"]) == ""
    deferred(task, context())
    assert link.get_link(task, ti_key=context()["ti"]).endswith(f"/pollux/jobs/{task.job_id}/run")
    monkeypatch.setenv("POLLUX_MLFLOW_URL", "http://mlflow.example:5000/")
    cluster.set_run(task.job_id, "abc/../def")
    again = operator(deferrable=True)
    deferred(again, context())
    assert link.get_link(again, ti_key=context()["ti"]) == "http://mlflow.example:5000/#/runs/abc%2F..%2Fdef"

"""Faults through the real stack: what each costs a job, and what it must not."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from stack_services import frozen, kill_services
from trainings import DAG, Training, steady

from pollux.airflow_api import TaskInstance
from pollux.stack.processes import wait_until
from pollux.verify import read_record as read_run
from pollux.verify.training import double_bookings, lost_training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

POLLUX = str(Path(sys.executable).with_name("pollux"))
WAIT_S = 90.0
RETRY_DELAY = timedelta(seconds=10)
RAISE_AT = 40
"""After how many steps scripts raise: these, and the one whose update is made, are behind them then."""
OUTAGE_STEPS = 60
"""A steady training takes at least 6 s for these, three report intervals."""
POLL_LINES = 25
"""More lines than a steady training prints between two looks of its trigger."""


class Trainings:
    """Steady trainings that several tests share; each test goes on where the one before has left them."""

    def __init__(self, stack: Any, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self._started: dict[str, Training] = {}

    def start(self, name: str, *arguments: str, gpus: int = 1) -> Training:
        until = self._folder / f"{name}-may-end"
        self._started[name] = steady(self._stack, name, "--until", str(until), *arguments, gpus=gpus)
        return self._started[name]

    def __getitem__(self, name: str) -> Training:
        return self._started[name]

    def may_end(self, name: str) -> Training:
        (self._folder / f"{name}-may-end").touch()
        return self[name]

    def abandon(self) -> None:
        for training in self._started.values():
            training.abandon()


@pytest.fixture(scope="module")
def trainings(stack: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    shared = Trainings(stack, tmp_path_factory.mktemp("faults"))
    yield shared
    shared.abandon()


@pytest.fixture(scope="module")
def broken(stack: Any, trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Two whose scripts raise, beside one on two slots whose workers are to be killed."""
    marker = tmp_path_factory.mktemp("marker") / "raised"
    trainings.start("gang", gpus=2)
    trainings.start("once", "--raise-at", str(RAISE_AT), "--marker", str(marker))
    trainings.start("again", "--raise-at", str(RAISE_AT))
    return trainings


@pytest.fixture(scope="module")
def followed(stack: Any, trainings: Trainings) -> Trainings:
    """Two that train while services go away and come back."""
    trainings.start("watched")
    trainings.start("told")
    return trainings


def processes_of(training: Training) -> list[psutil.Process]:
    """The launchers and workers of a training."""
    job = training.job
    assert job is not None
    folder = str(training.state / "jobs" / job.job_id)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("POLLUX_JOB_DIR") == folder:
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_worker(process: psutil.Process) -> bool:
    return process.name() == "pollux-worker"


def command(stack: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A ``pollux`` command beside the stack, with its interval."""
    environ = {**os.environ, "POLLUX_INTERVAL_S": str(stack.record.plan.interval_s)}
    return subprocess.run(
        [POLLUX, *arguments, "--state", str(stack.state)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def is_running(training: Training) -> bool:
    job = training.job
    return job is not None and job.status.phase == "running"


def cycles(stack: Any) -> list[TaskInstance]:
    """The tasks of the scheduling DAG, newest first."""
    runs = [run.run_id for run in stack.api.dag_runs("pollux_schedule")]
    found = stack.api.find_task_instances(dag_ids=["pollux_schedule"], run_ids=runs, task_ids=["cycle"])
    return sorted((task for task in found if task.started), key=lambda task: task.started, reverse=True)


def log_of(stack: Any, cycle: TaskInstance) -> str:
    text: str = stack.api.log(cycle.dag_id, cycle.run_id, cycle.task_id, try_number=cycle.try_number)
    return text


def a_cycle_was_skipped(stack: Any, since: datetime, why: str) -> bool:
    """Whether a cycle that began after that moment gets skipped for that reason; waits for it."""

    def any_skipped() -> bool:
        skipped = [task for task in cycles(stack) if task.state == "skipped" and task.started > since]
        return any(why in log_of(stack, task) for task in skipped)

    return wait_until(any_skipped, WAIT_S)


def runs_of(stack: Any, training: Training) -> list[Any]:
    """MLflow's runs of a job."""
    job = training.job
    assert job is not None
    client = mlflow.MlflowClient(stack.mlflow_url)
    experiment = client.get_experiment_by_name("pollux")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], f"tags.`pollux.job_id` = '{job.job_id}'"))


def test_killed_workers_go_on_from_their_checkpoint_and_cost_no_retry(broken: Trainings) -> None:
    gang = broken["gang"]
    gang.wait_for_checkpoint(1)
    worker = next(process for process in processes_of(gang) if is_worker(process))
    worker.kill()
    gang.wait_for_checkpoint(2)
    whole = processes_of(gang)
    assert len([process for process in whole if is_worker(process)]) == 2
    for process in whole:
        process.kill()
    gang.wait_for_checkpoint(3)
    job = broken.may_end("gang").succeeds()
    assert (gang.task.try_number, job.status.phase, job.status.restarts) == (1, "done", 2)
    for incarnation in (2, 3):
        (resumed,) = gang.steps_of("resume", incarnation)
        assert resumed == max(gang.steps_of("checkpoint", incarnation - 1)) > 0
    assert lost_training(gang.record) == ()


def test_an_error_in_mid_training_costs_one_retry_that_goes_on_from_the_checkpoint(
    stack: Any, broken: Trainings
) -> None:
    once = broken["once"]
    once.wait_for_checkpoint(2)
    job = broken.may_end("once").succeeds()
    assert (once.task.try_number, job.status.try_number, job.status.restarts) == (2, 2, 1)
    (resumed,) = once.steps_of("resume", 2)
    assert resumed == max(once.steps_of("checkpoint", 1)) > 0
    assert "RuntimeError: broken on purpose" in once.log(1)
    tries = stack.api.get(f"/dags/{DAG}/dagRuns/{once.run.run_id}/taskInstances/train/tries")
    first, second = (tries["task_instances"][i] for i in (0, 1))
    waited = datetime.fromisoformat(second["start_date"]) - datetime.fromisoformat(first["end_date"])
    assert RETRY_DELAY <= waited < RETRY_DELAY + timedelta(seconds=20)


def test_the_same_error_at_the_same_step_again_fails_at_once(broken: Trainings) -> None:
    again = broken["again"]
    job = again.wait(lambda job, task: task.state == "failed", "it fails for good")
    assert (again.task.try_number, job.status.final) == (2, True)
    assert job.status.outcome is not None
    assert job.status.outcome.step == RAISE_AT + 1
    log = again.log(2)
    assert f"failed again at step {RAISE_AT + 1} with the same error" in log
    assert 'raise RuntimeError("broken on purpose")' in log
    assert job.job_id not in again.cluster.held()


def test_cycles_at_once_neither_fail_nor_give_a_slot_twice(stack: Any, followed: Trainings) -> None:
    """By hand in a loop and twice by an extra run, beside the scheduling DAG's own."""
    began = datetime.now(UTC)
    for _ in range(2):
        stack.api.trigger("pollux_schedule", {})
    by_hand = []
    deadline = time.monotonic() + WAIT_S
    while not all(is_running(followed[name]) for name in ("watched", "told")):
        assert time.monotonic() < deadline, by_hand
        by_hand.append(command(stack, "cycle"))
    for done in by_hand:
        assert done.returncode == 0 or done.stdout.startswith("skipped: "), done
        assert "Traceback" not in done.stderr
    assert 0 in {done.returncode for done in by_hand}
    for task in cycles(stack):
        if task.started > began:
            assert "Task failed with exception" not in log_of(stack, task)
    assert double_bookings(read_run(stack.state).jobs) == ()


def test_a_killed_triggerer_and_scheduler_come_back_to_their_tasks(stack: Any, followed: Trainings) -> None:
    watched = followed["watched"]
    watched.wait(lambda job, task: bool(watched.printed()), "what it prints is on the log page")
    killed = datetime.now(UTC)
    kill_services(stack.state, "airflow-triggerer", "airflow-scheduler")
    step = watched.steps_of("step", 1)[-1]
    watched.wait(lambda job, task: watched.printed()[-1][1] > step, "its log goes on")
    assert (watched.task.state, watched.task.try_number) == ("deferred", 1)
    assert wait_until(
        lambda: any(task.state == "success" and task.started > killed for task in cycles(stack)), WAIT_S
    ), cycles(stack)


def test_without_mlflow_training_goes_on_and_what_was_measured_meanwhile_arrives(
    stack: Any, followed: Trainings
) -> None:
    told = followed["told"]
    with frozen(stack.state, "mlflow"):
        began = datetime.now(UTC)
        step = told.steps_of("step", 1)[-1]
        late = followed.start("late")
        waiting = late.wait(
            lambda job, task: job is not None and "No MLflow run could be made" in late.log(),
            "a job submitted meanwhile waits, and its log says for what",
        )
        assert (waiting.status.phase, waiting.mlflow_run_id) == ("waiting", None)
        shown = json.loads(command(stack, "status", "--json").stdout)
        assert "does not answer" in shown["mlflow"]
        (message,) = (job["message"] for job in shown["jobs"] if job["name"] == "late")
        assert message.startswith("waits for its MLflow run")
        why = "without MLflow nothing is decided"
        assert a_cycle_was_skipped(stack, since=began, why=why), cycles(stack)
        told.wait(
            lambda job, task: told.steps_of("step", 1)[-1] > step + OUTAGE_STEPS, "training goes on meanwhile"
        )
        assert (late.job.status.phase, late.job.mlflow_run_id) == ("waiting", None)
    late.wait(lambda job, task: job.status.phase == "running", "the one that waited trains")
    job = followed.may_end("told").succeeds()
    assert (told.task.try_number, job.status.restarts) == (1, 0)
    assert job.status.outcome is not None
    (run,) = runs_of(stack, told)
    walked = mlflow.MlflowClient(stack.mlflow_url).get_metric_history(run.info.run_id, "walked")
    assert sorted(point.value for point in walked) == list(range(job.status.outcome.step + 1))
    assert run.data.metrics["progress"] == pytest.approx(job.status.outcome.progress)


def test_a_killed_local_cluster_takes_its_workers_along_and_resumes_them(
    stack: Any, followed: Trainings
) -> None:
    watched, late = followed["watched"], followed["late"]
    late.wait_for_checkpoint(1)
    last = watched.job.status.incarnation
    workers = processes_of(watched) + processes_of(late)
    assert len([process for process in workers if is_worker(process)]) == 2
    kill_services(stack.state, "local")
    assert wait_until(lambda: all(map(is_gone, workers)), 5), "the kernel ends them, and init buries them"
    for training in (watched, late):
        training.wait_for_checkpoint(2)
        (resumed,) = training.steps_of("resume", 2)
        assert resumed >= max(training.steps_of("checkpoint", 1)) > 0
    for name in ("watched", "late"):
        job = followed.may_end(name).succeeds()
        assert (followed[name].task.try_number, job.status.restarts) == (1, last)
        assert lost_training(followed[name].record) == ()


def test_after_all_that_the_log_page_has_each_line_once(followed: Trainings) -> None:
    """A triggerer that is killed may lose what it was just about to write, never more than one poll."""
    printed = followed["watched"].printed()
    assert len(printed) == len(set(printed))
    steps = [step for incarnation, step in printed if incarnation == 1]
    assert len(set(range(max(steps))) - set(steps)) <= POLL_LINES


def test_a_job_has_one_run_also_after_it_was_cleared(stack: Any, followed: Trainings) -> None:
    late = followed["late"]
    (run,) = runs_of(stack, late)
    late.clear()
    late.wait(lambda job, task: (task.state, task.try_number) == ("success", 2), "it succeeds again")
    (only,) = runs_of(stack, late)
    assert (only.info.run_id, only.info.status) == (run.info.run_id, "FINISHED")


def test_after_all_that_no_slot_was_given_twice(stack: Any, followed: Trainings) -> None:
    assert double_bookings(read_run(stack.state).jobs) == ()

"""A job under a person's hands, through the real stack: form, log page, link, marks and clear."""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from trainings import DAG, Training

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

_A_PASS = re.compile(r"\[\d+/node-\d+\] pass ")  # of any incarnation: the first may be resized before a pass


@pytest.fixture
def training(stack: Any) -> Any:
    """Starts trainings, and ends those that a test leaves behind."""
    started = []

    def start(**conf: Any) -> Training:
        started.append(Training(stack, **conf))
        return started[-1]

    yield start
    for left in started:
        left.abandon()


def test_a_persons_acts_on_the_task_reach_the_job(stack: Any, training: Callable[..., Training]) -> None:
    digits = training(name="by hand", epochs=500, arguments=["--width", "4"])
    digits.wait(lambda job, task: job is not None and job.status.phase == "running", "it runs")
    digits.wait(
        lambda job, task: bool(_A_PASS.search(digits.log(1))), "what its workers print is on the log page"
    )
    link = stack.api.get(f"/dags/{DAG}/dagRuns/{digits.run.run_id}/taskInstances/train/links")
    run_id = digits.job.mlflow_run_id
    assert link["extra_links"] == {"MLflow run": f"{stack.mlflow_url}/#/runs/{run_id}"}
    assert digits.task.state == "deferred"

    stack.api.set_state(DAG, digits.run.run_id, "train", "failed")
    failed = digits.wait(lambda job, task: job.status.phase == "ended", "marked failed: it ends")
    assert (failed.status.stop, failed.status.held) == ("failed", {})
    assert failed.job_id not in digits.cluster.held()

    stack.api.clear(DAG, digits.run.run_id, ["train"])
    again = digits.wait(
        lambda job, task: (
            job.status.phase == "running" and job.status.incarnation > failed.status.incarnation
        ),
        "cleared: it runs again",
    )
    assert (again.job_id, again.mlflow_run_id) == (failed.job_id, run_id)

    digits.wait(lambda job, task: task.state == "deferred", "its task waits for it")
    stack.api.set_state(DAG, digits.run.run_id, "train", "success")
    done = digits.wait(lambda job, task: job.status.phase == "ended", "marked success: it ends")
    assert done.status.stop == "success"
    assert digits.task.state == "success"
    lines = (digits.log(1) + digits.log(digits.task.try_number)).splitlines()
    passes = [line for line in lines if "] pass " in line]
    assert len(passes) == len(set(passes))


def test_a_wrong_spec_fails_at_once_with_field_and_fix_in_the_log(training: Callable[..., Training]) -> None:
    wrong = training(name="wrong", script="no_such_file.py")
    bounds = training(name="bounds", min_gpus=3, max_gpus=2)
    wrong.wait(lambda job, task: task.state == "failed", "a script that does not exist")
    bounds.wait(lambda job, task: task.state == "failed", "max below min")
    assert (wrong.task.try_number, bounds.task.try_number) == (1, 1)
    assert "no_such_file.py" in wrong.log(1)
    assert "max_gpus is 2, below min_gpus 3; raise max_gpus or lower min_gpus" in bounds.log(1)


def test_the_cluster_page_shows_the_stack_to_who_is_logged_in(stack: Any) -> None:
    token = httpx.post(
        f"{stack.airflow_url}/auth/token",
        json={"username": stack.api._user, "password": stack.api._password},
        trust_env=False,
    ).json()["access_token"]
    page = httpx.get(
        f"{stack.airflow_url}/pollux/", headers={"Authorization": f"Bearer {token}"}, trust_env=False
    )
    assert page.status_code == 200
    assert "node-0" in page.text
    assert "does not answer" not in page.text

"""Which services a stack has, and what they are told."""

import subprocess
import sys
from pathlib import Path

import pytest

from pollux.stack.record import StackPlan
from pollux.stack.services import HEARTBEAT_TIMEOUT_S, airflow_settings, base_environment, services
from pollux.stack.supervisor import new_record


def names(plan: StackPlan) -> list[str]:
    return [service.name for service in services(new_record(plan))]


def test_the_local_cluster_is_left_out_where_jobs_run_on_kubernetes(tmp_path: Path) -> None:
    local, *others = names(StackPlan(state=tmp_path))
    assert local == "local"
    assert names(StackPlan(state=tmp_path, settings={"POLLUX_CLUSTER": "kubernetes"})) == others


def test_a_plans_settings_reach_every_service_and_win(tmp_path: Path) -> None:
    plan = StackPlan(state=tmp_path, interval_s=5.0, settings={"POLLUX_SEED": "3", "POLLUX_INTERVAL_S": "7"})
    for service in services(new_record(plan)):
        assert (service.environ["POLLUX_SEED"], service.environ["POLLUX_INTERVAL_S"]) == ("3", "7")


def test_a_plan_without_settings_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLLUX_CLUSTER", raising=False)
    environ = base_environment(new_record(StackPlan(state=tmp_path)))
    assert "POLLUX_CLUSTER" not in environ


def test_airflow_reads_how_soon_a_silent_task_is_dead_and_tasks_beat_far_more_often(tmp_path: Path) -> None:
    """A killed cycle keeps the next ones waiting for so long."""
    record = new_record(StackPlan(state=tmp_path))
    ask = """
from airflow.sdk.execution_time.supervisor import HEARTBEAT_TIMEOUT, MIN_HEARTBEAT_INTERVAL
print(HEARTBEAT_TIMEOUT, MIN_HEARTBEAT_INTERVAL)
"""
    environ = base_environment(record) | airflow_settings(record)
    answer = subprocess.run(
        [sys.executable, "-c", ask], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    timeout_s, beat_s = map(int, answer.stdout.split()[-2:])
    assert timeout_s == HEARTBEAT_TIMEOUT_S
    assert 30 * beat_s <= timeout_s

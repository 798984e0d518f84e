"""Settings of a worker: read from the environment by a call, and refused by the variable's name."""

from pathlib import Path

import pytest

from pollux_agent.errors import DocumentError
from pollux_agent.settings import WorkerSettings, environment, worker_settings

SETTINGS = WorkerSettings(
    job_id="digits-0",
    job_dir=Path("/tmp/jobs/digits-0"),
    incarnation=3,
    node="node-1",
    slots=(0, 1),
    placement={"node-0": 1, "node-1": 2},
    node_rank=1,
    rendezvous="127.0.0.1:4000",
    signal_unix_s=12.5,
    slot_share=0.375,
    mlflow_tracking_uri="http://127.0.0.1:5000",
    mlflow_run_id="0123",
)


def test_the_environment_gives_the_settings_back() -> None:
    assert worker_settings(environment(SETTINGS)) == SETTINGS


def test_without_a_driver_there_are_no_settings() -> None:
    assert worker_settings({"PATH": "/usr/bin"}) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POLLUX_INCARNATION", "-1"),
        ("POLLUX_INCARNATION", "two"),
        ("POLLUX_SLOTS", "0,x"),
        ("POLLUX_PLACEMENT", "node-0=1"),
        ("POLLUX_PLACEMENT", '{"node-0": 0}'),
        ("POLLUX_GRACE_S", "0"),
        ("POLLUX_SLOT_SHARE", "1.5"),
        ("POLLUX_NODE", ""),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str) -> None:
    environ = environment(SETTINGS) | {variable: value}
    with pytest.raises(DocumentError, match=variable.removeprefix("POLLUX_").lower() + "|" + variable):
        worker_settings(environ)

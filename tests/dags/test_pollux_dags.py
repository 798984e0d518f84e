"""The DAG files: wiring that parses without network and services, and a form that refuses nonsense."""

import logging
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk.exceptions import AirflowException, ParamValidationError
from airflow_rim import EndingCluster, ending

from pollux.operators.form import spec_from_form
from pollux.operators.schedule import run_cycle, schedule
from pollux.settings import Settings
from pollux_agent.protocol import JobSpec, from_plain

FILES = sorted((Path(__file__).parents[2] / "dags").glob("*.py"))


@pytest.fixture
def dags(state: Path, monkeypatch: pytest.MonkeyPatch) -> DagBag:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a DAG file used the network")

    monkeypatch.setenv("POLLUX_INTERVAL_S", "60")
    with monkeypatch.context() as parsing:
        parsing.setattr(socket.socket, "connect", refuse)
        return DagBag(FILES[0].parent)


def test_they_parse_without_network_or_services(dags: DagBag) -> None:
    assert dags.import_errors == {}
    assert set(dags.dags) == {"pollux_schedule", "pollux_train"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_fits_a_screen(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 50


def test_the_schedule_never_catches_up_nor_overlaps(dags: DagBag) -> None:
    dag = dags.dags["pollux_schedule"]
    assert (dag.catchup, dag.max_active_runs, dag.is_paused_upon_creation) == (False, 1, False)
    assert dag.schedule == "* * * * *"
    assert dag.get_task("cycle").retries == 0


@pytest.mark.parametrize(
    ("interval_s", "want"),
    [
        (60, "* * * * *"),
        (300, "*/5 * * * *"),
        (5, timedelta(seconds=5)),
        (90, timedelta(seconds=90)),
        (420, timedelta(minutes=7)),
        (3600, timedelta(hours=1)),
    ],
)
def test_schedule_by_interval(tmp_path: Path, interval_s: float, want: object) -> None:
    assert schedule(Settings(state=tmp_path, interval_s=interval_s)) == want


def test_the_form_as_it_opens_is_a_whole_spec(dags: DagBag) -> None:
    params = dags.dags["pollux_train"].params
    plain = {field: value for field, value in params.dump().items() if value is not None and field != "fresh"}
    spec = from_plain(JobSpec, plain)
    assert spec.script == "digits.py"
    assert spec.batch_size_limit == 32 * spec.initial_batch_size


def test_what_a_hand_leaves_in_the_form_by_mistake_is_no_part_of_the_spec(dags: DagBag) -> None:
    """Airflow's dialog makes an item of each line of a list, an empty one too, and null of a cleared list."""
    params = dags.dags["pollux_train"].params
    for field, value in {
        "name": " Größe 模型 ",
        "script": "digits.py\n",
        "arguments": ["--note", "two words", "", ""],
    }.items():
        params[field] = value
    spec = spec_from_form({"params": params.dump()})
    assert (spec["name"], spec["script"]) == ("Größe 模型", "digits.py")
    assert spec["arguments"] == ["--note", "two words"]
    params["arguments"] = None
    assert "arguments" not in spec_from_form({"params": params.dump()})


def test_every_field_is_explained(dags: DagBag) -> None:
    params = dags.dags["pollux_train"].params
    for name in params:
        assert "title" in params.get_param(name).schema, name
        assert params.get_param(name).description, name


def test_the_dialog_opens_with_what_a_person_fills_in_first(dags: DagBag) -> None:
    """Airflow opens the one section that has no name of its own, and closes all others."""
    params = dags.dags["pollux_train"].params
    opened = [name for name in params if "section" not in params.get_param(name).schema]
    assert opened == ["name", "script", "arguments", "epochs", "scaling_rule"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("script", ""),
        ("arguments", "--lr 0.1"),
        ("arguments", [0.1]),
        ("initial_batch_size", 0),
        ("initial_batch_size", "32"),
        ("initial_batch_size", 2**31),
        ("epochs", 10**30),
        ("max_batch_size", 0),
        ("max_local_batch_size", 1.5),
        ("min_gpus", -1),
        ("max_gpus", None),
        ("scaling_rule", "cubic"),
        ("kind", "hybrid_parallel"),
        ("epochs", 0),
        ("name", ""),
        ("fresh", "yes"),
    ],
)
def test_the_form_refuses(dags: DagBag, field: str, value: object) -> None:
    params = dags.dags["pollux_train"].params
    with pytest.raises(ParamValidationError):
        params[field] = value
        params.validate()


@pytest.mark.usefixtures("airflow_db")
def test_a_run_of_the_form_defers_and_ends_with_the_job(dags: DagBag, cluster: EndingCluster) -> None:
    cluster.ends = [ending("done")]
    conf = {"name": "42", "arguments": ["--lr", "0.1"], "epochs": 2}
    run = dags.dags["pollux_train"].test(run_conf=conf)
    assert run.state == "success"
    (submission,) = cluster.submissions
    spec = submission["spec"]
    assert (spec.name, spec.arguments, spec.epochs) == ("42", ("--lr", "0.1"), 2)
    assert submission["identity"].run_id == run.run_id


@pytest.mark.usefixtures("airflow_db")
def test_a_job_that_a_retry_cannot_help_fails_the_run(dags: DagBag, cluster: EndingCluster) -> None:
    cluster.ends = [ending("failed", final=True, error="KeyError: 'x'")]
    run = dags.dags["pollux_train"].test()
    assert run.state == "failed"
    assert len(cluster.submissions) == 1


@pytest.mark.usefixtures("airflow_db")
def test_a_cycle_without_services_ends_skipped_and_its_log_says_why(
    dags: DagBag, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    run = dags.dags["pollux_schedule"].test()
    assert [ti.state for ti in run.get_task_instances()] == ["skipped"]
    assert "Skipped: the cluster does not answer" in caplog.text


@pytest.mark.usefixtures("state")
def test_a_cycle_without_an_mlflow_server_names_the_setting() -> None:
    """Without an address MLflow would make a database of its own wherever the task runs."""
    with pytest.raises(AirflowException, match="MLFLOW_TRACKING_URI: not set"):
        run_cycle(datetime.now(UTC), "run", logging.getLogger())

"""What earlier runs of the same model hand on, read from a real MLflow."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from fitted import FIT
from mlflow import MlflowClient

from pollux_agent.protocol import REPORT_TAG, Report, encode
from pollux_agent.report.prior import Earlier, ask_for_prior, earlier_runs

REPORT = Report(
    job_id="job",
    incarnation=1,
    sequence=1,
    time_unix_s=1.0,
    fits={"a100": FIT},
    initial_batch_size=32,
    max_batch_size=1024,
    max_local_batch_size=256,
    max_gpus_seen=4,
    gpus_seen={"a100": 4},
)
HANDED_ON = Earlier(fits={"a100": FIT}, gpus_seen={"a100": 4}, max_gpus_seen=4)

Run = Callable[..., str]


@pytest.fixture
def run(mlflow_uri: str, new_experiment: Callable[[str], str]) -> Run:
    """Make a run of a model with a report, started at a time; its id."""
    client = MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name(new_experiment("prior")).experiment_id

    def make(model: str = "net", report: str | None = None, start: int = 1000) -> str:
        made = str(client.create_run(experiment, start_time=start).info.run_id)
        if model:
            client.log_param(made, "model", model)
        if report is not None:
            client.set_tag(made, REPORT_TAG, report)
        return made

    return make


def test_the_newest_earlier_fit_of_each_type_is_found(mlflow_uri: str, run: Run) -> None:
    newer, slower = replace(FIT, alpha_grad=0.07), replace(FIT, alpha_grad=0.5)
    run(report=encode(replace(REPORT, fits={"t4": slower}, gpus_seen={}, max_gpus_seen=6)), start=500)
    run(report=encode(replace(REPORT, max_gpus_seen=16, gpus_seen={"a100": 16})), start=1000)
    run(report=encode(replace(REPORT, fits={"a100": newer})), start=2000)
    run(model="other", report=encode(replace(REPORT, fits={"a100": replace(FIT, gamma=3.0)})), start=3000)
    mine = run(start=4000, report=encode(replace(REPORT, fits={"h100": FIT}, max_gpus_seen=64)))
    found = earlier_runs(MlflowClient(mlflow_uri), mine)
    assert found == Earlier(fits={"a100": newer, "t4": slower}, gpus_seen={"a100": 4}, max_gpus_seen=6)


@pytest.mark.parametrize(
    "garbage",
    [
        None,
        "",
        "no JSON",
        "[]",
        encode(REPORT).replace('"gamma":1.5', '"gamma":1e9'),
        encode(REPORT).replace('"alpha_grad":0.05', '"alpha_grad":-1'),
        encode(REPORT).replace('"gamma":1.5', '"gamma":NaN'),
    ],
)
def test_a_run_with_garbage_is_passed_over(mlflow_uri: str, run: Run, garbage: str | None) -> None:
    run(report=encode(REPORT), start=1000)
    run(report=garbage, start=2000)
    assert earlier_runs(MlflowClient(mlflow_uri), run(start=3000)) == HANDED_ON


@pytest.mark.parametrize("model", ["", "net's", 'a "b"', "a' \"b"])
def test_names_of_any_spelling_raise_nothing(mlflow_uri: str, run: Run, model: str) -> None:
    run(model=model, report=encode(REPORT), start=1000)
    found = earlier_runs(MlflowClient(mlflow_uri), run(model=model, start=2000))
    assert found == (None if model in ("", "a' \"b") else HANDED_ON)


def test_it_is_given_from_a_thread_and_a_broken_store_gives_nothing(mlflow_uri: str, run: Run) -> None:
    run(report=encode(REPORT), start=1000)
    given: list[Earlier] = []
    thread = ask_for_prior(mlflow_uri, run(start=2000), given.append)
    assert thread is not None
    thread.join(60)
    assert given == [HANDED_ON]
    thread = ask_for_prior(mlflow_uri, "no such run", given.append)
    assert thread is not None
    thread.join(60)
    assert given == [HANDED_ON]
    assert ask_for_prior("", "", given.append) is None

"""What an earlier run of the same model hands on to a job, and that the simulator hands on the same."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from elastic_runs import DriverRun, Line, linear_model
from fitted import FIT
from mlflow import MlflowClient
from mlflow_store import mlflow_uri, new_experiment

from pollux.simulate.agent import Knowledge, SimulatedAgent
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.protocol import REPORT_TAG, Report, decode, encode
from pollux_agent.report import ReporterApart
from pollux_agent.report.prior import Earlier
from pollux_agent.settings import environment
from pollux_agent.torch import ElasticJob

__all__ = ["mlflow_uri", "new_experiment"]

EARLIER = Report(
    job_id="earlier",
    incarnation=1,
    sequence=1,
    time_unix_s=1.0,
    fits={"gpu": FIT, "t4": replace(FIT, alpha_grad=0.2)},
    initial_batch_size=4,
    max_batch_size=4,
    max_local_batch_size=4,
    max_gpus_seen=8,
    gpus_seen={"gpu": 8, "t4": 2},
)


def train_after(
    root: Path, monkeypatch: pytest.MonkeyPatch, uri: str, experiment: str, earlier: Report | None
) -> Report:
    """The last report of a job on one GPU, whose model has been trained before if ``earlier`` says so."""
    client = MlflowClient(uri)
    experiment_id = client.get_experiment_by_name(experiment).experiment_id
    runs = [client.create_run(experiment_id, start_time=start).info.run_id for start in (1000, 2000)]
    for run in runs:
        client.log_param(run, "model", "line")
    if earlier is not None:
        client.set_tag(runs[0], REPORT_TAG, encode(earlier))
    driver = DriverRun(root)
    settings = driver.settings(0, mlflow_tracking_uri=uri, mlflow_run_id=runs[1])
    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)
    answered, ask = threading.Event(), ReporterApart.ask_for_earlier

    def ask_and_tell(reporter: ReporterApart, give: Callable[[Earlier], None]) -> None:
        ask(reporter, lambda found: (give(found), answered.set()))  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(ReporterApart, "ask_for_earlier", ask_and_tell)
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = ElasticJob(model, optimizer, Line(), batch_size=4)
    assert earlier is None or answered.wait(60)
    for _ in job.epochs(3):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            (job.model(inputs).squeeze(1) - targets).square().mean().backward()
            optimizer.step()
    return decode(Report, client.get_run(runs[1]).data.tags[REPORT_TAG])


def test_a_job_takes_up_fits_and_how_far_they_were_measured_as_a_simulated_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str, new_experiment: Callable[[str], str]
) -> None:
    report = train_after(tmp_path, monkeypatch, mlflow_uri, new_experiment("handed on"), EARLIER)
    handed_on = Knowledge(fits=EARLIER.fits, max_gpus=8, gpus_seen=EARLIER.gpus_seen)
    limits = BatchLimits(initial_batch_size=4, max_batch_size=4, max_local_batch_size=4)
    simulated = SimulatedAgent({"gpu": limits}, handed_on)
    simulated.measure_step("gpu", 1, 1, 4, 0.1, 0.0)
    assert (report.max_gpus_seen, report.gpus_seen) == (simulated.max_gpus, simulated.gpus_seen)
    assert (report.max_gpus_seen, report.gpus_seen) == (8, {"gpu": 8, "t4": 2})
    assert report.fits.keys() == simulated.fits.keys() == {"gpu", "t4"}
    for agent in (report, simulated):
        assert agent.fits["t4"] == EARLIER.fits["t4"]
        assert agent.fits["gpu"].gamma == FIT.gamma
    # What was measured is the job's own: a step of the toy takes less than a hundredth of FIT's.
    assert report.fits["gpu"].alpha_grad + 4 * report.fits["gpu"].beta_grad < 0.05


def test_a_job_without_an_earlier_run_says_what_it_measured_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str, new_experiment: Callable[[str], str]
) -> None:
    report = train_after(tmp_path, monkeypatch, mlflow_uri, new_experiment("alone"), None)
    assert (report.max_gpus_seen, report.gpus_seen) == (1, {"gpu": 1})

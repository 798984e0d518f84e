"""What a job reports: the document for the scheduler, and metrics whose steps only rise."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from elastic_runs import DriverRun

from pollux_agent.model.goodput import BatchLimits
from pollux_agent.protocol import Report
from pollux_agent.report import NullReporter
from pollux_agent.torch import telemetry as telemetry_module
from pollux_agent.torch.config import JobConfig
from pollux_agent.torch.history import History
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.telemetry import JobState, Telemetry
from pollux_agent.torch.training import progress_of_step

CONFIG = JobConfig(
    kind="adaptive",
    limits=BatchLimits(initial_batch_size=32, max_batch_size=1024, max_local_batch_size=256),
    scaling_rule="adascale",
    epochs=None,
)
STATE = JobState(
    plan=BatchPlan(batch_size=64, micro_batches=1),
    num_gpus=2,
    noise_scale=90.0,
    lr_factor=1.5,
    target_progress=400.0,
    fits={},
)


class Kept(NullReporter):
    """A reporter that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.reports: list[Report] = []

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self.points += [(name, value, step) for name, value in values.items()]

    def report(self, report: Report) -> None:
        self.reports.append(report)


def test_a_report_tells_useful_samples_a_second(tmp_path: Path) -> None:
    kept, history = Kept(), History(progress=100.0, step=90, examples=5000, skipped_steps=3)
    telemetry = Telemetry(kept, DriverRun(tmp_path).settings(2), CONFIG, history)
    for _ in range(4):
        telemetry.step(seconds=0.5, samples=64, progress=1.6)
    telemetry.report(STATE)
    points = {name: (value, step) for name, value, step in kept.points}
    want = {"throughput": 128.0, "goodput": 102.4, "efficiency": 0.8, "step_time_s": 0.5, "pgns": 90.0}
    want |= {
        "batch_size": 64,
        "gpus": 2,
        "lr_factor": 1.5,
        "examples_processed": 5000,
        "optimizer_updates": 87,
    }
    for name, value in want.items():
        assert points[name] == (pytest.approx(value), 100)
    (report,) = kept.reports
    assert (report.goodput, report.noise_scale, report.batch_size) == (pytest.approx(102.4), 90.0, 64)
    assert (report.incarnation, report.sequence, report.target_progress) == (2, 1, 400.0)


def test_no_step_of_a_metric_is_logged_twice_also_after_a_restart(tmp_path: Path) -> None:
    run = DriverRun(tmp_path)
    kept, history = Kept(), History(progress=10.0)
    telemetry = Telemetry(kept, run.settings(0), CONFIG, history)
    telemetry.log({"accuracy": 0.5})
    telemetry.log({"accuracy": 0.6})
    history.progress = 12.0
    telemetry.log({"accuracy": 0.7})
    restarted = Telemetry(kept, run.settings(1), CONFIG, again := History(progress=10.0))
    restarted.recall()
    for again.progress in (11.0, 12.0, 13.0):
        restarted.log({"accuracy": 0.8})
    assert kept.points == [("accuracy", 0.5, 10), ("accuracy", 0.7, 12), ("accuracy", 0.8, 13)]


def test_what_was_logged_is_kept_line_by_line_and_now_and_then_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_module, "_MOST_LINES", 5)
    run = DriverRun(tmp_path)
    telemetry = Telemetry(Kept(), run.settings(0), CONFIG, history := History())
    file = run.settings(0).folder.logged
    for history.progress in map(float, range(1, 100)):
        telemetry.log({"loss": 1.0, f"seldom-{int(history.progress) % 3}": 1.0})
        assert len(file.read_bytes().splitlines()) <= 6
        restarted = Telemetry(Kept(), run.settings(1), CONFIG, again := History())
        restarted.recall()
        assert again.logged == history.logged
    with file.open("a") as torn:
        torn.write('{"loss": 1')
    restarted.recall()
    assert again.logged == history.logged, "a line that was cut off costs that line alone"


@pytest.mark.parametrize(
    ("noise_scale", "batch_size", "adaptive", "want"),
    [
        pytest.param(96.0, 32, True, 1.0, id="a step at M0 is one"),
        pytest.param(96.0, 64, True, 2 * 128 / 160, id="Pollux Eq. 7 at twice M0"),
        pytest.param(96.0, 8, True, 0.25, id="a small last step counts its share"),
        pytest.param(None, 64, True, 1.0, id="without phi a larger step is worth one at M0"),
        pytest.param(None, 16, False, 0.5, id="a fixed batch counts samples"),
    ],
)
def test_progress_of_a_step(noise_scale: float | None, batch_size: int, adaptive: bool, want: float) -> None:
    progress = progress_of_step(noise_scale, initial_batch_size=32, batch_size=batch_size, adaptive=adaptive)
    assert progress == pytest.approx(want)


def test_a_restart_is_timed_from_the_signal() -> None:
    history = History()
    history.count_restart(12.0)
    history.count_restart(None)
    history.count_restart(18.0)
    assert (history.restarts, history.mean_restart_s) == (3, 15.0)

"""When the next job is submitted, when the demo gives up, and what it shows meanwhile."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pollux.demo.follow import Watchdog, Watching, is_due
from pollux.demo.jobs import demo_plan, expectations_of, quick_plan
from pollux.demo.observe import ClusterNow, JobView
from pollux.demo.view import PlainLines, render
from pollux.errors import DemoError


def view(**changes: object) -> JobView:
    fields: dict[str, object] = {
        "name": "digits",
        "phase": "running",
        "placement": {"node-0": 2, "node-1": 2},
        "step": 40,
        "progress": 50.0,
        "batch_size": 128,
        "goodput": 1234.0,
    }
    return JobView(**{**fields, **changes})


@pytest.mark.parametrize(
    ("job", "since_s", "want"),
    [
        (view(), 1.0, True),
        (view(placement={"node-0": 2}), 1.0, False),
        (view(phase="starting"), 1.0, False),
        (view(step=0), 1.0, False),
        (view(placement={"node-0": 2}), 10_000.0, True),
        (view(phase="done", placement={}), 1.0, True),
    ],
    ids=[
        "every slot is at work",
        "slots are free",
        "still starting",
        "no step yet",
        "patience is at an end",
        "nobody is at work",
    ],
)
def test_the_next_job_comes_when_somebody_has_to_shrink_for_it(
    job: JobView, since_s: float, want: bool
) -> None:
    assert is_due(demo_plan(), ClusterNow(jobs=(job,)), since_last_s=since_s, capacity=4) is want


def test_the_third_job_waits_until_the_second_is_at_work() -> None:
    first, waiting = view(), view(name="second", phase="waiting", placement={}, step=0)
    assert not is_due(demo_plan(), ClusterNow(jobs=(first, waiting)), since_last_s=5.0, capacity=4)
    shrunk, working = view(placement={"node-0": 2}), view(name="second", placement={"node-1": 2})
    unsubmitted = JobView(name="third")
    now = ClusterNow(jobs=(shrunk, working, unsubmitted))
    assert is_due(demo_plan(), now, since_last_s=5.0, capacity=4)


def test_the_watchdog_barks_after_the_time_without_any_change(tmp_path: Path) -> None:
    watchdog = Watchdog("training", stall_s=180.0, where=tmp_path)
    watchdog.feed(1, 0.0)
    watchdog.feed(1, 179.0)
    watchdog.feed(2, 180.0)
    watchdog.feed(2, 359.0)
    with pytest.raises(DemoError, match=f"while training: no progress for 180 s.*{tmp_path}"):
        watchdog.feed(2, 360.0)


def watching(job: JobView, *, decision: int = 7) -> Watching:
    now = ClusterNow(jobs=(job,), decision=decision, reasons=(("digits", "grown 1 -> 2 [bold]"),))
    return Watching(elapsed_s=75.0, now=now, runs={"digits": "running"}, targets={"digits": 100.0})


def test_without_a_terminal_a_line_comes_with_each_change_and_every_ten_seconds() -> None:
    lines = PlainLines()
    first = lines.feed(watching(view()), 0.0)
    assert first[0].startswith(" 1:15  digits: running, 4 GPUs, 1,234 useful samples/s at batch 128, 50%")
    assert "decision 7: digits: grown 1 -> 2 [bold]" in first[1]
    assert lines.feed(watching(view()), 5.0) == []
    assert len(lines.feed(watching(view(phase="stopping")), 6.0)) == 1
    assert len(lines.feed(watching(view(phase="stopping"), decision=8), 16.0)) == 2


def test_the_table_shows_names_and_reasons_as_they_are() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(watching(view()), capacity=4))
    text = console.export_text()
    for part in ("digits", "running", "4 (node-0: 2, node-1: 2)", "1,234/s", "■■■■", "grown 1 -> 2 [bold]"):
        assert part in text


@pytest.mark.parametrize("plan", [demo_plan(), quick_plan()], ids=["demo", "quick"])
def test_every_job_of_a_plan_is_valid_and_has_a_target(plan) -> None:
    expected = {job.dag_run_id: job.metric for job in expectations_of(plan).jobs}
    assert len(expected) == len(plan.jobs), "each job has a run of its own"
    for job in plan.jobs:
        spec = job.spec(epochs=3, max_gpus=4)
        assert {name: getattr(spec, name) for name in ("script", "epochs", "max_gpus")} == {
            "script": job.script,
            "epochs": 3,
            "max_gpus": 4,
        }
        assert job.form(epochs=3, max_gpus=4).keys() <= set(spec.__dataclass_fields__)

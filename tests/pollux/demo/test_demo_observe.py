"""What the live view reads from files that are being written."""

from dataclasses import replace
from pathlib import Path

import pytest

from pollux.demo.observe import batch_size, last_events, measured_goodput, newest_events, trained_s
from pollux_agent.protocol import Event, JobFolder
from pollux_agent.records import append_line


def event(t: float, name: str = "step", progress: float = 0.0) -> Event:
    return Event(
        t_unix_s=t, event=name, node="node-0", slots=(0,), step=int(t), progress=progress, batch_size=64
    )


def test_the_tail_of_a_long_file_is_read_and_a_line_in_the_making_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events-1-0.jsonl"
    for t in range(500):
        append_line(path, event(float(t)))
    with path.open("a") as file:
        file.write('{"t_unix_s": 5')
    events = last_events(path)
    assert events[-1].t_unix_s == 499.0
    assert 50 < len(events) < 500


def test_a_file_that_is_not_there_has_no_events(tmp_path: Path) -> None:
    assert last_events(tmp_path / "events-1-0.jsonl") == []


def test_while_workers_restart_the_progress_of_those_before_is_shown(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    append_line(folder.events(1, 0), event(10.0, progress=7.0))
    append_line(folder.events(2, 0), event(20.0, "start"))
    assert newest_events(folder, 3)[-1].progress == 7.0
    append_line(folder.events(2, 0), event(25.0, "resume", progress=7.0))
    assert newest_events(folder, 2)[-1].t_unix_s == 25.0


def test_a_job_has_trained_since_its_very_first_start(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    last = event(45.0)
    assert trained_s(folder, last) == 0.0
    append_line(folder.events(1, 0), event(5.0, "start"))
    append_line(folder.events(2, 0), event(20.0, "start"))
    assert trained_s(folder, last) == 40.0


def test_goodput_is_progress_of_the_last_seconds_in_samples() -> None:
    """4 steps of M0 = 32 samples in 2 s; what lies more than 20 s back does not count."""
    events = [event(0.0, progress=0.0), event(100.0, progress=50.0), event(102.0, progress=54.0)]
    assert measured_goodput(events, initial_batch_size=32) == pytest.approx(4 * 32 / 2)


@pytest.mark.parametrize("events", [[], [event(1.0)], [event(1.0, "start"), event(2.0)]])
def test_one_step_tells_no_goodput(events: list[Event]) -> None:
    assert measured_goodput(events, initial_batch_size=32) is None


def test_the_short_last_step_of_a_pass_is_not_taken_for_the_batch_size() -> None:
    steps = [event(1.0), event(2.0), replace(event(3.0), batch_size=7)]
    assert batch_size([*steps, event(4.0, "checkpoint")]) == 64
    assert batch_size([]) == 0

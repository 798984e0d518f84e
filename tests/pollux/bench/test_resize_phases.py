"""A resize's phases are told by the events of driver and workers, and add up to patch until first step."""

from pathlib import Path

import pytest

from pollux.errors import PolluxError
from pollux.resizebench import PHASES, Resize, medians, phases_of
from pollux_agent.protocol import DriverEvent, Event, JobFolder
from pollux_agent.records import append_line

PATCHED_UNIX_S = 100.0


def drove(t: float, name: str, incarnation: int) -> DriverEvent:
    return DriverEvent(t_unix_s=t, event=name, incarnation=incarnation, decision=5)


def worked(t: float, name: str) -> Event:
    return Event(t_unix_s=t, event=name, node="node-0", slots=(0,), step=9, progress=9.0, batch_size=8)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    """Incarnation 3 gives way to 4; a periodic checkpoint lies before the one of the stop."""
    folder = JobFolder(tmp_path)
    for event in (drove(50.0, "start", 3), drove(100.5, "signal", 3), drove(103.0, "exit", 3)):
        append_line(folder.driver_events, event)
    append_line(folder.driver_events, drove(103.5, "start", 4))
    for event in (worked(51.0, "start"), worked(90.0, "checkpoint"), worked(101.0, "checkpoint")):
        append_line(folder.events(3, 0), event)
    for t, name in ((107.0, "start"), (109.0, "resume"), (109.25, "step"), (110.3, "step")):
        append_line(folder.events(4, 0), worked(t, name))
    return folder


def test_each_phase_ends_with_its_event(folder: JobFolder) -> None:
    phases = phases_of(folder, PATCHED_UNIX_S, before=3, after=4)
    assert dict(zip(PHASES, phases, strict=True)) == pytest.approx(
        {"signal": 0.5, "save": 0.5, "deletion": 2.5, "start": 3.5, "load": 2.0, "first_step": 0.25}
    )
    assert Resize(gpus_before=1, gpus_after=2, phases_s=phases).total_s == pytest.approx(9.25)


def test_a_moment_that_nobody_wrote_down_is_named(folder: JobFolder) -> None:
    with pytest.raises(PolluxError, match="incarnation 4 to 5: no event tells when signal was over"):
        phases_of(folder, PATCHED_UNIX_S, before=4, after=5)


def test_medians_are_by_phase_and_of_the_sums() -> None:
    rows = [(1.0, 1.0, 1.0, 1.0, 1.0, 9.0), (2.0, 2.0, 2.0, 2.0, 2.0, 0.0), (3.0, 3.0, 3.0, 3.0, 3.0, 0.5)]
    found = medians([Resize(gpus_before=1, gpus_after=2, phases_s=row) for row in rows])
    assert found == {**dict.fromkeys(PHASES[:-1], 2.0), "first_step": 0.5, "total": 14.0}

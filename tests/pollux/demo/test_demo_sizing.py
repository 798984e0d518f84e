"""Epochs from a few seconds of timing: by hand for simple cases, and the two directions agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.demo.jobs import demo_plan, size_jobs
from pollux.demo.sizing import (
    GAIN_PER_DOUBLING,
    Growth,
    Timing,
    epochs_for,
    progress_alone,
    seconds_alone,
    speed_seen,
    stepping_seconds,
    timing_from,
)
from pollux.errors import ConfigError
from pollux_agent.protocol import Event

MINUTELY = Growth(interval_s=60.0, max_slots=4)


def test_progress_on_one_slot_is_speed_times_time() -> None:
    timing = Timing(progress_per_s=10.0, epoch_progress=45.0, start_s=5.0)
    assert progress_alone(timing, MINUTELY, 25.0) == pytest.approx(10.0 * 20.0)


def test_progress_over_two_doublings_by_hand() -> None:
    """55 s at 1, 55 s at g and 75 s at g squared, for each of the three starts takes 5 s."""
    timing = Timing(progress_per_s=2.0, epoch_progress=1.0, start_s=5.0)
    gain = GAIN_PER_DOUBLING
    assert progress_alone(timing, MINUTELY, 200.0) == pytest.approx(2 * (55 + 55 * gain + 75 * gain**2))


def test_growth_stops_at_the_limit() -> None:
    assert Growth(interval_s=60.0, max_slots=1).speeds() == (1.0,)
    assert len(Growth(interval_s=60.0, max_slots=5).speeds()) == 3


def test_at_least_one_epoch_on_a_slow_machine() -> None:
    timing = Timing(progress_per_s=0.001, epoch_progress=1000.0, start_s=5.0)
    assert epochs_for(timing, MINUTELY, 220.0) == 1


speeds = st.floats(min_value=0.5, max_value=2000.0)


@settings(deadline=None, max_examples=100)
@given(
    speed=speeds, start_s=st.floats(0.5, 15.0), seconds=st.floats(30.0, 600.0), part=st.floats(0.001, 0.02)
)
def test_whatever_the_speed_the_chosen_epochs_last_about_the_wanted_time(
    speed: float, start_s: float, seconds: float, part: float
) -> None:
    """``part`` is an epoch as a part of the whole, so rounding errs by half of it or a restart."""
    whole = progress_alone(
        Timing(progress_per_s=speed, epoch_progress=1.0, start_s=start_s), MINUTELY, seconds
    )
    timing = Timing(progress_per_s=speed, epoch_progress=whole * part, start_s=start_s)
    lasts = seconds_alone(timing, MINUTELY, epochs_for(timing, MINUTELY, seconds))
    assert abs(lasts - seconds) <= start_s + part * seconds * 2


@pytest.mark.parametrize(
    ("progress", "want"), [(55.0, 1.0), (165.0, 3.0), (27.5, 0.5), (0.0, 1.0), (1e6, 4.0), (1e-6, 0.25)]
)
def test_a_machine_is_as_fast_as_its_progress_shows_within_bounds(progress: float, want: float) -> None:
    """One step a second for 55 of the 60 seconds, the others spent on the start."""
    timing = Timing(progress_per_s=1.0, epoch_progress=10.0, start_s=5.0)
    assert speed_seen(timing, MINUTELY, progress=progress, seconds=60.0) == pytest.approx(want)


def test_jobs_of_a_faster_machine_have_more_epochs_and_last_as_long() -> None:
    plan, timing = demo_plan(), Timing(progress_per_s=5.0, epoch_progress=9.0, start_s=4.0)
    timings = {job.script: timing for job in plan.jobs}
    timed, seen = size_jobs(plan, timings), size_jobs(plan, timings, faster=3.0)
    for name, size in timed.items():
        assert seen[name].epochs == pytest.approx(3 * size.epochs, abs=3)
        assert seen[name].alone_s == pytest.approx(size.alone_s, rel=0.05)


def event(t: float, name: str, progress: float) -> Event:
    return Event(t_unix_s=t, event=name, node="n", slots=(0,), step=0, progress=progress, batch_size=8)


def test_timing_is_read_from_a_complete_training() -> None:
    """Steps from second 4 to 10, so the speed is that from second 6 on: 20 in 4 s, over 2 epochs of 13."""
    events = [event(0, "start", 0), event(4, "step", 1), event(5, "step", 2), event(6, "step", 6)]
    events += [event(9, "step", 20), event(10, "checkpoint", 26), event(10, "done", 26)]
    timing = timing_from(events, epochs=2)
    assert timing.progress_per_s == pytest.approx(20 / 4)
    assert (timing.epoch_progress, timing.start_s) == (pytest.approx(13), pytest.approx(4))
    assert stepping_seconds(events) == pytest.approx(6)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [event(0, "start", 0), event(4, "step", 1)],
        [event(0, "start", 0), event(4, "done", 1)],
        [event(4, "step", 1), event(4, "done", 1)],
    ],
    ids=["nothing", "not done", "no step", "no time passed"],
)
def test_what_shows_no_speed_is_refused(events: list[Event]) -> None:
    with pytest.raises(ValueError, match=r"too few|not complete"):
        timing_from(events, epochs=1)
    assert stepping_seconds(events) == 0


def test_a_job_lasts_as_planned_but_never_trains_less_than_its_target_needs() -> None:
    plan = demo_plan()
    scripts = {job.script for job in plan.jobs}
    fast = dict.fromkeys(scripts, Timing(progress_per_s=50.0, epoch_progress=45.0, start_s=8.0))
    slow = dict.fromkeys(scripts, Timing(progress_per_s=0.1, epoch_progress=45.0, start_s=8.0))
    for job in plan.jobs:
        size = size_jobs(plan, fast)[job.name]
        assert size.alone_s == pytest.approx(job.length * plan.seconds_alone, abs=2.0)
        assert 180 <= size.alone_s <= 300
        assert size.target_progress == size.epochs * 45.0
        assert size_jobs(plan, slow)[job.name].epochs == job.min_epochs


def test_one_job_of_the_demo_can_train_alone() -> None:
    plan = demo_plan()
    assert [job.name for job in plan.only("language-model").jobs] == ["language-model"]
    with pytest.raises(ConfigError, match="--only: no job is named 'lm'; digits or language-model"):
        plan.only("lm")

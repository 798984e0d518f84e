"""A job that is stopped, killed or resized goes on where it was."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from elastic_runs import DriverRun

from pollux_agent.protocol import JobSpec, Outcome, decode, encode
from pollux_agent.torch.checkpoint import CheckpointStore

ONE_PASS = Counter(range(64))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DriverRun]:
    made = DriverRun(tmp_path)
    yield made
    made.end_all()


def test_a_job_left_alone_ends_done_with_its_marker(run: DriverRun) -> None:
    run.run(0)
    outcome = run.outcome(0)
    assert (outcome.kind, outcome.step, outcome.steps_taken) == ("done", 48, 48)
    assert outcome.progress == pytest.approx(48)
    assert decode(Outcome, run.folder.complete.read_bytes()) == outcome
    events = [event.event for event in run.events(0)]
    assert events[:2] == ["start", "step"]
    assert events[-2:] == ["checkpoint", "done"]
    assert {event.slots for event in run.events(0)} == {(1,)}
    for number in range(3):
        assert Counter(index for epoch, index in run.samples_seen() if epoch == number) == ONE_PASS


@pytest.mark.parametrize(
    ("workers", "group"),
    [
        pytest.param("0", False, id="one process"),
        pytest.param("2", True, id="loader processes that get the signal too"),
    ],
)
def test_sigterm_checkpoints_at_a_step_boundary_and_the_next_incarnation_goes_on(
    run: DriverRun, workers: str, group: bool
) -> None:
    run.terminate(run.start(0, "--workers", workers, "--wait-at", "21"), group=group)
    stopped = run.outcome(0)
    assert stopped.kind == "interrupted"
    assert 21 <= stopped.step < 48
    assert [event.event for event in run.events(0)][-2:] == ["checkpoint", "stop"]
    assert not run.folder.complete.exists()
    assert len(run.samples_seen()) == 4 * stopped.step

    run.run(1, "--workers", workers, signal_unix_s=stopped.time_unix_s)
    assert [event.event for event in run.events(1)][:3] == ["start", "resume", "step"]
    resumed = next(event for event in run.events(1) if event.event == "resume")
    assert (resumed.step, resumed.progress) == (stopped.step, stopped.progress)
    assert (run.outcome(1).kind, run.outcome(1).step) == ("done", 48)
    assert run.outcome(1).steps_taken == 48 - stopped.step
    for number in range(3):
        assert Counter(index for epoch, index in run.samples_seen() if epoch == number) == ONE_PASS


def test_sigterm_before_the_loop_stops_at_the_first_boundary(run: DriverRun) -> None:
    process = run.start(0, "--wait-at", "1")
    run.terminate(process)
    assert run.outcome(0).kind == "interrupted"
    assert run.outcome(0).step >= 1


def test_a_killed_job_resumes_from_its_last_checkpoint(run: DriverRun) -> None:
    run.terminate(run.start(0, "--wait-at", "5"))
    process = run.start(1, "--wait-at", "3")
    run.wait_ready(process)
    process.kill()
    process.join()
    assert not run.folder.outcome(1, 0).exists()
    run.run(2)
    resumed = next(event for event in run.events(2) if event.event == "resume")
    assert resumed.step == run.outcome(0).step
    assert run.outcome(2).step == 48


def test_a_torn_newest_checkpoint_costs_only_the_steps_since_the_one_before(run: DriverRun) -> None:
    run.terminate(run.start(0, "--wait-at", "5"))
    run.terminate(run.start(1, "--wait-at", "5"))
    newest = run.folder.checkpoints / CheckpointStore(run.folder.checkpoints).names()[0]
    (newest / "state.pt").write_bytes((newest / "state.pt").read_bytes()[:100])
    run.run(2)
    resumed = next(event for event in run.events(2) if event.event == "resume")
    assert resumed.step == run.outcome(0).step
    assert run.outcome(2).kind == "done"


def test_a_done_job_whose_spec_asks_for_more_epochs_goes_on_from_its_end(run: DriverRun) -> None:
    run.run(0)
    spec = decode(JobSpec, run.folder.spec.read_bytes())
    run.folder.spec.write_text(encode(replace(spec, epochs=5)))
    run.folder.complete.unlink()
    run.run(1)
    resumed = next(event for event in run.events(1) if event.event == "resume")
    assert (resumed.step, run.outcome(1).step, run.outcome(1).kind) == (48, 80, "done")

"""The driver over workers that only say whether they live: what it does, and what it makes of their end."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.driver import FINAL_PHASES, Driver, DriverState, Start, Timing
from pollux_agent.protocol import (
    Allocation,
    DriverEvent,
    Event,
    JobFolder,
    Outcome,
    Placement,
    Unsaved,
    decode,
    encode,
)
from pollux_agent.records import append_line, write_atomic, write_completion, write_outcome

TIMING = Timing(grace_s=30, abrupt_grace_s=2, broken_wait_s=2, broken_grace_s=5, backoff_s=1, max_backoff_s=8)


@dataclass
class Gang:
    """Workers whose life the test decides; ``done`` keeps what was asked of them, in order."""

    done: list[object] = field(default_factory=list)
    nodes: dict[str, bool] | None = None
    why_blocked: str = ""

    def blocked(self, placement: Placement) -> str:
        return self.why_blocked

    def start(self, start: Start) -> None:
        assert self.nodes is None, "a gang was started on top of another"
        self.done.append(start)
        self.nodes = dict.fromkeys(start.placement, True)

    def signal(self) -> None:
        self.done.append("signal")

    def kill(self) -> None:
        self.done.append("kill")

    def alive(self) -> Mapping[str, bool] | None:
        return self.nodes

    def release(self) -> None:
        self.nodes = None

    def die(self) -> None:
        assert self.nodes is not None
        self.nodes = dict.fromkeys(self.nodes, False)


@dataclass
class World:
    """One job, its driver, and a clock that the test turns."""

    root: Path
    gang: Gang = field(default_factory=Gang)
    now_unix_s: float = 1000.0
    allocation: Allocation = field(default_factory=lambda: Allocation(decision=0))
    stop: str | None = None
    saved: list[DriverState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = JobFolder(self.root)
        self.driver = self.new_driver(DriverState())

    def new_driver(self, state: DriverState) -> Driver:
        return Driver(
            folder=self.folder, workers=self.gang, state=state, save=self.saved.append, timing=TIMING
        )

    @property
    def state(self) -> DriverState:
        return self.driver.state

    def tick(self, after_s: float = 0.2) -> DriverState:
        self.now_unix_s += after_s
        return self.driver.tick(now_unix_s=self.now_unix_s, allocation=self.allocation, stop=self.stop)

    def give(self, **placement: int) -> DriverState:
        self.allocation = Allocation(decision=self.allocation.decision + 1, placement=placement)
        return self.tick()

    def step(self, step: int) -> None:
        event = Event(
            t_unix_s=self.now_unix_s,
            event="step",
            node="a",
            slots=(0,),
            step=step,
            progress=float(step),
            batch_size=8,
        )
        append_line(self.folder.events(self.state.incarnation, 0), event)

    def outcome(
        self, kind: str, *, rank: int = 0, step: int = 0, steps_taken: int = 0, error: str = ""
    ) -> None:
        write_outcome(
            self.folder,
            Outcome(
                kind=kind,
                job_id="job",
                incarnation=self.state.incarnation,
                rank=rank,
                time_unix_s=self.now_unix_s,
                step=step,
                steps_taken=steps_taken,
                error=error,
            ),
        )

    def lines(self) -> list[str]:
        return self.folder.driver_events.read_text().splitlines()

    def events(self) -> list[str]:
        return [decode(DriverEvent, line).event for line in self.lines()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_job_waits_until_it_is_given_gpus_and_runs_after_its_first_step(world: World) -> None:
    assert world.tick().phase == "waiting"
    assert world.give(a=2, b=1).phase == "starting"
    assert world.gang.done == [Start(incarnation=1, placement={"a": 2, "b": 1}, signal_unix_s=None)]
    assert world.tick().max_gpus_seen == 0
    world.step(1)
    assert world.tick().phase == "running"
    assert world.state.max_gpus_seen == 3


def test_a_start_waits_until_its_slots_are_free_and_says_for_what(world: World) -> None:
    world.gang.why_blocked = "a has 0 of 1 slots free"
    assert world.give(a=1).phase == "waiting"
    assert "a has 0 of 1 slots free" in world.state.message
    assert world.state.acted_decision == 1
    world.gang.why_blocked = ""
    assert world.tick().phase == "starting"


def test_workers_that_take_no_step_are_told_of(world: World) -> None:
    """A script that hangs keeps its GPUs; a person can see it."""
    world.give(a=2)
    assert world.tick(after_s=5 * 60).message == "workers are starting on a x 2; no step for 4 minutes"
    world.step(1)
    events = JobFolder(world.root).events(1, 0)
    os.utime(events, (world.now_unix_s, world.now_unix_s))
    assert world.tick().message == "trains on a x 2"
    assert world.tick(after_s=3 * 60).message == "trains on a x 2"
    assert world.tick(after_s=5 * 60).message == "trains on a x 2; no step for 8 minutes"
    assert world.tick(after_s=6 * 60).message == "trains on a x 2; no step for 8 minutes"
    os.utime(events, (world.now_unix_s, world.now_unix_s))
    assert world.tick().message == "trains on a x 2"
    assert world.gang.done[1:] == [], "it may be slow: nothing is done"


def test_a_resize_signals_waits_and_starts_the_next_incarnation(world: World) -> None:
    world.give(a=1)
    world.step(3)
    world.tick()
    assert world.give(a=2).phase == "stopping"
    signalled_unix_s = world.now_unix_s
    world.tick(after_s=5)
    assert world.gang.done[1:] == ["signal"]
    world.outcome("interrupted", step=4, steps_taken=4)
    world.gang.die()
    assert world.tick().phase == "starting"
    start = world.gang.done[-1]
    assert isinstance(start, Start)
    assert (start.incarnation, start.placement) == (2, {"a": 2})
    assert start.signal_unix_s == pytest.approx(signalled_unix_s)
    assert world.events() == ["allocate", "start", "allocate", "signal", "exit", "start"]


def test_waiting_for_gpus_does_not_count_as_restarting(world: World) -> None:
    world.give(a=1)
    world.step(1)
    world.tick()
    world.give()
    world.tick(after_s=4)
    world.gang.die()
    assert world.tick(after_s=0).phase == "waiting"
    world.tick(after_s=600)
    world.give(a=1)
    start = world.gang.done[-1]
    assert isinstance(start, Start)
    assert start.signal_unix_s == pytest.approx(world.now_unix_s - 4)


def test_the_same_placement_of_a_newer_decision_restarts_nothing(world: World) -> None:
    world.give(a=1)
    world.give(a=1)
    assert world.state.acted_decision == 2
    assert len(world.gang.done) == 1


def test_workers_that_outstay_the_grace_are_killed_once(world: World) -> None:
    world.give(a=1)
    world.give()
    world.tick(after_s=29)
    assert world.gang.done[1:] == ["signal"]
    world.tick(after_s=2)
    world.tick(after_s=2)
    assert world.gang.done[1:] == ["signal", "kill"]


def test_a_clock_that_is_set_back_makes_a_driver_no_more_patient(world: World) -> None:
    world.give(a=2)
    world.step(1)
    world.tick()
    world.give(b=1)
    world.tick(after_s=-7200)
    assert world.gang.done[1:] == ["signal"], "they have their grace"
    world.tick(after_s=TIMING.grace_s)
    assert world.gang.done[1:] == ["signal", "kill"]
    world.gang.die()
    world.tick()
    world.gang.die()
    assert world.tick().phase == "waiting", "a fruitless start"
    assert world.tick(after_s=-7200).phase == "starting"
    world.gang.nodes = {"b": True, "c": False}
    world.tick()
    world.tick(after_s=-7200)
    assert world.tick(after_s=TIMING.broken_wait_s).phase == "stopping"


def test_the_newest_allocation_counts_when_workers_are_gone(world: World) -> None:
    world.give(a=1)
    world.give(a=2)
    world.give(b=1)
    world.gang.die()
    world.tick()
    start = world.gang.done[-1]
    assert isinstance(start, Start)
    assert start.placement == {"b": 1}


def test_done_needs_the_completion_marker(world: World) -> None:
    world.give(a=1)
    world.outcome("done", step=9, steps_taken=9)
    world.gang.die()
    assert world.tick().phase == "waiting"
    world.tick(after_s=60)
    marker = Outcome(kind="done", job_id="job", incarnation=2, rank=0, time_unix_s=0, step=9)
    write_completion(world.folder, marker)
    world.gang.die()
    assert world.tick().phase == "done"
    assert (world.state.placement, world.state.outcome) == ({}, marker)


def test_a_complete_job_is_not_moved_while_its_script_comes_to_its_end(world: World) -> None:
    world.give(a=2)
    world.step(9)
    world.tick()
    write_completion(
        world.folder, Outcome(kind="done", job_id="job", incarnation=1, rank=0, time_unix_s=0, step=9)
    )
    world.give(a=1)
    assert (world.state.phase, len(world.gang.done)) == ("running", 1)
    world.gang.die()
    assert world.tick().phase == "done"


@pytest.mark.parametrize("text", ["", "{}", "done"])
def test_what_is_no_completion_marker_completes_nothing(world: World, text: str) -> None:
    world.give(a=1)
    world.folder.complete.write_text(text)
    world.gang.die()
    assert world.tick().phase == "waiting"


def test_a_gang_that_dies_without_a_word_restarts_on_the_same_placement(world: World) -> None:
    world.give(a=1)
    world.step(7)
    world.tick()
    world.gang.die()
    assert world.tick().phase == "waiting"
    assert world.tick(after_s=2).phase == "starting"
    assert world.gang.done[-1].placement == {"a": 1}
    assert world.gang.done[-1].incarnation == 2


@pytest.mark.parametrize(
    ("steps_taken", "final"),
    [pytest.param(0, True, id="before the first step"), pytest.param(5, False, id="in mid-training")],
)
def test_a_failure_is_final_before_the_first_step(world: World, steps_taken: int, final: bool) -> None:
    world.give(a=2)
    world.outcome("failed", rank=1, step=5, steps_taken=steps_taken, error="ValueError: first")
    world.now_unix_s += 0.1
    world.outcome("failed", rank=0, step=5, steps_taken=steps_taken, error="RuntimeError: second")
    world.gang.die()
    assert (world.tick().phase, world.state.final) == ("failed", final)
    assert world.state.outcome is not None
    assert world.state.outcome.error == "ValueError: first"


def test_a_resumed_job_that_cannot_start_has_one_more_try(world: World) -> None:
    """What the data server or a full GPU does to a restart is no fault of a script that has trained."""
    world.give(a=1)
    world.step(7)
    world.tick()
    world.gang.die()
    world.tick()
    finals = []
    for _ in range(2):
        world.tick(after_s=20)
        world.outcome("failed", error="OSError: the data server is away")
        world.gang.die()
        finals.append(world.tick().final)
        world.driver = world.new_driver(replace(world.state, phase="waiting", final=False, outcome=None))
    assert finals == [False, True]


@pytest.mark.parametrize(
    ("error", "step", "final"),
    [
        pytest.param("ValueError: x", 5, True, id="the same again"),
        pytest.param("ValueError: x", 6, False, id="the same error at another step"),
        pytest.param("ValueError: y", 5, False, id="another error"),
    ],
)
def test_the_same_error_at_the_same_step_again_is_final(
    world: World, error: str, step: int, final: bool
) -> None:
    world.give(a=1)
    world.outcome("failed", step=5, steps_taken=5, error="ValueError: x")
    world.gang.die()
    first = world.tick()
    world.driver = world.new_driver(
        DriverState(phase="waiting", incarnation=first.incarnation, failure=first.failure, acted_decision=1)
    )
    world.give(a=1)
    world.outcome("failed", step=step, steps_taken=3, error=error)
    world.gang.die()
    assert (world.tick().phase, world.state.final) == ("failed", final)


def test_what_fails_after_the_signal_is_taken_for_a_consequence_of_it(world: World) -> None:
    world.give(a=1)
    world.step(3)
    world.tick()
    world.give(a=2)
    world.now_unix_s += 1
    world.outcome("failed", step=3, steps_taken=3, error="RuntimeError: a data loader was killed")
    world.gang.die()
    assert world.tick().phase == "starting"


def test_fruitless_starts_back_off_and_end_the_job_with_the_last_lines(world: World) -> None:
    world.give(a=1)
    waits_s = []
    while world.state.phase not in FINAL_PHASES:
        world.folder.log(world.state.incarnation, "a").parent.mkdir(exist_ok=True)
        world.folder.log(world.state.incarnation, "a").write_text("no space left on device\n")
        world.gang.die()
        world.tick()
        waits_s.append(world.state.retry_unix_s - world.now_unix_s)
        world.tick(after_s=20)
    assert world.state.incarnation == 5
    assert waits_s[:4] == pytest.approx([2, 4, 8, 8])
    assert (world.state.phase, world.state.final) == ("failed", True)
    assert world.state.outcome is not None
    assert "no space left on device" in world.state.outcome.traceback


def test_workers_that_the_cluster_takes_away_start_again_without_end(world: World) -> None:
    @dataclass
    class Taken(Gang):
        def taken(self) -> bool:
            return True

    world.gang = Taken()
    world.driver = world.new_driver(DriverState())
    world.give(a=1)
    for _ in range(3 * TIMING.max_fruitless_starts):
        world.gang.die()
        world.tick()
        assert (world.state.phase, world.state.fruitless_starts) == ("waiting", 0)
        world.tick(TIMING.max_backoff_s)
    assert world.state.phase == "starting"


def test_progress_forgives_earlier_fruitless_starts(world: World) -> None:
    world.give(a=1)
    for step in range(1, 12):
        if step % 3 == 0:
            world.step(step)
        world.gang.die()
        world.tick()
        world.tick(after_s=20)
    assert world.state.phase == "starting"
    assert world.state.incarnation == 12


def test_what_is_left_of_a_broken_gang_is_stopped_soon(world: World) -> None:
    world.give(a=1, b=1)
    world.step(2)
    world.tick()
    assert world.gang.nodes is not None
    world.gang.nodes["b"] = False
    broke_unix_s = world.now_unix_s + 0.2
    world.tick()
    assert len(world.gang.done) == 1
    assert world.tick(after_s=2).phase == "stopping"
    world.tick(after_s=5.1)
    assert world.gang.done[1:] == ["signal", "kill"]
    world.gang.die()
    world.tick()
    world.tick(after_s=5)
    assert world.gang.done[-1].incarnation == 2
    assert world.gang.done[-1].signal_unix_s < broke_unix_s + 13


@pytest.mark.parametrize(
    ("reason", "kill_after_s"),
    [("failed", 2), ("orphan", 2), ("success", 30), ("clear", 30)],
)
def test_a_request_to_stop_ends_the_job_with_as_much_patience_as_it_calls_for(
    world: World, reason: str, kill_after_s: float
) -> None:
    world.give(a=1)
    world.stop = reason
    assert world.tick().phase == "stopping"
    world.tick(after_s=kill_after_s - 0.5)
    assert world.gang.done[1:] == ["signal"]
    world.tick(after_s=1)
    assert world.gang.done[1:] == ["signal", "kill"]
    world.gang.die()
    assert world.tick().phase == "ended"
    assert world.events()[-1] == "end"


def test_an_abrupt_stop_overtakes_a_resize_under_way(world: World) -> None:
    world.give(a=1)
    world.give(a=2)
    world.stop = "failed"
    world.tick()
    world.tick(after_s=2.1)
    assert world.gang.done[1:] == ["signal", "kill"]


def test_a_waiting_job_ends_at_once(world: World) -> None:
    world.stop = "clear"
    assert world.tick().phase == "ended"


def test_a_new_driver_restarts_what_a_dead_one_ran_without_blaming_the_job(world: World) -> None:
    world.give(a=1)
    world.step(4)
    world.tick()
    world.gang.nodes = None
    world.driver = world.new_driver(world.saved[-1])
    assert world.tick(after_s=3600).phase == "starting"
    assert world.gang.done[-1].incarnation == 2
    assert world.state.fruitless_starts == 0
    assert world.state.attained_gpu_s < 20


@pytest.mark.parametrize("jump_s", [7_200, -7_200])
def test_a_clock_that_jumps_counts_for_a_few_minutes_of_gpu_time_at_most(world: World, jump_s: int) -> None:
    world.give(a=2)
    world.step(1)
    before = world.state.attained_gpu_s
    world.tick(after_s=jump_s)
    assert before <= world.state.attained_gpu_s <= before + 2 * 300


def test_a_start_is_saved_before_it_is_made(world: World) -> None:
    order: list[int] = []
    world.driver = Driver(
        folder=world.folder,
        workers=world.gang,
        state=DriverState(),
        save=lambda state: order.append(len(world.gang.done)) if state.phase == "starting" else None,
        timing=TIMING,
    )
    world.give(a=1)
    assert (order, len(world.gang.done)) == ([0], 1)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["tick", "give", "none", "die", "one", "step", "fail", "interrupt", "restart", "stop"]
        ),
        st.integers(1, 3),
        st.sampled_from([0.1, 1.0, 6.0, 40.0]),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(acts=ACTS)
def test_whatever_happens_there_is_one_gang_with_a_new_number_signalled_once(
    acts: list[tuple[str, int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(tmp_path_factory.mktemp("job"))
    for act, number, after_s in acts:
        before = world.state
        if act == "give":
            world.give(a=number)
        elif act == "none":
            world.give()
        elif act == "stop":
            world.stop = "clear"
        elif world.gang.nodes is not None and act == "die":
            world.gang.die()
        elif world.gang.nodes is not None and act == "one":
            world.gang.nodes["b"] = False
        elif world.gang.nodes is not None and act == "step":
            world.step(number)
        elif world.gang.nodes is not None and act in ("fail", "interrupt"):
            kind = "failed" if act == "fail" else "interrupted"
            world.outcome(kind, rank=number, step=number, steps_taken=number, error="E")
        elif act == "restart":
            world.gang.nodes = None
            world.driver = world.new_driver(before)
        world.tick(after_s)
        assert world.state.acted_decision == world.allocation.decision or before.phase in FINAL_PHASES
        if before.phase in FINAL_PHASES:
            assert world.state == before
        if world.state.phase in {"waiting", *FINAL_PHASES}:
            assert world.gang.nodes is None
            assert world.state.placement == {}
    starts = [done for done in world.gang.done if isinstance(done, Start)]
    assert [start.incarnation for start in starts] == list(range(1, len(starts) + 1))
    for first, second in zip(world.gang.done, world.gang.done[1:], strict=False):
        assert (first, second) != ("signal", "signal")


def cannot_save(world: World, message: str, incarnation: int) -> None:
    word = Unsaved(incarnation=incarnation, time_unix_s=world.now_unix_s, message=message)
    write_atomic(world.folder.unsaved, encode(word).encode())


def test_that_checkpoints_cannot_be_written_is_said_for_as_long_as_it_is_so(world: World) -> None:
    world.give(a=1)
    world.step(1)
    assert world.tick().message == "trains on a x 1"
    cannot_save(world, "step 9 is not saved: the disk is full", incarnation=1)
    assert world.tick().message == "trains on a x 1, but step 9 is not saved: the disk is full"
    saved = len(world.saved)
    world.tick()
    assert len(world.saved) == saved, "an unchanged message was stored again"
    world.folder.unsaved.unlink()
    assert world.tick().message == "trains on a x 1"


def test_what_an_earlier_incarnation_could_not_save_is_its_own_matter(world: World) -> None:
    cannot_save(world, "the disk is full", incarnation=0)
    world.give(a=1)
    world.step(1)
    assert world.tick().message == "trains on a x 1"


@pytest.mark.parametrize(
    ("stop", "want"),
    [
        pytest.param(None, "1 interrupted, but step 9 is not saved", id="resize"),
        pytest.param("success", "ended on request (success), but step 9 is not saved", id="by a person"),
    ],
)
def test_a_stop_without_a_checkpoint_says_so(world: World, stop: str | None, want: str) -> None:
    world.give(a=1)
    world.step(1)
    world.tick()
    if stop is None:
        world.give()
    world.stop = stop
    world.tick()
    world.outcome("interrupted", step=9, steps_taken=9, error="step 9 is not saved")
    world.gang.die()
    world.allocation = replace(world.allocation, placement={})
    state = world.tick()
    assert want in (state.message, *(decode(DriverEvent, line).message for line in world.lines()))

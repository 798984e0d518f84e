"""The driver's state machine: one pure function from what is known and seen to what is to be done.

::

    waiting --start--> starting --first step--> running
       ^                   |                       |
       |                   +----signal/broken------+--> stopping
       +---- interrupted: same or new allocation ------------|
                                done, failed, ended <--------+  (final)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pollux_agent.driver.state import DriverState, Phase, StopReason
from pollux_agent.protocol import Allocation, DriverEvent, Outcome, Placement
from pollux_agent.protocol.event import DriverEventName

FINAL_PHASES: frozenset[Phase] = frozenset({"done", "failed", "ended"})
_IDLE = "; no step for "
_IDLE_MINUTES = 4
_MAX_WORDS = 300
ABRUPT: frozenset[StopReason] = frozenset({"failed", "orphan"})
"""Reasons to stop that leave no time for a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How patient a driver is.

    ``grace_s``: from SIGTERM to SIGKILL; ``abrupt_grace_s``: the same for an abrupt stop; ``broken_wait_s``:
    for an incomplete gang to end by itself, then ``broken_grace_s`` to SIGKILL; ``backoff_s`` doubles with
    each fruitless start up to ``max_backoff_s``; after ``max_fruitless_starts`` the job has failed.
    ``count_every_s`` is how often the GPU seconds are written down, which a killed driver loses otherwise.
    A clock that is set back makes nothing wait longer than that.
    """

    grace_s: float = 30.0
    abrupt_grace_s: float = 2.0
    broken_wait_s: float = 2.0
    broken_grace_s: float = 5.0
    backoff_s: float = 0.5
    max_backoff_s: float = 10.0
    max_fruitless_starts: int = 5
    count_every_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is so at ``now_unix_s``.

    ``gang`` says for each node whether its processes live, None without a gang. ``blocked`` says why the
    wanted placement cannot start yet, empty if it can. ``complete`` is the completion marker, if it was
    written. ``outcomes`` are those of the present incarnation, ``step`` the highest step it reached, None
    before its first; ``unsaved`` says why checkpoints cannot be written, ``log_tail`` the last lines it
    printed. ``taken``: the cluster took workers away (evicted, out of devices, a node lost), so that an end
    without progress says nothing about the script. ``idle_s`` has passed since rank 0 last left word of a
    step, or of anything else.
    """

    now_unix_s: float
    allocation: Allocation
    stop: StopReason | None = None
    gang: Mapping[str, bool] | None = None
    blocked: str = ""
    complete: Outcome | None = None
    outcomes: tuple[Outcome, ...] = ()
    step: int | None = None
    unsaved: str = ""
    log_tail: str = ""
    taken: bool = False
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the workers of an incarnation; ``signal_unix_s`` is for the measurement of the restart."""

    incarnation: int
    placement: Placement
    signal_unix_s: float | None


@dataclass(frozen=True, slots=True)
class Signal:
    """Ask all workers to checkpoint and end."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End all workers now."""


Action = Start | Signal | Kill


@dataclass(frozen=True, slots=True)
class Turn:
    """The answer: the new state, what to do, and what to write down."""

    state: DriverState
    actions: tuple[Action, ...] = ()
    events: tuple[DriverEvent, ...] = ()


def turn(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    """One turn of the driver."""
    if state.phase in FINAL_PHASES:
        return Turn(state)
    accepted: tuple[DriverEvent, ...] = ()
    if seen.allocation.decision > state.acted_decision:
        state = replace(state, acted_decision=seen.allocation.decision)
        accepted = (_event(state, seen, "allocate", seen.allocation.placement, seen.allocation.reason),)
    if state.phase == "waiting":
        answer = _waiting(state, seen, timing)
    elif seen.gang is None or not any(seen.gang.values()):
        answer = _gone(state, seen, timing)
    elif state.phase == "stopping":
        answer = _stopping(state, seen, timing)
    else:
        answer = _working(state, seen, timing)
    return replace(answer, events=accepted + answer.events)


def _waiting(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    wanted = dict(seen.allocation.placement)
    if seen.complete is not None:
        return _end(state, seen, "done", "training is complete", outcome=seen.complete)
    if seen.stop is not None:
        return _end(state, seen, "ended", f"ended while it held no GPUs ({seen.stop})")
    if not wanted:
        return Turn(_say(state, seen, "waits for GPUs"))
    if seen.now_unix_s < state.retry_unix_s <= seen.now_unix_s + timing.max_backoff_s:
        return Turn(_say(state, seen, f"starts again on {_words(wanted)} in a moment"))
    if seen.blocked:
        return Turn(_say(state, seen, f"waits for its GPUs: {seen.blocked}"))
    signal = None if state.downtime_s is None else seen.now_unix_s - state.downtime_s
    state = replace(
        state,
        incarnation=state.incarnation + 1,
        placement=wanted,
        counted_unix_s=seen.now_unix_s,
        signal_unix_s=None,
        downtime_s=None,
        broken_unix_s=None,
        kill_unix_s=None,
        killed=False,
    )
    state = _enter(state, seen, "starting", f"workers are starting on {_words(wanted)}")
    start = Start(incarnation=state.incarnation, placement=wanted, signal_unix_s=signal)
    return Turn(state, (start,), (_event(state, seen, "start", wanted),))


def _working(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    wanted = dict(seen.allocation.placement)
    if seen.stop is not None:
        grace_s = timing.abrupt_grace_s if seen.stop in ABRUPT else timing.grace_s
        return _signal(state, seen, grace_s, f"stops on request ({seen.stop})")
    if wanted != dict(state.placement) and seen.complete is None:
        to = f"moves to {_words(wanted)}" if wanted else "gives its GPUs back"
        return _signal(state, seen, timing.grace_s, f"{to}: checkpoints first")
    if not all(seen.gang.values() if seen.gang else ()) or _failure(state, seen) is not None:
        return _broken(state, seen, timing)
    if state.phase == "starting" and seen.step is not None:
        state = replace(state, max_gpus_seen=max(state.max_gpus_seen, state.num_gpus))
        return Turn(_enter(state, seen, "running", _trains(state, seen)))
    if state.counted_unix_s is not None and seen.now_unix_s >= state.counted_unix_s + timing.count_every_s:
        counted = state.attained(seen.now_unix_s)
        state = replace(state, attained_gpu_s=counted, counted_unix_s=seen.now_unix_s)
    said = _trains(state, seen) if state.phase == "running" else state.message.partition(_IDLE)[0]
    return Turn(_say(state, seen, said + _idle(seen)))


def _idle(seen: Seen) -> str:
    """Words for workers that do nothing: they may hang, or be slow. Said anew when the time has doubled."""
    minutes = int(seen.idle_s // 60)
    return f"{_IDLE}{1 << (minutes.bit_length() - 1)} minutes" if minutes >= _IDLE_MINUTES else ""


def _broken(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    """Some workers are gone or failed: what is left ends by itself, or is made to."""
    since = seen.now_unix_s if state.broken_unix_s is None else min(state.broken_unix_s, seen.now_unix_s)
    state = replace(state, broken_unix_s=since)
    if seen.now_unix_s < since + (timing.grace_s if seen.complete is not None else timing.broken_wait_s):
        return Turn(state)
    answer = _signal(state, seen, timing.broken_grace_s, "some workers are gone: stops the others")
    return replace(answer, state=replace(answer.state, signal_unix_s=since))


def _signal(state: DriverState, seen: Seen, grace_s: float, message: str) -> Turn:
    state = replace(state, signal_unix_s=seen.now_unix_s, kill_unix_s=seen.now_unix_s + grace_s)
    state = _enter(state, seen, "stopping", message)
    return Turn(state, (Signal(),), (_event(state, seen, "signal", state.placement, message),))


def _stopping(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    kill_unix_s = state.kill_unix_s if state.kill_unix_s is not None else seen.now_unix_s
    kill_unix_s = min(kill_unix_s, seen.now_unix_s + timing.grace_s)
    if seen.stop in ABRUPT:
        kill_unix_s = min(kill_unix_s, seen.now_unix_s + timing.abrupt_grace_s)
    state = replace(state, kill_unix_s=kill_unix_s)
    if seen.now_unix_s < kill_unix_s or state.killed:
        return Turn(state)
    return Turn(
        _say(replace(state, killed=True), seen, "workers did not end in time and were killed"), (Kill(),)
    )


def _gone(state: DriverState, seen: Seen, timing: Timing) -> Turn:
    """All workers are gone: what does it mean?"""
    exit_event = _event(state, seen, "exit", state.placement, f"{_how(seen)}{_but(seen)}")
    asked = (state.signal_unix_s is not None and state.broken_unix_s is None) or seen.gang is None
    failure = _failure(state, seen)
    begin = next((t for t in (state.signal_unix_s, state.broken_unix_s) if t is not None), seen.now_unix_s)
    progressed = seen.step is not None and seen.step > state.best_step
    state = replace(
        state,
        attained_gpu_s=state.attained_gpu_s if seen.gang is None else state.attained(seen.now_unix_s),
        placement={},
        counted_unix_s=None,
        downtime_s=max(0.0, seen.now_unix_s - begin),
        best_step=max(state.best_step, seen.step or 0),
        fruitless_starts=0 if progressed else state.fruitless_starts + (0 if asked or seen.taken else 1),
    )
    if seen.complete is not None:
        answer = _end(state, seen, "done", "training is complete", outcome=seen.complete)
    elif seen.stop is not None:
        message = f"ended on request ({seen.stop}){_but(seen)}"
        answer = _end(state, seen, "ended", message, outcome=_last(seen))
    elif failure is not None:
        answer = _failed(state, seen, failure)
    elif state.fruitless_starts >= timing.max_fruitless_starts:
        answer = _gave_up(state, seen)
    else:
        doublings = max(state.fruitless_starts, 2 if seen.taken else 0)
        waits_s = 0.0 if asked else min(timing.backoff_s * 2**doublings, timing.max_backoff_s)
        state = replace(state, retry_unix_s=seen.now_unix_s + waits_s)
        answer = Turn(_enter(state, seen, "waiting", "interrupted; resumes from its checkpoint"))
    return replace(answer, events=(exit_event, *answer.events))


def _failed(state: DriverState, seen: Seen, failure: Outcome) -> Turn:
    before = state.failure
    same = before is not None and (before.error, before.step) == (failure.error, failure.step)
    if same:
        final, why = True, f"failed again at step {failure.step} with the same error"
    elif failure.steps_taken == 0 and state.best_step == 0:
        final, why = True, "failed before its first step"
    else:
        final, why = False, f"failed at step {failure.step}"
    state = replace(state, failure=failure)
    return _end(state, seen, "failed", f"{why}: {failure.error}", outcome=failure, final=final)


def _gave_up(state: DriverState, seen: Seen) -> Turn:
    error = (
        f"{state.fruitless_starts} starts in a row ended without any progress beyond step {state.best_step} "
        f"and without an error of the script; {_last_words(seen.log_tail)}"
    )
    outcome = Outcome(
        kind="failed",
        job_id=seen.outcomes[0].job_id if seen.outcomes else "",
        incarnation=state.incarnation,
        rank=0,
        time_unix_s=seen.now_unix_s,
        step=state.best_step,
        error=error,
        traceback=seen.log_tail,
    )
    return _end(state, seen, "failed", error, outcome=outcome, final=True)


def _last_words(log_tail: str) -> str:
    """Where to look for the cause, and its likeliest line."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    if not lines:
        return "the workers printed nothing: see the driver's log"
    return f"the workers' last lines are in the traceback, the very last one is: {lines[-1][:_MAX_WORDS]}"


def _end(
    state: DriverState,
    seen: Seen,
    phase: Phase,
    message: str,
    *,
    outcome: Outcome | None = None,
    final: bool = False,
) -> Turn:
    state = _enter(replace(state, outcome=outcome, final=final), seen, phase, message)
    return Turn(state, (), (_event(state, seen, "end", {}, message),))


def _failure(state: DriverState, seen: Seen) -> Outcome | None:
    """The first failure; what fails after a request to stop is taken for a consequence of it."""
    failures = [
        outcome
        for outcome in seen.outcomes
        if outcome.kind == "failed"
        and (state.signal_unix_s is None or outcome.time_unix_s <= state.signal_unix_s)
    ]
    return min(failures, key=lambda outcome: outcome.time_unix_s, default=None)


def _last(seen: Seen) -> Outcome | None:
    return max(seen.outcomes, key=lambda outcome: outcome.step, default=None)


def _how(seen: Seen) -> str:
    if seen.gang is None:
        return "the driver found no workers when it came back"
    kinds = sorted(outcome.kind for outcome in seen.outcomes)
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return counts or "no outcome was written"


def _enter(state: DriverState, seen: Seen, phase: Phase, message: str) -> DriverState:
    return replace(state, phase=phase, since_unix_s=seen.now_unix_s, message=message)


def _say(state: DriverState, seen: Seen, message: str) -> DriverState:
    return state if state.message == message else replace(state, message=message)


def _event(
    state: DriverState, seen: Seen, name: DriverEventName, placement: Placement, message: str = ""
) -> DriverEvent:
    return DriverEvent(
        t_unix_s=seen.now_unix_s,
        event=name,
        incarnation=state.incarnation,
        decision=state.acted_decision,
        placement=dict(placement),
        message=message,
    )


def _trains(state: DriverState, seen: Seen) -> str:
    return f"trains on {_words(state.placement)}{_but(seen)}"


def _but(seen: Seen) -> str:
    """What the job's owner ought to know of its checkpoints."""
    last = _last(seen)
    stopped = last is not None and last.kind == "interrupted" and not last.traceback
    said = last.error if last is not None and stopped else seen.unsaved
    return f", but {said}" if said else ""


def _words(placement: Placement) -> str:
    return ", ".join(f"{node} x {gpus}" for node, gpus in placement.items()) or "nothing"

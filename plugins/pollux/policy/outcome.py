"""One round's program, solved and placed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pollux.policy.answer import answer, nothing
from pollux.policy.assign import Choice, choose
from pollux.policy.claims import remember, waiting_rounds
from pollux.policy.options import Options
from pollux.policy.placer import place
from pollux.policy.tables import Bools, Floats
from pollux.snapshot import Decision, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A program: options, what each is worth (O), which jobs must get one (J), and restart factors (J)."""

    snapshot: Snapshot
    options: Options
    gain: Floats
    must: Bools
    factor: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A program's choice as placements, and the gain of what found a place.

    ``faithful``: every job that must get GPUs has found a place.
    """

    instance: Instance
    choice: Choice
    placements: list[Mapping[str, int]]
    gain: float
    faithful: bool


class Formulate(Protocol):
    """A policy's program for a snapshot with at least one job and one GPU."""

    def __call__(self, snapshot: Snapshot, *, padded: bool = False) -> Instance: ...


def decide_by_program(snapshot: Snapshot, policy: str, formulate: Formulate) -> Decision:
    """The best choice of a policy's program, placed and remembered."""
    if not snapshot.jobs or not any(node.gpus for node in snapshot.nodes):
        return nothing(snapshot, policy)
    plan = best_plan(formulate(snapshot, padded=padded) for padded in (False, True))
    granted = np.array([bool(placement) for placement in plan.placements], dtype=np.bool_)
    state = remember(snapshot, waiting_rounds(snapshot), granted)
    return answer(
        snapshot,
        plan.instance.options,
        plan.choice.option,
        plan.placements,
        policy=policy,
        objective=plan.gain,
        factor=plan.instance.factor,
        state=state | ({"timed_out": True} if plan.choice.timed_out else {}),
    )


def best_plan(instances: Iterable[Instance]) -> Solved:
    """The first program whose every chosen job finds a place, else the one that places most gain.

    One that leaves a job without GPUs that must get some is taken only where all do.
    """
    best: Solved | None = None
    for instance in instances:
        solved, lost = _solve(instance)
        if best is None or (solved.faithful, solved.gain) > (best.faithful, best.gain):
            best = solved
        if not lost:
            break
    if best is None:
        raise ValueError("no program was given")
    return best


def _solve(instance: Instance) -> tuple[Solved, bool]:
    choice = choose(instance.options, instance.gain, must=instance.must)
    placements = place(instance.snapshot, instance.options, choice.option)
    chosen = [(row, option) for row, option in enumerate(choice.option.tolist()) if option >= 0]
    gain = float(sum(instance.gain[option] for row, option in chosen if placements[row]))
    lost = any(not placements[row] for row, _ in chosen)
    faithful = all(placements[row] for row in np.flatnonzero(instance.must))
    solved = Solved(instance=instance, choice=choice, placements=placements, gain=gain, faithful=faithful)
    return solved, lost

"""One round's program, solved and placed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pollux.policy.assign import Choice, choose
from pollux.policy.options import Options
from pollux.policy.placer import place
from pollux.policy.tables import Bools, Floats
from pollux.snapshot import Snapshot


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
    """A program's choice as placements, and the gain of what found a place."""

    instance: Instance
    choice: Choice
    placements: list[Mapping[str, int]]
    gain: float


def best_plan(instances: Iterable[Instance]) -> Solved:
    """The first program whose every chosen job finds a place, else the one that places most gain."""
    best: Solved | None = None
    for instance in instances:
        solved, lost = _solve(instance)
        if best is None or solved.gain > best.gain:
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
    return Solved(instance=instance, choice=choice, placements=placements, gain=gain), lost

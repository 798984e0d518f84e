"""What a page is made of: a figure with its words, its numbers, and the commands that make it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Drawing = Callable[["Figure"], None]
"""Fills an empty figure, whose size it may change."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6b6b6b", "#8B5A00")
"""Okabe and Ito's palette, which people with any colour vision can tell apart, and two more."""

OF_POLICY = {
    "tiresias": COLOURS[6],
    "optimus": COLOURS[4],
    "optimus-scaling": COLOURS[7],
    "gavel": COLOURS[3],
    "themis": COLOURS[7],
    "shockwave": COLOURS[5],
    "pollux": COLOURS[0],
    "sia": COLOURS[1],
    "ours": COLOURS[2],
}
"""A policy has one colour in all figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One section of the page. ``workloads`` says which data its results are from."""

    key: str
    title: str
    text: str
    workloads: str
    commands: tuple[str, ...]
    draw: Drawing
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def colour(label: str, number: int) -> str:
    """The policy's colour where the label is its name, else that of the number."""
    return OF_POLICY.get(label) or COLOURS[number % len(COLOURS)]


def hours(seconds: float | None, digits: int = 2) -> str:
    """Seconds as hours for a table."""
    return "-" if seconds is None else f"{seconds / 3600:.{digits}f} h"

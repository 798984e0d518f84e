"""The picture of a run: who held how many GPUs when, with every resize marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.verify import JobFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""


PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """GPUs of each job from each of ``times_s`` on; ``gpus[i]`` belongs to the i-th job."""

    times_s: tuple[float, ...]
    gpus: tuple[tuple[int, ...], ...]


def stack_of(jobs: Sequence[JobFigures]) -> Stack:
    """All jobs' allocations on one common time axis."""
    times = sorted({t for job in jobs for t, _ in job.allocations})
    return Stack(times_s=tuple(times), gpus=tuple(tuple(_held(job, t) for t in times) for job in jobs))


def save_picture(path: Path, jobs: Sequence[JobFigures], *, capacity: int, title: str) -> None:
    """Draw the allocation over time; the file's suffix says in which format."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.6), dpi=150, layout="constrained")
    stack = stack_of(jobs)
    minutes = [t / 60 for t in stack.times_s]
    floor = [0] * len(minutes)
    for number, (job, gpus) in enumerate(zip(jobs, stack.gpus, strict=True)):
        top = [low + own for low, own in zip(floor, gpus, strict=True)]
        colour = COLOURS[number % len(COLOURS)]
        axes.fill_between(minutes, floor, top, step="post", color=colour, alpha=0.85, lw=0, label=_label(job))
        axes.step(minutes, top, where="post", color="white", lw=1.2)
        _mark_resizes(axes, stack, number, floor)
        floor = top
    _dress(axes, jobs, capacity=capacity, end=max(minutes, default=1.0))
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    figure.savefig(path)
    pyplot.close(figure)


def _held(job: JobFigures, t_s: float) -> int:
    return next((gpus for at, gpus in reversed(job.allocations) if at <= t_s), 0)


def _label(job: JobFigures) -> str:
    resizes = "1 resize" if job.resizes == 1 else f"{job.resizes} resizes"
    return f"{job.name}: {job.jct_s / 60:.1f} min, {resizes}"


def _mark_resizes(axes: "Axes", stack: Stack, number: int, floor: Sequence[int]) -> None:
    """A triangle in the middle of the job's band: up where it grew, down where it shrank."""
    own = stack.gpus[number]
    for i, (before, after) in enumerate(pairwise(own), start=1):
        if before and after and before != after:
            axes.plot(
                stack.times_s[i] / 60,
                floor[i] + after / 2,
                marker="^" if after > before else "v",
                color="white",
                markeredgecolor="black",
                markersize=9,
                clip_on=False,
                zorder=5,
            )


def _dress(axes: "Axes", jobs: Sequence[JobFigures], *, capacity: int, end: float) -> None:
    for number, job in enumerate(jobs):
        axes.axvline(job.submitted_s / 60, color="0.45", lw=0.8, ls=":", zorder=0)
        axes.annotate(
            f"{job.name} submitted",
            (job.submitted_s / 60, capacity),
            xytext=(3, 4 + 10 * (len(jobs) - 1 - number)),
            textcoords="offset points",
            fontsize=7.5,
            color="0.3",
        )
    axes.axhline(capacity, color="0.3", lw=1.0, ls="--")
    axes.set(
        xlim=(0, end),
        ylim=(0, capacity + 0.16 * (len(jobs) + 1)),
        xlabel="minutes since the first job was submitted",
        ylabel="GPU slots",
    )
    axes.set_yticks(range(capacity + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.plot([], [], "^", color="white", markeredgecolor="black", label="grown by the policy")
    axes.plot([], [], "v", color="white", markeredgecolor="black", label="shrunk by the policy")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)

"""The report's figures, drawn from the results of its simulations."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pollux.report.counterexample import BATCHES, SIGMAS, table
from pollux.report.sections import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Results = Mapping[str, dict[str, Any]]
"""Entries of results.json by the name of their case."""

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""


def means(section: Section, results: Results) -> dict[str, list[float | None]]:
    """Mean completion time in hours of each curve at each value; None where no job finished."""
    table: dict[str, list[float | None]] = {}
    for curve in section.curves:
        for point in curve.points:
            times = [results[case.name]["avg_jct_s"] for case in point]
            known = [seconds / 3600 for seconds in times if seconds is not None]
            table.setdefault(curve.label, []).append(fmean(known) if known else None)
    return table


def draw(path: Path, section: Section, results: Results) -> None:
    """Save the section's figure; raises OSError."""
    _figure(path, lambda axes: _DRAW[section.kind](axes, section, results))


def draw_counterexample(path: Path) -> None:
    """Modelled time to the target over batch size, a line for each noise level."""

    def lines(axes: "Axes") -> None:
        outcomes = table()
        for colour, sigma in zip(_COLOURS, SIGMAS, strict=False):
            reached = [
                (one.batch_size, one.seconds) for one in outcomes if one.sigma == sigma and one.seconds
            ]
            axes.plot(*zip(*reached, strict=True), marker="o", color=colour, label=f"sigma = {sigma:g}")
            never = [one.batch_size for one in outcomes if one.sigma == sigma and one.seconds is None]
            axes.plot(never, [6.0] * len(never), marker="x", lw=0, color=colour)
        axes.set(
            xscale="log", yscale="log", xlabel="batch size (x: never reached)", ylabel="seconds to the target"
        )
        axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES], minor=False)

    _figure(path, lines)


def _figure(path: Path, content: "Callable[[Axes], None]") -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pollux"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    content(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _bars(axes: "Axes", section: Section, results: Results) -> None:
    heights = means(section, results)
    width = 0.8 / len(heights)
    for number, (label, values) in enumerate(heights.items()):
        at = np.arange(len(values)) + (number - (len(heights) - 1) / 2) * width
        bars = axes.bar(at, [value or 0.0 for value in values], width, label=label, color=_colour(number))
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(np.arange(len(section.values)), section.values)
    axes.margins(y=0.3)  # room for the legend
    axes.set(xlabel=section.axis, ylabel="mean completion time (h)")


def _lines(axes: "Axes", section: Section, results: Results) -> None:
    for number, (label, values) in enumerate(means(section, results).items()):
        heights = [np.nan if value is None else value for value in values]
        axes.plot(section.values, heights, marker="o", label=label, color=_colour(number))
    axes.set(xlabel=section.axis, ylabel="mean completion time (h)")
    axes.set_ylim(bottom=0)


def _fairness(axes: "Axes", section: Section, results: Results) -> None:
    for number, curve in enumerate(section.curves):
        jobs = [job for case in curve.points[0] for job in results[case.name]["jobs"]]
        rho = np.sort([job["rho"] for job in jobs if job["rho"] is not None])
        unfair = float(np.mean(rho > 1)) if len(rho) else 0.0
        share = np.arange(1, len(rho) + 1) / max(len(rho), 1)
        axes.step(
            rho, share, where="post", color=_colour(number), label=f"{curve.label}: {unfair:.1%} unfair"
        )
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set(xscale="log", xlabel="finish-time fairness rho", ylabel="share of jobs")


def _timeline(axes: "Axes", section: Section, results: Results) -> None:
    for number, curve in enumerate(section.curves):
        line = results[curve.points[0][0].name]["timeline"]
        hours = np.array(line["time_s"]) / 3600
        axes.step(
            hours, line["gpus"], where="post", color=_colour(number), lw=1.0, label=f"{curve.label}: GPUs"
        )
        share = np.array(line["efficiency"]) * np.array(line["gpus"])
        axes.plot(hours, share, color=_colour(number), lw=0.8, ls=":", label=f"{curve.label}: useful GPUs")
    axes.set(xlabel=section.axis, ylabel="GPUs; dotted: times statistical efficiency")


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


_DRAW: Mapping[str, "Callable[[Axes, Section, Results], None]"] = {
    "bars": _bars,
    "lines": _lines,
    "fairness": _fairness,
    "timeline": _timeline,
}

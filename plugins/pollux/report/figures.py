"""Sections of simulated workloads as parts of the page: their figures and tables."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from pollux.report.cases import ReportCase
from pollux.report.parts import COLOURS, OF_POLICY, Part, colour, hours
from pollux.report.sections import Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, dict[str, Any]]
"""Entries of results.json by the name of their case."""

_LETTER = 0.0125
"""Share of a figure's width that a letter of a label takes."""

_RHO_MARKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)

PAPERS_RESTARTS_S = 420.0
"""Seconds between two re-allocations of a job; Pollux section 5.2."""


def part_of(section: Section, results: Results) -> Part:
    """The section with its figure and its numbers."""
    head, rows = _TABLES.get(section.kind, _summary)(section, results)
    return Part(
        key=section.key,
        title=section.title,
        text=section.text,
        workloads=section.workloads,
        commands=section.commands,
        draw=lambda figure: _DRAW[section.kind](figure, section, results),
        head=head,
        rows=rows,
    )


def means(section: Section, results: Results) -> dict[str, list[float | None]]:
    """Mean completion time in hours of each curve at each value; None where no job finished."""
    table: dict[str, list[float | None]] = {}
    for curve in section.curves:
        for point in curve.points:
            seconds = _mean(results, point, "avg_jct_s")
            table.setdefault(curve.label, []).append(None if seconds is None else seconds / 3600)
    return table


def _mean(results: Results, point: Sequence[ReportCase], key: str) -> float | None:
    values = [results[case.name][key] for case in point]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _bars(figure: "Figure", section: Section, results: Results) -> None:
    heights = means(section, results)
    figure.set_size_inches(8, 0.7 + 0.32 * len(heights) * len(section.values))
    axes = figure.subplots()
    width, names, right = 0.8 / len(heights), list(heights), 0.0
    for number, label in enumerate(names):
        at = np.arange(len(section.values)) + (number - (len(names) - 1) / 2) * width
        values = [value or 0.0 for value in heights[label]]
        bars = axes.barh(at, values, width * 0.92, color=OF_POLICY.get(label, COLOURS[6]))
        said = ["no job finished" if value is None else f"{value:.2f} h" for value in heights[label]]
        texts = [f" {label}  {words}" for words in said]
        axes.bar_label(bars, labels=texts, fontsize=8)
        room = [value / (1 - _LETTER * len(text)) for value, text in zip(values, texts, strict=True)]
        right = max(right, *room)
    axes.set_yticks(np.arange(len(section.values)), section.values)
    axes.invert_yaxis()
    axes.set_xlim(0, right or 1.0)
    axes.set_xlabel("mean completion time (h)")
    axes.grid(visible=False, axis="y")


def _lines(figure: "Figure", section: Section, results: Results) -> None:
    axes = figure.subplots()
    for number, (label, values) in enumerate(means(section, results).items()):
        heights = [np.nan if value is None else value for value in values]
        dash = "--" if number % 2 else "-"
        axes.plot(section.values, heights, dash, marker="o", label=label, color=colour(label, number), lw=1.8)
    axes.set(xlabel=section.axis, ylabel="mean completion time (h)")
    axes.set_ylim(0, 1.12 * axes.dataLim.y1)
    axes.legend(fontsize=8, frameon=False)


def _fairness(figure: "Figure", section: Section, results: Results) -> None:
    axes = figure.subplots()
    for number, curve in enumerate(section.curves):
        rho = _rho(results, curve.points[0])
        share = np.arange(1, len(rho) + 1) / max(len(rho), 1)
        axes.step(rho, share, where="post", color=colour(curve.label, number), label=curve.label, lw=1.6)
    axes.axvline(1.0, color="black", lw=0.8, ls="--")
    axes.set(xscale="log", xlabel="finish-time fairness rho", ylabel="share of jobs", ylim=(0, 1.01))
    marks = [mark for mark in _RHO_MARKS if axes.get_xlim()[0] <= mark <= axes.get_xlim()[1]]
    axes.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def _rho(results: Results, point: Sequence[ReportCase]) -> "np.ndarray[Any, np.dtype[np.float64]]":
    jobs = [job for case in point for job in results[case.name]["jobs"]]
    return np.sort([job["rho"] for job in jobs if job["rho"] is not None])


def _timeline(figure: "Figure", section: Section, results: Results) -> None:
    figure.set_size_inches(8, 6)
    active, gpus, efficiency = figure.subplots(3, sharex=True)
    for number, curve in enumerate(section.curves):
        line = results[curve.points[0][0].name]["timeline"]
        time_h, shade = np.array(line["time_s"]) / 3600, colour(curve.label, number)
        gpus.step(time_h, line["gpus"], where="post", color=shade, lw=1.0)
        shown = np.where(np.array(line["efficiency"]) > 0, line["efficiency"], np.nan)
        efficiency.plot(time_h, shown, color=shade, lw=1.0)
        jobs = np.array(line["running"]) + np.array(line["waiting"])
        active.step(time_h, jobs, where="post", color=shade, lw=1.0, label=curve.label)
    gpus.set(ylabel="GPUs given", ylim=(0, None))
    efficiency.set(ylabel="efficiency", ylim=(0, 1.05), xlabel="hours")
    active.set(ylabel="active jobs", ylim=(0, None))
    active.set_title(section.curves[0].points[0][0].data, fontsize=9, loc="left")
    active.legend(fontsize=8, frameon=False, loc="upper right")


def _restarts(figure: "Figure", section: Section, results: Results) -> None:
    figure.set_size_inches(8, 3.0)
    often, share = figure.subplots(1, 2, sharey=True)
    labels = [curve.label for curve in section.curves]
    shades = [colour(label, number) for number, label in enumerate(labels)]
    for axes, values, unit in (
        (often, [_restart_rate(results, curve.points[0]) for curve in section.curves], "{:.2f}"),
        (
            share,
            [_mean(results, curve.points[0], "restart_share") or 0 for curve in section.curves],
            "{:.1%}",
        ),
    ):
        bars = axes.barh(labels, values, color=shades)
        axes.bar_label(bars, labels=[" " + unit.format(value) for value in values], fontsize=8)
        axes.margins(x=0.2)
        axes.grid(visible=False, axis="y")
    often.invert_yaxis()
    often.set_xlabel("restarts of a running job in 7 minutes")
    share.set_xlabel("share of GPU time spent restarting")


def _restart_rate(results: Results, point: Sequence[ReportCase]) -> float:
    """Restarts per job in 7 minutes of the time from its first start to its end."""
    jobs = [job for case in point for job in results[case.name]["jobs"] if job["finished"]]
    seconds = sum(job["completed_s"] - job["started_s"] for job in jobs)
    return PAPERS_RESTARTS_S * sum(job["restarts"] for job in jobs) / seconds if seconds else 0.0


def _restart_table(section: Section, results: Results) -> tuple[list[str], list[list[str]]]:
    rows = []
    for curve in section.curves:
        rate = _restart_rate(results, curve.points[0])
        share = _mean(results, curve.points[0], "restart_share") or 0.0
        each = _mean(results, curve.points[0], "restarts_per_job") or 0.0
        every = f"{PAPERS_RESTARTS_S / rate / 60:.0f} min" if rate else "never"
        rows.append([curve.label, f"{rate:.2f}", every, f"{each:.2f}", f"{share:.1%}"])
    return ["policy", "restarts in 7 min", "one every", "restarts a job", "share of GPU time"], rows


def _applications(figure: "Figure", section: Section, results: Results) -> None:
    _, rows = _ratios(section, results)
    figure.set_size_inches(8, 0.9 + 0.45 * len(rows))
    axes = figure.subplots()
    policies = list(dict.fromkeys(curve.label.split(",")[0] for curve in section.curves))
    apps = list(dict.fromkeys(row[0] for row in rows))
    height = 0.8 / len(policies)
    for number, policy in enumerate(policies):
        at = np.arange(len(apps)) + (number - (len(policies) - 1) / 2) * height
        values = [100 * (row[3] - 1) for row in rows if row[1] == policy]
        bars = axes.barh(at, values, height * 0.92, color=colour(policy, number), label=policy)
        axes.bar_label(bars, labels=[f" {value:+.1f} % " for value in values], fontsize=8)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(np.arange(len(apps)), apps)
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("change of the mean completion time with earlier fits")
    axes.legend(fontsize=8, frameon=False)


def _ratios(section: Section, results: Results) -> tuple[list[str], list[tuple[str, str, int, float]]]:
    """(application, policy, jobs, mean completion time with earlier fits over that without)."""
    rows = []
    pairs = list(zip(section.curves[::2], section.curves[1::2], strict=True))
    times = [tuple(_by_application(results, curve.points[0]) for curve in pair) for pair in pairs]
    for app in sorted({app for before, after in times for app in before if app in after}):
        for (curve, _), (before, after) in zip(pairs, times, strict=True):
            if app in before and app in after:
                ratio = fmean(after[app]) / fmean(before[app])
                rows.append((app, curve.label.split(",")[0], len(before[app]), ratio))
    return ["application", "policy", "jobs", "ratio"], rows


def _by_application(results: Results, point: Sequence[ReportCase]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for case in point:
        for job in results[case.name]["jobs"]:
            if job["finished"]:
                times.setdefault(job["application"], []).append(job["completed_s"] - job["submitted_s"])
    return times


def _ratio_table(section: Section, results: Results) -> tuple[list[str], list[list[str]]]:
    head, rows = _ratios(section, results)
    return head, [[app, policy, str(jobs), f"{ratio:.3f}"] for app, policy, jobs, ratio in rows]


def _summary(section: Section, results: Results) -> tuple[list[str], list[list[str]]]:
    """A row for each curve at each value: completion times, restarts, fairness."""
    head = ["", "mean", "p99", "makespan", "restarts", "GPU hours", "max rho", "rho > 1"]
    many = len(section.values) > 1
    rows = []
    for index, value in enumerate(section.values):
        for curve in section.curves:
            point = curve.points[index]
            unfinished = sum(results[case.name]["unfinished"] for case in point)
            label = f"{value}: {curve.label}" if many else curve.label
            fairness = [results[case.name]["ftf"] for case in point]
            rows.append(
                [
                    label + (f" ({unfinished} unfinished)" if unfinished else ""),
                    hours(_mean(results, point, "avg_jct_s")),
                    hours(_mean(results, point, "p99_jct_s")),
                    hours(_mean(results, point, "makespan_s"), 1),
                    f"{_mean(results, point, 'restarts_per_job') or 0:.1f}",
                    f"{_mean(results, point, 'gpu_hours_per_job') or 0:.1f}",
                    _worst([each["max"] for each in fairness], "{:.2f}"),
                    _worst([each["unfair_fraction"] for each in fairness], "{:.1%}"),
                ]
            )
    return head, rows


def _worst(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return form.format(fmean(known)) if known else "-"


_TABLES: Mapping[str, Callable[[Section, Results], tuple[list[str], list[list[str]]]]] = {
    "restarts": _restart_table,
    "applications": _ratio_table,
}

_DRAW: Mapping[str, Callable[["Figure", Section, Results], None]] = {
    "bars": _bars,
    "lines": _lines,
    "fairness": _fairness,
    "timeline": _timeline,
    "restarts": _restarts,
    "applications": _applications,
}

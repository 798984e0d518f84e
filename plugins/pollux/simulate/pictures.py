"""Pictures of a simulation: GPUs, jobs and statistical efficiency over time, and completion times."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""


def save_pictures(folder: Path, workloads: Sequence[dict[str, Any]], *, gpus: int) -> None:
    """``SET-NAME.png`` for each workload's entry in results.json; raises OSError."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for workload in workloads:
        figure, (top, middle, bottom) = pyplot.subplots(3, figsize=(10, 9), dpi=120, layout="constrained")
        line = workload["timeline"]
        hours = np.array(line["time_s"]) / 3600
        top.fill_between(hours, line["gpus"], step="post", color=_BLUE, alpha=0.8, lw=0, label="GPUs given")
        top.axhline(gpus, color="black", lw=0.8, label=f"GPUs of the cluster ({gpus})")
        top.plot(hours, line["waiting"], color=_ORANGE, lw=1.2, label="jobs waiting")
        top.set_ylabel("GPUs, jobs")
        middle.plot(hours, line["efficiency"], color=_GREEN, lw=1.2)
        middle.set_ylim(0, 1.05)
        middle.set_ylabel("statistical efficiency")
        middle.set_xlabel("hours")
        times = [job["completed_s"] - job["submitted_s"] for job in workload["jobs"] if job["finished"]]
        ranks = np.arange(1, len(times) + 1) / max(len(workload["jobs"]), 1)
        bottom.step(np.sort(times) / 3600, ranks, where="post", color=_BLUE)
        bottom.set_xscale("log")
        bottom.set_xlabel("completion time (hours)")
        bottom.set_ylabel("share of jobs")
        top.legend(loc="upper right", fontsize=8)
        top.set_title(f"{workload['set']}/{workload['name']}", loc="left", fontweight="bold")
        for axes in (top, middle, bottom):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        figure.savefig(folder / f"{workload['set']}-{workload['name']}.png")
        pyplot.close(figure)

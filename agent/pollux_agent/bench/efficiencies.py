"""Measurements behind ``pollux-agent bench efficiency``: Fig. 2 of Pollux, from recorded trainings."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pollux_agent.bench.traces import APPLICATIONS, NoisePoint, noise_points
from pollux_agent.model.efficiency import efficiency
from pollux_agent.model.throughput import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One application: efficiency by epoch (the second on) at each batch size.

    ``measured`` and ``predicted`` map M to arrays of one length; ``reference`` is the batch size whose noise
    scale the predictions are made from, and ``progress`` the mean progress of the epochs in steps of M0.
    """

    application: str
    initial: int
    reference: int
    progress: FloatArray
    measured: dict[int, FloatArray]
    predicted: dict[int, FloatArray]

    def error(self, batch_size: int) -> float:
        """Median relative error over the epochs."""
        ratio = self.predicted[batch_size] / self.measured[batch_size]
        return float(np.median(np.abs(ratio - 1.0)))


def compare(traces: Path, application: str) -> Comparison:
    """What the noise scale at the middle batch size says of the others, against what they were.

    Measured: the steps of size M0 that an epoch's progress is worth, over the samples that training at M took
    for it. Predicted: Pollux Eq. 7 with the phi that was recorded at the reference batch size in that epoch.
    """
    points = noise_points(traces, application)
    sizes = list(points)
    initial, reference = sizes[0], sizes[len(sizes) // 2]
    epochs = min(len(rows) for rows in points.values())
    scales = _noise(points[reference], epochs)
    return Comparison(
        application=application,
        initial=initial,
        reference=reference,
        progress=np.array([row.progress for row in points[initial][1:epochs]]),
        measured={size: _measured(rows, epochs, initial / size) for size, rows in points.items()},
        predicted={
            size: np.array([float(efficiency(scale, initial, size)) for scale in scales]) for size in sizes
        },
    )


def _noise(rows: list[NoisePoint], epochs: int) -> FloatArray:
    """phi within each epoch: the geometric mean of the values at its two ends."""
    scales = np.array([max(row.noise_scale, 1e-9) for row in rows[:epochs]])
    return np.asarray(np.sqrt(scales[1:] * scales[:-1]))


def _measured(rows: list[NoisePoint], epochs: int, share: float) -> FloatArray:
    progress = np.diff([row.progress for row in rows[:epochs]])
    steps = np.diff([row.iteration for row in rows[:epochs]])
    return np.asarray(progress / steps * share)


def compare_all(traces: Path) -> list[Comparison]:
    """Every application."""
    return [compare(traces, application) for application in APPLICATIONS]


def plot(comparisons: list[Comparison], path: Path) -> None:
    """Draw predicted (lines) and measured (dots) efficiency against progress; the suffix says the format.

    Raises ImportError where matplotlib is not installed, OSError or ValueError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    for axes, found in zip(figure.subplots(2, 3).flat, comparisons, strict=True):
        x = found.progress / found.progress[-1]
        for size in list(found.measured)[1:]:
            (line,) = axes.plot(x, found.predicted[size], linewidth=1)
            axes.plot(x, found.measured[size], ".", markersize=3, color=line.get_color(), label=f"{size}")
        axes.set_title(f"{found.application}: predicted from {found.reference}")
        axes.set_ylim(0, 1.1)
        axes.set_xlabel("progress")
        axes.set_ylabel("efficiency")
        axes.legend(title="batch size", fontsize="x-small", title_fontsize="x-small")
    figure.suptitle("Statistical efficiency: measured (dots) and predicted at one batch size (lines)")
    figure.savefig(path, dpi=120)

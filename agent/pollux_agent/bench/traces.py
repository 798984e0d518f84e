"""The recorded traces that benchmarks read: measured step times, and gradient noise against progress.

The layout is that of the public artifacts of Pollux (OSDI 2021) and Sia (SOSP 2023): a folder
``apps/<application>`` with ``placements.csv``, ``scalability.csv`` and ``validation-<M>.csv``.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean

from pollux_agent.errors import DocumentError
from pollux_agent.model.tiers import Observation

APPLICATIONS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One row: an optimizer step of ``step_s`` seconds, ``sync_s`` of them synchronisation."""

    placement: str
    num_nodes: int
    num_replicas: int
    local_batch_size: int
    step_s: float
    sync_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisePoint:
    """Gradient statistics at the end of an epoch; ``noise_scale`` in samples, ``progress`` in steps of M0."""

    progress: float
    iteration: float
    noise_scale: float


def step_times(traces: Path, application: str, name: str) -> list[StepTime]:
    """The rows of ``placements.csv`` or ``scalability.csv``; raises DocumentError naming what is wrong."""
    path = _folder(traces, application) / name
    rows = []
    for row in _rows(path):
        if "placement" in row:
            placement, digits = row["placement"], [int(digit) for digit in row["placement"]]
            num_nodes, num_replicas = len(digits), sum(digits)
        else:
            num_nodes, num_replicas = int(row["num_nodes"]), int(row["num_replicas"])
            placement = f"{num_nodes}x{num_replicas}"
        rows.append(
            StepTime(
                placement=placement,
                num_nodes=num_nodes,
                num_replicas=num_replicas,
                local_batch_size=int(row["local_bsz"]),
                step_s=float(row["step_time"]),
                sync_s=float(row["sync_time"]),
            )
        )
    return rows


def noise_points(traces: Path, application: str) -> dict[int, list[NoisePoint]]:
    """Total batch size M -> one point an epoch, by rising M; phi = M0 grad_var / grad_sqr."""
    folder = _folder(traces, application)
    sizes = sorted(int(path.stem.removeprefix("validation-")) for path in folder.glob("validation-*.csv"))
    if not sizes:
        raise DocumentError(f"{folder} has no validation-<M>.csv; name the folder of the recorded traces")
    return {
        size: [
            NoisePoint(
                progress=float(row["progress"]),
                iteration=float(row["iteration"]),
                noise_scale=_noise_scale(sizes[0], float(row["grad_sqr"]), float(row["grad_var"])),
            )
            for row in _rows(folder / f"validation-{size}.csv")
        ]
        for size in sizes
    }


def observations(rows: Iterable[StepTime]) -> list[Observation]:
    """What an agent would hold of these steps: one observation a configuration, with the mean times."""
    times: dict[tuple[int, int, int], list[StepTime]] = defaultdict(list)
    for row in rows:
        times[row.num_nodes, row.num_replicas, row.local_batch_size].append(row)
    return [
        Observation(
            num_nodes=key[0],
            num_replicas=key[1],
            local_batch_size=key[2],
            optim_step_time_s=fmean(row.step_s for row in same),
            accum_step_time_s=fmean(row.step_s - row.sync_s for row in same),
        )
        for key, same in sorted(times.items())
    ]


def _noise_scale(initial: int, grad_sqr: float, grad_var: float) -> float:
    return initial * grad_var / grad_sqr if grad_sqr > 0 else inf


def _folder(traces: Path, application: str) -> Path:
    folder = traces / "apps" / application
    if not folder.is_dir():
        raise DocumentError(
            f"--traces is {traces}, but {folder} is not there; name the folder of the recorded traces"
        )
    return folder


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from csv.DictReader(file)
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror}; name the folder of the recorded traces") from None

"""An application of a trace folder: its step times by GPU type and its gradient statistics by epoch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pollux.errors import TraceError
from pollux.traces.pipeline import STAGES, PipelineTimes
from pollux.traces.steptimes import Shape, StepTimes, read_step_times
from pollux.traces.tables import read_table

Floats = NDArray[np.float64]

DEFAULT_TYPE = "gpu"
"""The type of GPU whose files have no suffix; the type of nodes of which nothing else is said."""

_ALONE = 10
"""Batch sizes profiled on one GPU; Sia section 3.2."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_VALIDATION = re.compile(r"validation-([1-9][0-9]{0,9})\.csv")
_LOCAL_LIMITS: Mapping[tuple[str, str], int] = {("yolov3", ""): 8, ("deepspeech2", "rtx"): 57}
"""Largest local batch sizes that fit into memory though larger ones were measured elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What was measured of one application.

    ``batch_sizes`` are the total batch sizes M of the validation runs, ascending, the first one M0.
    ``progress`` (epochs) is the progress in steps of size M0 at which each epoch ends; ``grad_sqr``,
    ``grad_var`` and ``iteration`` have shape (epochs, batch sizes).
    """

    name: str
    batch_sizes: Floats
    progress: Floats
    grad_sqr: Floats
    grad_var: Floats
    iteration: Floats
    times: Mapping[str, StepTimes | PipelineTimes]
    _statistics: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, init=False)

    @property
    def initial_batch_size(self) -> int:
        """M0."""
        return int(self.batch_sizes[0])

    @property
    def max_batch_size(self) -> int:
        return int(self.batch_sizes[-1])

    @property
    def epochs(self) -> int:
        return len(self.progress)

    @property
    def single_gpu(self) -> bool:
        """Whether the published experiments leave it on one GPU at its largest batch size."""
        return self.name == "ncf"

    @property
    def is_pipeline(self) -> bool:
        """Whether a replica takes several GPUs, and so the job grows by whole replicas."""
        return any(times.gpus_per_replica > 1 for times in self.times.values())

    def gpus_per_replica(self, gpu_type: str) -> int:
        """GPUs of one replica on that type."""
        return self.times[gpu_type].gpus_per_replica

    def local_bounds(self, gpu_type: str) -> tuple[int, int]:
        """Least and largest batch size of one GPU of that type; of a pipeline's replica."""
        times = self.times[gpu_type]
        limits = [_LOCAL_LIMITS.get((self.name, kind), times.max_local) for kind in ("", gpu_type)]
        return times.min_local, min(times.max_local, *limits)

    def step_times(self, gpu_type: str, shape: Shape, local_bsz: int) -> tuple[float, float]:
        """(step_s, sync_s) on a placement."""
        return self.times[gpu_type].at(shape, local_bsz)

    def times_alone(self, gpu_type: str) -> Mapping[int, tuple[float, float]]:
        """(step_s, sync_s) on one replica by local batch size: the least, the largest, and some between."""
        low, high = self.local_bounds(gpu_type)
        sizes = np.unique(np.rint(np.geomspace(low, high, _ALONE)).astype(np.int64)).tolist()
        shape = (self.gpus_per_replica(gpu_type),)
        return {size: self.step_times(gpu_type, shape, size) for size in sizes}

    def gradients(self, epoch: int, batch_size: int) -> tuple[float, float]:
        """(squared gradient norm, gradient variance at M0), between the two neighbouring validation runs."""
        key = (epoch, batch_size)
        known = self._statistics.get(key)
        if known is None:
            known = self._statistics[key] = (
                float(np.interp(batch_size, self.batch_sizes, self.grad_sqr[epoch])),
                float(np.interp(batch_size, self.batch_sizes, self.grad_var[epoch])),
            )
        return known

    def iterations_left(self, epoch: int, batch_size: int) -> float:
        """Steps at a fixed batch size from after row ``epoch`` to the end; 1 at the last row."""
        if epoch >= self.epochs - 1:
            return 1.0
        last, here = (np.interp(batch_size, self.batch_sizes, self.iteration[row]) for row in (-1, epoch))
        return float(last - here)


def read_application(traces: Path, name: str, gpu_types: frozenset[str]) -> Application:
    """The application of that name, with its step times on the types asked for that were measured.

    Raises TraceError for an unknown application, files that are missing or wrong, and where no type of GPU
    was measured.
    """
    folder = traces / "apps" / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        known = sorted(path.name for path in (traces / "apps").glob("*/"))
        raise TraceError(
            f"application {name[:80]!r} is unknown: {traces / 'apps'} has {', '.join(known) or 'none'}; "
            "correct the name or add its folder"
        )
    times: dict[str, StepTimes | PipelineTimes] = {}
    for kind in sorted(gpu_types):
        suffix = "" if kind == DEFAULT_TYPE else f"-{kind}"
        if _NAME.fullmatch(kind) and (folder / f"placements{suffix}.csv").exists():
            stages = STAGES.get((name, kind))
            measured = read_step_times(folder, suffix, whole=stages is None)
            times[kind] = measured if stages is None else PipelineTimes(measured, stages)
    if not times:
        raise TraceError(
            f"application {name!r} has no measurements on {' or '.join(sorted(gpu_types))}; {folder} has "
            f"{', '.join(sorted(path.name for path in folder.glob('placements*'))) or 'no placements.csv'}"
        )
    return Application(name=name, times=times, **_validation(folder))


def gpu_types(traces: Path) -> frozenset[str]:
    """The types of GPU on which any application of the folder was measured."""
    files = (traces / "apps").glob("*/placements*.csv")
    suffixes = {path.stem.removeprefix("placements") for path in files}
    return frozenset(suffix.removeprefix("-") or DEFAULT_TYPE for suffix in suffixes)


def _validation(folder: Path) -> dict[str, Floats]:
    files = {}
    for path in sorted(folder.glob("validation-*.csv")):
        match = _VALIDATION.fullmatch(path.name)
        if match is None:
            raise TraceError(f"{path}: its name must be validation-M.csv, M a whole number from 1; rename it")
        files[int(match[1])] = path
    if not files:
        raise TraceError(f"{folder}: there is no validation-M.csv, one for each total batch size M measured")
    columns = ["progress", "iteration", "grad_sqr", "grad_var"]
    tables = [read_table(files[size], numbers=columns) for size in sorted(files)]
    if len({len(table) for table in tables}) > 1:
        raise TraceError(
            f"{folder}: the validation files differ in their number of rows; each has one an epoch"
        )
    progress, iteration, grad_sqr, grad_var = (
        np.column_stack([table[name].to_numpy() for table in tables]) for name in columns
    )
    ends = progress.min(axis=1)
    if ends[0] <= 0 or (np.diff(ends) <= 0).any():
        raise TraceError(
            f"{folder}: progress in the validation files must be above 0 and grow from row to row"
        )
    if ((grad_sqr + grad_var) <= 0).any():
        raise TraceError(f"{folder}: grad_sqr and grad_var are both 0 in a row; one must be above 0")
    sizes = np.array(sorted(files), dtype=np.float64)
    return {
        "batch_sizes": sizes,
        "progress": ends,
        "grad_sqr": grad_sqr,
        "grad_var": grad_var,
        "iteration": iteration,
    }

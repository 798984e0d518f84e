"""Measured seconds per training step of one application on one type of GPU, and between the measurements."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.interpolate import LinearNDInterpolator, NearestNDInterpolator
from scipy.spatial import QhullError
from threadpoolctl import threadpool_limits

from pollux.errors import TraceError
from pollux.traces.tables import read_table

Floats = NDArray[np.float64]
Shape = tuple[int, ...]
"""GPUs per node, in the order in which the nodes were picked."""

_MOST_LOCAL = 1e9
_TIMES = ["step_time", "sync_time"]
_AT = ["num_nodes", "num_replicas", "local_bsz"]


class StepTimes:
    """Step and synchronisation seconds for a placement and a local batch size.

    A placement that was measured is interpolated linearly over the local batch size; any other one linearly
    over (nodes, replicas, local batch size), with the nodes capped at the most that were measured. Outside
    of what was measured the nearest measurement counts.
    """

    gpus_per_replica = 1

    def __init__(self, placements: pd.DataFrame, scalability: pd.DataFrame) -> None:
        self.min_local = int(placements["local_bsz"].min())
        self.max_local = int(placements["local_bsz"].max())
        self._measured: Mapping[Shape, tuple[Floats, Floats]] = {
            shape: (rows["local_bsz"].to_numpy(), rows[_TIMES].to_numpy())
            for shape, rows in placements.groupby(["shape", "local_bsz"], as_index=False)[_TIMES]
            .mean()
            .groupby("shape")
        }
        means = placements.groupby(_AT, as_index=False)[_TIMES].mean()
        points = pd.concat([means, scalability[_AT + _TIMES]])
        points = points.groupby(_AT, as_index=False, sort=False)[_TIMES].mean()  # the order decides on ties
        self.max_nodes = int(points["num_nodes"].max())
        self._points: Floats = points[_AT].to_numpy()
        self._values: Floats = points[_TIMES].to_numpy()
        self._between: LinearNDInterpolator | None = None
        self._nearest: NearestNDInterpolator | None = None
        self._known: dict[tuple[Shape, int], tuple[float, float]] = {}

    def at(self, shape: Shape, local_bsz: int) -> tuple[float, float]:
        """(step_s, sync_s); ``sync_s`` is the part of the step spent on synchronisation."""
        key = (shape, local_bsz)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._look_up(rotated(shape), local_bsz)
        return known

    def _look_up(self, shape: Shape, local_bsz: int) -> tuple[float, float]:
        measured = self._measured.get(shape)
        if measured is not None:
            step_s, sync_s = (np.interp(local_bsz, measured[0], column) for column in measured[1].T)
            return float(step_s), float(sync_s)
        at = (min(len(shape), self.max_nodes), sum(shape), local_bsz)
        if self._between is None:
            self._between = self._linear()
        value = self._between(at).ravel()
        if not np.all(np.isfinite(value)):
            if self._nearest is None:
                self._nearest = NearestNDInterpolator(self._points, self._values, rescale=True)
            value = self._nearest(at).ravel()
        return float(value[0]), float(value[1])

    def _linear(self) -> LinearNDInterpolator:
        try:
            between = LinearNDInterpolator(self._points, self._values)
            with threadpool_limits(limits=1, user_api="blas"):  # many tiny systems: threads only cost
                _ = between.tri.transform
            return between
        except QhullError as error:
            raise TraceError(
                "scalability.csv and placements.csv: the measurements span no volume over num_nodes, "
                "num_replicas and local_bsz, so nothing lies between them; measure more configurations"
            ) from error


def rotated(shape: Shape) -> Shape:
    """The lexicographically smallest rotation: workers form a ring, so where it starts does not matter."""
    return min(shape[turn:] + shape[:turn] for turn in range(len(shape)))


def read_step_times(folder: Path, suffix: str, *, whole: bool = True) -> StepTimes:
    """Read ``placements<suffix>.csv`` and ``scalability<suffix>.csv``; raises TraceError.

    ``whole`` says that step_time is that of a whole step, of which sync_time is a part.
    """
    path = folder / f"placements{suffix}.csv"
    placements = read_table(path, texts=["placement"], numbers=["local_bsz", *_TIMES])
    wrong = ~placements["placement"].str.fullmatch(r"[1-9]+")
    if wrong.any():
        value = str(placements["placement"][wrong].iloc[0])[:80]
        raise TraceError(
            f"{path}, line {placements.index[int(np.argmax(wrong))] + 2}: placement is {value!r}; "
            "it must be the GPUs on each node, one digit from 1 to 9 a node"
        )
    placements["shape"] = [rotated(tuple(int(digit) for digit in text)) for text in placements["placement"]]
    placements["num_nodes"] = [float(len(shape)) for shape in placements["shape"]]
    placements["num_replicas"] = [float(sum(shape)) for shape in placements["shape"]]
    other = folder / f"scalability{suffix}.csv"
    scalability = read_table(other, numbers=[*_AT, *_TIMES])
    for row, nodes, replicas in scalability[_AT[:2]].itertuples():
        if not 1 <= nodes <= replicas or nodes != int(nodes) or replicas != int(replicas):
            raise TraceError(
                f"{other}, line {row + 2}: num_nodes is {nodes:g} and num_replicas {replicas:g}; "
                "they must be whole numbers from 1, and no more nodes than replicas"
            )
    for file, table in ((path, placements), (other, scalability)):
        for row, local in table["local_bsz"].items():
            if not 1 <= local <= _MOST_LOCAL or local != int(local):
                raise TraceError(
                    f"{file}, line {row + 2}: local_bsz is {local:g}; it must be a whole number from 1 to "
                    f"{_MOST_LOCAL:g}"
                )
        if (table["step_time"] <= 0).any():
            raise TraceError(f"{file}: step_time must be above 0 in every row")
        if whole and (table["sync_time"] > table["step_time"]).any():
            raise TraceError(f"{file}: sync_time is above step_time, of which it is a part; correct it")
    return StepTimes(placements, scalability)

"""Sections whose results are simulations of workloads: curves over a setting, each point some simulations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pollux.report.cases import ReportCase, command

_SYNTHETIC, _SMALL = "synthetic", "small"
"""The set of few and short jobs, and the cluster that it fills."""

Kind = Literal["bars", "lines", "fairness", "timeline", "restarts", "applications"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a figure: for each value on its axis the simulations whose mean it shows."""

    label: str
    points: tuple[tuple[ReportCase, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A figure with its words; ``axis`` says what ``values`` are."""

    key: str
    title: str
    text: str
    kind: Kind
    axis: str
    values: tuple[str, ...]
    curves: tuple[Curve, ...]

    @property
    def cases(self) -> Iterator[ReportCase]:
        for curve in self.curves:
            for point in curve.points:
                yield from point

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that make its simulations."""
        return tuple(dict.fromkeys(command(case) for case in self.cases))

    @property
    def workloads(self) -> str:
        """Which data its results are from."""
        return ", ".join(dict.fromkeys(case.data for case in self.cases))


class Workloads:
    """The workloads of a trace folder that the report uses, by set; ``first`` jobs of each, or all."""

    def __init__(self, traces: Path, names: Sequence[str], first: int | None) -> None:
        self._first = first
        self._sets = {
            folder.name: [name for name in names if (folder / f"{name}.csv").is_file()]
            for folder in sorted((traces / "workloads").glob("*/"))
        }

    def one_of(self, *names: str) -> str:
        """The first of these sets that is there, else "": no set."""
        return next((name for name in names if self._sets.get(name)), "")

    def over_sets(
        self,
        key: str,
        title: str,
        text: str,
        kind: Kind,
        axis: str,
        sets: Mapping[str, str],
        curves: Mapping[str, Mapping[str, Any]],
    ) -> Section | None:
        """One value on the axis for each set of workloads; None where there is none of them."""
        there = {value: name for value, name in sets.items() if self._sets.get(name)}
        made = {
            label: tuple(self._cases(name, options) for name in there.values())
            for label, options in curves.items()
        }
        return _section(key, title, text, kind, axis, tuple(there), made)

    def over_settings(
        self,
        key: str,
        title: str,
        text: str,
        axis: str,
        folder: str,
        values: Mapping[str, Mapping[str, Any]],
        curves: Mapping[str, Mapping[str, Any]],
    ) -> Section | None:
        """One value on the axis for each setting, on one set; None where that is not there."""
        made = {
            label: tuple(self._cases(folder, {**options, **value}) for value in values.values())
            for label, options in curves.items()
        }
        return _section(key, title, text, "lines", axis, tuple(values), made)

    def _cases(self, folder: str, options: Mapping[str, Any]) -> tuple[ReportCase, ...]:
        options = dict(options)
        policy = options.pop("policy")
        cluster = options.pop("cluster", _SMALL if folder == _SYNTHETIC else "")
        if not options.get("earlier_fits", True):
            del options["earlier_fits"]  # the same simulation, whoever asks for it
        words = [policy, *(f"{key}={value}" for key, value in sorted(options.items())), cluster]
        return tuple(
            ReportCase(
                group=" ".join(word for word in words if word),
                workload=f"{folder}/{name}",
                policy=policy,
                options=options,
                cluster=cluster,
                first=None if folder == _SYNTHETIC else self._first,
            )
            for name in self._sets.get(folder, ())
        )


def _section(
    key: str,
    title: str,
    text: str,
    kind: Kind,
    axis: str,
    values: tuple[str, ...],
    made: Mapping[str, tuple[tuple[ReportCase, ...], ...]],
) -> Section | None:
    if not values or not all(point for points in made.values() for point in points):
        return None
    curves = tuple(Curve(label=label, points=points) for label, points in made.items())
    return Section(key=key, title=title, text=text, kind=kind, axis=axis, values=values, curves=curves)

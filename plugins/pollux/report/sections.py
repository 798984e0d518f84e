"""What the report shows: each section's simulations, as curves over a setting."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pollux.simulate.reproduce import INTERVALS_S, LOADS, Case

Kind = Literal["bars", "lines", "fairness", "timeline"]

_POLICIES = ("tiresias", "optimus", "pollux", "ours")
_ADAPTIVE = ("pollux", "ours")
_HETEROGENEOUS = ("pollux", "sia", "ours")
_KNOBS = (1.0, -1.0, -10.0)
_OPTIONS = {
    "interval_s": "--interval",
    "interference": "--interference",
    "fairness_p": "--p",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a figure: for each value on its axis the simulations whose mean it shows."""

    label: str
    points: tuple[tuple[Case, ...], ...]


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
    def cases(self) -> Iterator[Case]:
        for curve in self.curves:
            for point in curve.points:
                yield from point

    @property
    def command(self) -> str:
        """A command that makes the first of its simulations."""
        return command(next(self.cases))


def command(case: Case) -> str:
    """The ``pollux simulate`` that repeats a case."""
    words = ["pollux simulate --traces TRACES", f"--workload {case.workload}", f"--policy {case.policy}"]
    options = case.options
    words += [f"{flag} {options[key]:g}" for key, flag in _OPTIONS.items() if options.get(key) is not None]
    if options.get("avoid_interference") is not None:
        words.append("--avoid-interference" if options["avoid_interference"] else "--no-avoid-interference")
    if options.get("earlier_fits"):
        words.append("--earlier-fits")
    if case.cluster:
        words.append(f"--cluster {case.cluster}")
    return " ".join(words)


def sections(traces: Path, names: Sequence[str]) -> list[Section]:
    """The sections for which the folder has workloads of these names."""
    here = _Workloads(traces, names)
    found = [
        here.section(
            "policies",
            "Completion times by policy",
            "Mean completion time with tuned requests (philly-1.0) and with the requests of users who tune "
            "nothing (philly-realistic); the adaptive policies use neither. Pollux, Table 2.",
            "bars",
            "requests",
            {"tuned": "philly-1.0", "realistic": "philly-realistic", "synthetic": "synthetic"},
            {name: {"policy": name} for name in _POLICIES},
        ),
        here.section(
            "load",
            "Load",
            "More jobs in the same hours. Pollux, Fig. 8.",
            "lines",
            "load",
            {load: f"philly-{load}" for load in LOADS},
            {name: {"policy": name} for name in _POLICIES},
        ),
        here.sweep(
            "interval",
            "Scheduling interval",
            "Deciding more seldom. Pollux, Fig. 8.",
            "interval (s)",
            {
                f"{seconds:g}": {} if seconds == 60.0 else {"interval_s": seconds}
                for seconds in sorted([60.0, *INTERVALS_S.values()])
            },
        ),
        here.sweep(
            "interference",
            "Interference",
            "Without avoidance: what jobs that span nodes lose where they meet. Pollux, Fig. 8.",
            "share of goodput lost",
            {
                f"{share:.0%}": {"avoid_interference": False, "interference": share}
                for share in (0.0, 0.25, 0.5)
            },
        ),
        here.section(
            "fairness",
            "The fairness knob",
            "Distribution of finish-time fairness rho over jobs; above 1 a job did worse than on its share "
            "alone. Pollux, Fig. 7.",
            "fairness",
            "rho",
            {"": here.first_set},
            {f"pollux, p = {p:g}": {"policy": "pollux", "fairness_p": p} for p in _KNOBS},
        ),
        here.section(
            "fits",
            "Fits of earlier runs",
            "Jobs that start from the fits of finished jobs of their model, against jobs that start from "
            "nothing. Pollux, section 5.3.2.",
            "bars",
            "jobs start from",
            {"": here.first_set},
            {
                f"{name}, {words}": {"policy": name, "earlier_fits": fits}
                for name in _ADAPTIVE
                for fits, words in ((False, "nothing"), (True, "earlier fits"))
            },
        ),
        here.section(
            "time",
            "Over time",
            "GPUs in use and statistical efficiency. Pollux, Figs. 5 and 6.",
            "timeline",
            "hours",
            {"": here.first_set},
            {name: {"policy": name} for name in _ADAPTIVE},
        ),
        here.section(
            "types",
            "Three types of GPU",
            "Sia's cluster of 64 GPUs. Sia, Table 3.",
            "bars",
            "workloads",
            {name: name for name in ("sia-philly", "sia-helios")},
            {name: {"policy": name, "cluster": "sia"} for name in _HETEROGENEOUS},
        ),
    ]
    return [section for section in found if section is not None]


class _Workloads:
    """The workloads of a trace folder that the report uses."""

    def __init__(self, traces: Path, names: Sequence[str]) -> None:
        self._names = names
        self._sets = {
            folder.name: [name for name in names if (folder / f"{name}.csv").is_file()]
            for folder in (traces / "workloads").glob("*/")
        }
        known = [name for name in ("philly-1.0", "synthetic") if self._sets.get(name)]
        self.first_set = known[0] if known else ""

    def section(
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
        return self._section(key, title, text, kind, axis, tuple(there), made)

    def sweep(
        self, key: str, title: str, text: str, axis: str, values: Mapping[str, Mapping[str, Any]]
    ) -> Section | None:
        """One value on the axis for each setting, on the first set, for the adaptive policies."""
        made = {
            policy: tuple(
                self._cases(self.first_set, {"policy": policy, **value}) for value in values.values()
            )
            for policy in _ADAPTIVE
        }
        return self._section(key, title, text, "lines", axis, tuple(values), made)

    def _section(
        self,
        key: str,
        title: str,
        text: str,
        kind: Kind,
        axis: str,
        values: tuple[str, ...],
        made: Mapping[str, tuple[tuple[Case, ...], ...]],
    ) -> Section | None:
        if not values or not all(point for points in made.values() for point in points):
            return None
        curves = tuple(Curve(label=label, points=points) for label, points in made.items())
        return Section(key=key, title=title, text=text, kind=kind, axis=axis, values=values, curves=curves)

    def _cases(self, folder: str, options: Mapping[str, Any]) -> tuple[Case, ...]:
        options = dict(options)
        policy, cluster = options.pop("policy"), options.pop("cluster", "")
        words = [policy, *(f"{key}={value}" for key, value in sorted(options.items()) if value), cluster]
        return tuple(
            Case(
                group=" ".join(word for word in words if word),
                workload=f"{folder}/{name}",
                policy=policy,
                options=options,
                cluster=cluster,
            )
            for name in self._sets.get(folder, ())
        )

"""The published results to reproduce: which simulations they take, and how near ours come."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as document

from pollux.errors import TraceError
from pollux.simulate.runner import Run, load
from pollux.simulate.setup import read_setup, run_settings, uniform
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import decode

LOADS = ("0.5", "1.0", "1.5", "2.0")
INTERVALS_S = {"30s": 30.0, "2m": 120.0, "4m": 240.0, "8m": 480.0}
INTERFERENCE = {"noavoid": (False, 0.0), "inter25": (False, 0.25), "inter50": (False, 0.5)}
SEEDS = (0, 1, 2)
SIA_AVERAGE_S = 0.542 * 3600
"""Sia's published code, run again on sia-philly workload-1."""

REFERENCE_FILE = "reference-results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation of a group.

    It is compared with ``reference_s``, the published mean completion time, or with that of ``peer``, another
    case of ours, or with nothing.
    """

    group: str
    workload: str
    policy: str
    seed: int = 0
    reference_s: float | None = None
    peer: str = ""
    options: Mapping[str, Any]
    cluster: str = ""

    @property
    def name(self) -> str:
        """A file name of its own."""
        return f"{self.group}--{self.workload.replace('/', '-')}--seed{self.seed}".replace(" ", "_")

    def run(self, traces: Path) -> Run:
        """What to simulate; raises TraceError."""
        options = {"avoid_interference": None, "fairness_p": None} | dict(self.options)
        return Run(
            traces=traces,
            workload=load(traces, [self.workload])[0],
            cluster=read_setup(self.cluster) if self.cluster else uniform(16, 4),
            settings=run_settings(policy=self.policy, seed=self.seed, **options),
        )


_Times = Mapping[str, Annotated[float, Field(gt=0)]]
"""Mean completion times in seconds by workload."""


@document(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="ignore", allow_inf_nan=False))
class Published:
    """The published results: by policy and load; of pollux by interval, and by interference."""

    load: Mapping[str, Mapping[str, _Times]]
    interval: Mapping[str, _Times]
    interference: Mapping[str, _Times]

    def at_load(self, policy: str, load: str) -> _Times:
        """Nothing where a folder has no such results."""
        return self.load.get(policy, {}).get(load, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One line of the table. ``ratio`` is ours over the published mean; ``done`` of ``cases`` were run.

    Where jobs were left ``unfinished`` the means tell nothing, and no bar is met.
    """

    group: str
    done: int
    cases: int
    ratio: float | None
    worst: float | None
    bar: float
    each: bool
    unfinished: int = 0

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None while something is left to run."""
        if self.unfinished:
            return False
        value = self.worst if self.each else self.ratio
        return None if value is None or self.done < self.cases else value <= self.bar


def cases(traces: Path) -> list[Case]:
    """All simulations that the published results take, cheap ones first; raises TraceError."""
    reference = _reference(traces)
    return [
        *_baselines(reference),
        *_policy("sia", traces, reference),
        *_policy("ours", traces, reference),
        *_pollux(reference),
    ]


def _reference(traces: Path) -> Published:
    path = traces / REFERENCE_FILE
    try:
        return decode(Published, path.read_bytes())
    except (OSError, DocumentError) as error:
        raise TraceError(f"{path}: cannot be read: {error}; it holds the published results") from None


def _baselines(reference: Published) -> Iterator[Case]:
    for policy in ("tiresias", "optimus"):
        for load_name in LOADS:
            for name, seconds in reference.at_load(policy, load_name).items():
                yield Case(
                    group=f"{policy} load {load_name}",
                    workload=f"philly-{load_name}/{name}",
                    policy=policy,
                    reference_s=seconds,
                    options={},
                )


def _pollux(reference: Published) -> Iterator[Case]:
    for seed in SEEDS:
        for load_name in LOADS:
            if seed and load_name != "1.0":
                continue
            for name, seconds in reference.at_load("pollux", load_name).items():
                yield _case(f"pollux load {load_name}", f"philly-{load_name}/{name}", seconds, seed, {})
        if seed == 0:
            for key, interval_s in reversed(INTERVALS_S.items()):
                for name, seconds in reference.interval.get(key, {}).items():
                    options = {"interval_s": interval_s}
                    yield _case(f"pollux interval {key}", f"philly-1.0/{name}", seconds, 0, options)
        for key, (avoid, share) in INTERFERENCE.items():
            for name, seconds in reference.interference.get(key, {}).items():
                options = {"avoid_interference": avoid, "interference": share}
                yield _case(f"pollux {key}", f"philly-1.0/{name}", seconds, seed, options)


def _case(group: str, workload: str, seconds: float, seed: int, options: Mapping[str, Any]) -> Case:
    return Case(
        group=group, workload=workload, policy="pollux", seed=seed, reference_s=seconds, options=options
    )


def _policy(policy: str, traces: Path, reference: Published) -> Iterator[Case]:
    """Sia on its own cluster; ours there and on Pollux's."""
    if policy == "ours":
        for load_name in ("1.0", "0.5", "1.5", "2.0"):
            for name, seconds in reference.at_load("pollux", load_name).items():
                for fits in (False, True):
                    yield Case(
                        group=f"ours load {load_name}" + (" with earlier fits" if fits else ""),
                        workload=f"philly-{load_name}/{name}",
                        policy="ours",
                        reference_s=seconds,
                        options={"earlier_fits": fits},
                    )
    for folder in ("sia-philly", "sia-helios"):
        for path in sorted((traces / "workloads" / folder).glob("workload-*.csv")):
            published = (folder, path.stem) == ("sia-philly", "workload-1")
            sias = Case(
                group=f"sia on {folder}" + (" 1" if published else ""),
                workload=f"{folder}/{path.stem}",
                policy="sia",
                reference_s=SIA_AVERAGE_S if published else None,
                options={},
                cluster="sia",
            )
            ours = replace(sias, group=f"ours on {folder}", policy="ours", reference_s=None, peer=sias.name)
            yield sias if policy == "sia" else ours


def judge(group: str, parts: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """How near a group's mean completion times come to the published ones; ``results`` are by case.

    A workload counts with the median of its seeds.
    """
    averages = {name: each["avg_jct_s"] for name, each in results.items() if each["avg_jct_s"]}
    by_workload: dict[str, list[Case]] = {}
    for case in parts:
        by_workload.setdefault(case.workload, []).append(case)
    ours, published = [], []
    for same in by_workload.values():
        values = [averages[case.name] for case in same if case.name in averages]
        reference_s = same[0].reference_s or averages.get(same[0].peer)
        if values and reference_s is not None:
            ours.append(median(values))
            published.append(reference_s)
    baseline = group.startswith(("tiresias", "optimus"))
    ratios = [mine / theirs for mine, theirs in zip(ours, published, strict=True)]
    return Verdict(
        group=group,
        done=sum(case.name in results for case in parts),
        cases=len(parts),
        ratio=fmean(ours) / fmean(published) if ours else None,
        worst=max((1 + abs(ratio - 1) for ratio in ratios), default=None),
        bar=1.001 if baseline else _bar(group),
        each=baseline,
        unfinished=sum(results[case.name]["unfinished"] for case in parts if case.name in results),
    )


def _bar(group: str) -> float:
    if group.startswith("ours load 1.0"):
        return 0.86 if "fits" in group else 0.92
    return 0.95 if group.startswith("ours") else 1.03

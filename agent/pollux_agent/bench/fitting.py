"""Measurements behind ``pollux-agent bench fit``."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pollux_agent.bench.peers import ask_peer
from pollux_agent.bench.traces import APPLICATIONS, StepTime, observations, step_times
from pollux_agent.model.fit import Observation, fit_throughput, objective
from pollux_agent.model.throughput import ThroughputParams, step_time

POINTS, SPLITS = 50, 5
"""Configurations that are fitted, and fixed ways to hold half of the placements out."""
TIMED_SPLITS, PAIRS = 1, 5
"""Splits of each application that the fits are timed on, and how often each side fits them in turn."""

_PLACEMENTS, _SCALABILITY = "placements.csv", "scalability.csv"


@dataclass(frozen=True, slots=True)
class Split:
    """Half of the placements of a file, of which ``fitted`` configurations are known, and the other half."""

    fitted: list[Observation]
    held_out: list[StepTime]


def split(rows: Sequence[StepTime], seed: int) -> Split:
    """Half of the placements of each number of nodes held out, 50 configurations of the others kept."""
    rng = np.random.default_rng(seed)
    by_nodes: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        by_nodes[row.num_nodes].add(row.placement)
    kept: set[str] = set()
    spare = 0
    for _, names in sorted(by_nodes.items()):
        order = sorted(names)
        half, spare = divmod(len(order) + spare, 2)
        kept |= {order[index] for index in rng.permutation(len(order))[:half]}
    known = observations(row for row in rows if row.placement in kept)
    chosen = [known[index] for index in rng.permutation(len(known))[:POINTS]]
    return Split(chosen, [row for row in rows if row.placement not in kept])


def mean_error(params: ThroughputParams, rows: Sequence[StepTime]) -> float:
    """Mean relative error of the predicted optimizer steps."""
    nodes, replicas, local, seconds = np.array(
        [(row.num_nodes, row.num_replicas, row.local_batch_size, row.step_s) for row in rows]
    ).T
    return float(np.mean(np.abs(step_time(params, nodes, replicas, local) / seconds - 1.0)))


def measure(traces: Path, peer: Path | None, told: Callable[[str], None]) -> dict[str, Any]:
    """The figures of the command; those against AdaptDL only where its interpreter ``peer`` is given."""
    apps: dict[str, dict[str, float]] = {}
    timed: list[list[Observation]] = []
    for application in APPLICATIONS:
        told(f"{application}: {SPLITS} splits of its placements")
        apps[application], splits = _errors(traces, application)
        timed += splits[:TIMED_SPLITS]
    figures: dict[str, Any] = {
        "apps": apps,
        "in_sample_mape": statistics.fmean(app["in_sample_mape"] for app in apps.values()),
        "fit_ms_median": 1e3 * statistics.median(_fit_s(profile) for profile in timed for _ in range(PAIRS)),
    }
    if peer is not None:
        figures |= _against_adaptdl(timed, peer, told)
    return figures


def _errors(traces: Path, application: str) -> tuple[dict[str, float], list[list[Observation]]]:
    """Mean errors of one application over the splits, and what was fitted in each split of its placements."""
    errors: dict[str, list[float]] = defaultdict(list)
    profiles = []
    scaled = step_times(traces, application, _SCALABILITY)
    for seed in range(SPLITS):
        placed = split(step_times(traces, application, _PLACEMENTS), seed)
        profiles.append(placed.fitted)
        params = _fit(placed.fitted)
        errors["mape"].append(mean_error(params, placed.held_out))
        errors["in_sample_mape"].append(mean_error(params, [_row(seen) for seen in placed.fitted]))
        errors["extrapolated_mape"].append(mean_error(params, scaled))
        large = split(scaled, seed)
        errors["scalability_mape"].append(mean_error(_fit(large.fitted), large.held_out))
    return {name: statistics.fmean(values) for name, values in errors.items()}, profiles


def _fit(profile: Sequence[Observation]) -> ThroughputParams:
    params = fit_throughput(profile)
    assert params is not None
    return params


def _fit_s(profile: Sequence[Observation]) -> float:
    """Seconds of one core."""
    began = time.process_time()
    fit_throughput(profile)
    return time.process_time() - began


def _row(seen: Observation) -> StepTime:
    return StepTime(
        placement="",
        num_nodes=seen.num_nodes,
        num_replicas=seen.num_replicas,
        local_batch_size=seen.local_batch_size,
        step_s=seen.optim_step_time_s,
        sync_s=seen.optim_step_time_s - (seen.accum_step_time_s or 0.0),
    )


def _against_adaptdl(
    profiles: Sequence[list[Observation]], peer: Path, told: Callable[[str], None]
) -> dict[str, float]:
    """Time as a ratio, median over alternating runs, and how much larger our objective is at worst.

    Times are seconds of one core, so that what else runs on the machine counts little.
    """
    script = Path(__file__).with_name("peer_fit.py")
    ratios, excess = [], []
    for number in range(PAIRS):
        told(f"AdaptDL and ours in turn: {number + 1} of {PAIRS}")
        question = {"repeat": 2, "profiles": [[asdict(seen) for seen in profile] for profile in profiles]}
        answers = ask_peer(peer, script, question)
        for profile, answer in zip(profiles, answers, strict=True):
            _fit_s(profile)
            ratios.append(_fit_s(profile) / answer.pop("seconds")[-1])
            excess.append(objective(_fit(profile), profile) - objective(ThroughputParams(**answer), profile))
    return {"adaptdl_ratio": statistics.median(ratios), "objective_excess_max": max(excess)}

"""The last recorded decision as Prometheus metrics: whichever API server is asked gives the same answer."""

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from pollux.act import ActionOutcome
from pollux.errors import ConfigError, SnapshotError
from pollux.figures import decision_figures
from pollux.record import Records
from pollux.settings import Settings
from pollux.snapshot import Decision, Snapshot
from pollux.store import ModelStore
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import decode, from_plain

MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LastCycle:
    """Figures of the last cycle that decided, by the names of :func:`decision_figures`, and each step's
    seconds; both empty before the first decision."""

    deployment: str
    figures: Mapping[str, float]
    wall_clock_s: Mapping[str, float]


def last_cycle(config: Settings, records: Records) -> LastCycle:
    """Read the state folder, or MLflow where the folder holds no decision (it is another machine's).

    Raises SnapshotError for a record that cannot be read, StoreUnavailable and StoreError as MLflow does.
    """
    folder = records.newest_result()
    if folder is not None:
        figures, wall_clock_s = _from_folder(folder)
        return LastCycle(deployment=config.deployment, figures=figures, wall_clock_s=wall_clock_s)
    found = None
    if config.mlflow_tracking_uri:
        found = ModelStore(
            config.mlflow_tracking_uri,
            experiment=config.experiment,
            decisions_experiment=config.decisions_recorded_in,
            deployment=config.deployment,
        ).newest_decision()
    figures, wall_clock_s = found or ({}, {})
    return LastCycle(deployment=config.deployment, figures=figures, wall_clock_s=wall_clock_s)


def _from_folder(folder: Path) -> tuple[Mapping[str, float], Mapping[str, float]]:
    try:
        snapshot = decode(Snapshot, (folder / "snapshot.json").read_bytes())
        decision = decode(Decision, (folder / "decision.json").read_bytes())
        result = json.loads((folder / "result.json").read_bytes())
        outcomes = [from_plain(ActionOutcome, plain) for plain in result["actions"]]
        wall_clock_s = {str(step): float(seconds) for step, seconds in result["wall_clock_s"].items()}
        left_out = len(result["left_out"])
    except (OSError, DocumentError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"{folder}: {error}; the record of this decision cannot be read") from None
    return decision_figures(snapshot, decision, outcomes, left_out=left_out), wall_clock_s


def exposition(cycle: LastCycle, accept: str = "") -> tuple[bytes, str]:
    """The metrics in the text format that the reader's Accept header asks for, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CycleCollector(cycle))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


_PLAIN = (
    ("decision", "decision", "Number of the last decision recorded."),
    ("time_unix_s", "decision_timestamp_seconds", "When that decision's snapshot was taken."),
    ("interval_s", "interval_seconds", "Time between two cycles as set."),
    ("objective", "objective", "The policy's objective for the allocation that it chose."),
    ("gpus", "gpus", "GPUs that were to be given out."),
    ("gpus_allocated", "gpus_allocated", "GPUs given to jobs."),
    ("gpus_idle", "gpus_idle", "GPUs given to no job."),
    ("restarts", "restarts", "Restarts so far of the jobs that are active."),
    ("predicted_goodput", "predicted_goodput", "Sum of the goodput predicted, useful samples a second."),
)
_LABELLED = (
    (
        "jobs",
        "state",
        "Active jobs: with GPUs, in the queue, or left out of the decision.",
        {"running": "jobs_running", "waiting": "jobs_waiting", "left_out": "jobs_left_out"},
    ),
    (
        "changes",
        "outcome",
        "Changes of allocations that the decision asked for.",
        {"done": "changes_done", "delayed": "changes_delayed", "failed": "changes_failed"},
    ),
)
_STEPS = "Seconds of each step of the cycle."


class _CycleCollector(Collector):
    """All values are those of one decision, so they are gauges."""

    def __init__(self, cycle: LastCycle) -> None:
        self._cycle = cycle

    def collect(self) -> Iterator[Metric]:
        figures, deployment = self._cycle.figures, self._cycle.deployment
        for name, metric, text in _PLAIN:
            if name in figures:
                family = GaugeMetricFamily(f"pollux_{metric}", text, labels=["deployment"])
                family.add_metric([deployment], figures[name])
                yield family
        for metric, label, text, names in _LABELLED:
            family = GaugeMetricFamily(f"pollux_{metric}", text, labels=["deployment", label])
            for value, name in names.items():
                if name in figures:
                    family.add_metric([deployment, value], figures[name])
            yield family
        family = GaugeMetricFamily("pollux_cycle_seconds", _STEPS, labels=["deployment", "step"])
        for step, seconds in self._cycle.wall_clock_s.items():
            family.add_metric([deployment, step], seconds)
        yield family


def may_read(config: Settings, authorization: str) -> bool:
    """Whether an Authorization header holds the bearer token; always False without one set.

    Raises ConfigError where the token's file cannot be read, or holds one that could be guessed.
    """
    if config.metrics_token is None:
        return False
    try:
        token = config.metrics_token.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"POLLUX_METRICS_TOKEN: {config.metrics_token} cannot be read: {error}") from None
    if len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"POLLUX_METRICS_TOKEN: {config.metrics_token} holds {len(token)} characters, at least "
            f"{MIN_TOKEN_CHARS} are needed; `openssl rand -hex 32` makes one"
        )
    scheme, _, given = authorization.partition(" ")
    same = secrets.compare_digest(given.strip().encode(), token.encode())
    return scheme.lower() == "bearer" and same

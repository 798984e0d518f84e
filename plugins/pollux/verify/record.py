"""Reading a state folder. Nothing in it is trusted: what cannot be read becomes a problem, never an error.

A worker that was killed may leave half a line at the end of its file; that alone is a remark.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as document

from pollux.cluster.base import ClusterJob
from pollux.errors import ConfigError
from pollux.snapshot import Decision, Snapshot
from pollux.verify.export import AirflowExport
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, DriverEvent, Event, JobFolder, Outcome, decode
from pollux_agent.records import read_regular

EXPORT_FILE = "airflow-export.json"
EXPECTATIONS_FILE = "expectations.json"

_EVENTS_FILE = re.compile(r"events-(\d{1,9})-(\d{1,9})\.jsonl")
_OUTCOME_FILE = re.compile(r"\d{1,9}-\d{1,9}\.json")
T = TypeVar("T")


@document(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Expectation:
    """What one job of a run has to reach: the last value of ``metric`` in MLflow against ``target``."""

    name: str
    dag_run_id: str
    metric: str
    target: float
    higher_is_better: bool


@document(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Expectations:
    """``expectations.json``: the jobs that a run was started for, written before the first is submitted.

    ``cluster`` is the kind that it ran on. On Kubernetes GPUs have no numbers of their node's: each job
    counts its own from 0.
    """

    schema: Literal[1] = 1
    cluster: Literal["local", "kubernetes"] = "local"
    jobs: Annotated[tuple[Expectation, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLog:
    """The events of one rank in one incarnation, in the order of writing; never empty."""

    incarnation: int
    rank: int
    events: tuple[Event, ...]

    @property
    def node(self) -> str:
        return self.events[0].node

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(slot for event in self.events for slot in event.slots)

    @property
    def start_unix_s(self) -> float:
        return self.events[0].t_unix_s

    @property
    def end_unix_s(self) -> float:
        return max(event.t_unix_s for event in self.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job's files. ``workers`` and ``outcomes`` are in order of incarnation and rank."""

    job: ClusterJob
    driver: tuple[DriverEvent, ...] = ()
    workers: tuple[WorkerLog, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    completion: Outcome | None = None

    @property
    def name(self) -> str:
        return self.job.spec.name

    def incarnations(self) -> Mapping[int, tuple[WorkerLog, ...]]:
        """The ranks of each incarnation, in order."""
        found: dict[int, tuple[WorkerLog, ...]] = {}
        for worker in self.workers:
            found[worker.incarnation] = (*found.get(worker.incarnation, ()), worker)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What one cycle saved."""

    snapshot: Snapshot
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A whole state folder. ``problems`` name what could not be read, ``remarks`` what was tolerated."""

    root: Path
    jobs: tuple[JobRecord, ...] = ()
    decisions: Mapping[int, DecisionRecord]
    export: AirflowExport | None = None
    expectations: Expectations | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def read_record(root: Path) -> RunRecord:
    """Read a state folder.

    Raises ConfigError when ``root`` is no state folder.
    """
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; name the state folder of a stopped stack")
    if not (root / "jobs").is_dir():
        raise ConfigError(f"{root}: no state folder (it has no jobs/); name the one that a stack wrote to")
    reader = _Reader(root)
    jobs = [job for folder in _folders(root / "jobs") if (job := reader.job(folder))]
    decisions = {
        number: decision
        for folder in _folders(root / "decisions")
        if (number := reader.number(folder)) is not None and (decision := reader.decision(folder, number))
    }
    export = reader.document(root / EXPORT_FILE, AirflowExport, missing_ok=True)
    expectations = reader.document(root / EXPECTATIONS_FILE, Expectations, missing_ok=True)
    return RunRecord(
        root=root,
        jobs=tuple(sorted(jobs, key=lambda job: (job.job.submitted_unix_s, job.job.job_id))),
        decisions=dict(sorted(decisions.items())),
        export=export,
        expectations=expectations,
        problems=tuple(reader.problems),
        remarks=tuple(reader.remarks),
    )


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []


class _Reader:
    """Reads documents under one folder and collects what is wrong with them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self.remarks: list[str] = []

    def job(self, root: Path) -> JobRecord | None:
        folder = JobFolder(root)
        job = self.document(root / "job.json", ClusterJob)
        if job is None:
            return None
        if job.job_id != root.name:
            self._problem(root / "job.json", f"names job {job.job_id!r}, but lies in {root.name}/")
        workers = []
        for path in root.iterdir():
            if match := _EVENTS_FILE.fullmatch(path.name):
                events = self.lines(path, Event)
                if events:
                    workers.append(
                        WorkerLog(incarnation=int(match[1]), rank=int(match[2]), events=tuple(events))
                    )
        return JobRecord(
            job=job,
            driver=tuple(self.lines(folder.driver_events, DriverEvent)),
            workers=tuple(sorted(workers, key=lambda worker: (worker.incarnation, worker.rank))),
            outcomes=self.outcomes(folder.outcomes),
            completion=self.document(folder.complete, Outcome, missing_ok=True),
        )

    def outcomes(self, folder: Path) -> tuple[Outcome, ...]:
        paths = [path for path in folder.glob("*") if _OUTCOME_FILE.fullmatch(path.name)]
        found = [outcome for path in paths if (outcome := self.document(path, Outcome))]
        return tuple(sorted(found, key=lambda outcome: (outcome.incarnation, outcome.rank)))

    def number(self, folder: Path) -> int | None:
        """A decision's number from its folder's name; 0 is an allocation that no decision made."""
        if re.fullmatch(r"\d{1,12}", folder.name) and int(folder.name) > 0:
            return int(folder.name)
        self._problem(folder, "no decision's number")
        return None

    def decision(self, folder: Path, number: int) -> DecisionRecord | None:
        if not (folder / "decision.json").exists():
            self.remarks.append(f"decision {number} was never made: its cycle was skipped or stopped")
            return None
        snapshot = self.document(folder / "snapshot.json", Snapshot)
        decision = self.document(folder / "decision.json", Decision)
        if snapshot is None or decision is None:
            return None
        if {snapshot.decision, decision.decision} != {number}:
            self._problem(folder, f"holds snapshot {snapshot.decision} and decision {decision.decision}")
            return None
        return DecisionRecord(snapshot=snapshot, decision=decision)

    def document(self, path: Path, kind: type[T], *, missing_ok: bool = False) -> T | None:
        try:
            return decode(kind, read_regular(path))
        except FileNotFoundError:
            if not missing_ok:
                self._problem(path, "missing")
        except OSError as error:
            self._problem(path, str(error.strerror or error))
        except DocumentError as error:
            self._problem(path, str(error))
        return None

    def lines(self, path: Path, kind: type[T]) -> list[T]:
        try:
            parts = read_regular(path).split(b"\n")
        except OSError as error:
            self._problem(path, str(error.strerror or error))
            return []
        documents: list[T] = []
        for number, part in enumerate(parts, start=1):
            if not part:
                continue
            try:
                documents.append(decode(kind, part))
            except DocumentError as error:
                if number == len(parts):
                    self.remarks.append(f"{path.relative_to(self.root)}: the last line was cut off")
                else:
                    self._problem(path, f"line {number}: {error}")
        return documents

    def _problem(self, path: Path, what: str) -> None:
        self.problems.append(f"{path.relative_to(self.root)}: {what[:300]}")

"""Simulations kept in a folder, one file each, so that a run of many goes on where it stopped."""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from pollux import __version__
from pollux.errors import ConfigError
from pollux.simulate.fields import Count, Figure, check_columns
from pollux.simulate.files import write_document, write_whole
from pollux.simulate.reproduce import Case
from pollux.simulate.runner import News, simulate


class _Fairness(BaseModel):
    max: Figure | None
    unfair_fraction: Figure | None


class _Job(BaseModel):
    name: str
    application: str
    submitted_s: Figure
    started_s: Figure | None
    completed_s: Figure | None
    finished: bool
    restarts: Count
    gpu_s: Figure
    rho: Figure | None

    @model_validator(mode="after")
    def _check(self) -> "_Job":
        if self.finished and (self.started_s is None or self.completed_s is None):
            raise ValueError("a finished job has begun and ended")
        return self


class _Timeline(BaseModel):
    time_s: tuple[Figure, ...]
    gpus: tuple[Figure, ...]
    running: tuple[Figure, ...]
    waiting: tuple[Figure, ...]
    efficiency: tuple[Figure, ...]

    @model_validator(mode="after")
    def _check(self) -> "_Timeline":
        check_columns(self.time_s, self.gpus, self.running, self.waiting, self.efficiency)
        return self


class _Result(BaseModel):
    """What every kept entry of results.json has, so that one which somebody damaged is told from it."""

    avg_jct_s: Figure | None
    p99_jct_s: Figure | None
    makespan_s: Figure | None
    restarts_per_job: Figure
    gpu_hours_per_job: Figure
    restart_share: Figure
    unfinished: Count
    ftf: _Fairness
    jobs: tuple[_Job, ...] = ()
    timeline: _Timeline = _Timeline(time_s=(), gpus=(), running=(), waiting=(), efficiency=())


class _Kept(BaseModel):
    result: _Result


def read_kept(folder: Path, *, without: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Each simulation's entry of results.json by the case's name; OSError.

    What is no such entry, less the fields ``without``, is left out, and so simulated again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {}
    for path in sorted(folder.glob("*--seed*.json")):
        try:
            text = path.read_bytes()
            read = _Kept.model_validate_json(text).result.model_fields_set
        except (ValidationError, IsADirectoryError):
            continue
        if _Result.model_fields.keys() - read <= set(without):
            kept[path.stem] = dict(json.loads(text)["result"])
    return kept


def claim(folder: Path, traces: Path, option: str) -> None:
    """Note of what, and by which version, the folder keeps simulations.

    Raises ConfigError if those are of other traces, or of what has changed since; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note, mine = folder / "traces.txt", f"pollux {__version__}, traces {_digest(traces)}"
    if not note.is_file():
        write_whole(note, f"{mine}\n{traces.resolve()}\n")
    theirs, _, where = note.read_text(encoding="utf-8", errors="replace").partition("\n")
    if theirs != mine:
        raise ConfigError(
            f"{option}: has simulations of other traces, or of these before they or pollux changed "
            f"({' '.join((theirs, where.strip()))[:300]}), and --traces {traces} has now: {mine}; "
            "name another folder, or delete that one"
        )


def _digest(traces: Path) -> str:
    """What tells one folder of traces from another, wherever it is."""
    digest = sha256()
    files = [path for part in ("apps", "workloads") for path in (traces / part).rglob("*.csv")]
    for path in sorted(path for path in files if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(traces)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def simulate_and_keep(
    traces: Path,
    cases: Sequence[Case],
    folder: Path,
    *,
    processes: int | None,
    news: News,
    without: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Run the cases and keep each as soon as it ends, less the fields ``without``.

    Raises TraceError, OSError, and what a policy raises.
    """
    done = {}
    runs = [case.run(traces) for case in cases]
    for answer in simulate(runs, processes=processes, news=news) if runs else ():
        case = cases[answer.number]
        figures = {key: value for key, value in answer.result.items() if key not in without}
        write_document(folder / f"{case.name}.json", {"result": figures, "timing": answer.timing})
        done[case.name] = figures
    return done

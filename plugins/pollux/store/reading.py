"""Reading what a job's agent wrote: nothing in it is trusted."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pollux.cluster.base import JobIdentity
from pollux_agent.errors import DocumentError
from pollux_agent.model.throughput import is_sane
from pollux_agent.protocol import MAX_REPORT_CHARS, Report, decode

MAX_ABS_VALUE = 1e300
"""SQL stores give infinity back as 1.8e308, so figures that large are taken for it."""

_FIGURES = ("noise_scale", "mean_restart_s", "first_start_s", "progress", "target_progress", "goodput")
_KNOWN_SCHEMA = 1
_MAX_REMARK = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job's MLflow run and its report, None where there is none to go by; ``remarks`` say why.

    ``identity`` is of its task, None where the run does not tell.
    ``skewed``: its agent is newer than this scheduler, so that its report is there but cannot be read.
    """

    run_id: str
    identity: JobIdentity | None = None
    report: Report | None = None
    remarks: tuple[str, ...] = ()
    skewed: bool = False


def read_report(job_id: str, text: str | None) -> tuple[Report | None, tuple[str, ...]]:
    """The report with everything absurd left out, and remarks, in words, about what was wrong with it."""
    if text is None:
        return None, ("it has not reported yet",)
    if len(text) > MAX_REPORT_CHARS:
        return None, (
            f"not fitted yet: its report has {len(text)} characters, above the limit of {MAX_REPORT_CHARS}",
        )
    schema = _schema(text)
    if schema is None:
        return None, ("not fitted yet: its report is no JSON",)
    if schema > _KNOWN_SCHEMA:
        return None, (
            f"its agent is newer than this scheduler: its report has schema {schema}, schemas up to "
            f"{_KNOWN_SCHEMA} are known here; it keeps what it has until the scheduler is upgraded",
        )
    try:
        report = decode(Report, text)
    except DocumentError as error:
        return None, (_short(f"not fitted yet: its report is malformed: {error}"),)
    if report.job_id != job_id:
        return None, (_short(f"not fitted yet: its report belongs to job {report.job_id!r}"),)
    return _sane(report)


def is_newer(text: str | None) -> bool:
    """Whether a report has a schema that only a newer scheduler reads."""
    if text is None or len(text) > MAX_REPORT_CHARS:
        return False
    return (_schema(text) or 0) > _KNOWN_SCHEMA


def _schema(text: str) -> int | None:
    """The schema's number, 0 where JSON has none that is a number, None for what is no JSON."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError):
        return None
    schema = plain.get("schema") if isinstance(plain, dict) else None
    return schema if isinstance(schema, int) else 0


def _sane(report: Report) -> tuple[Report, tuple[str, ...]]:
    remarks = []
    fits = {gpu_type: fit for gpu_type, fit in report.fits.items() if is_sane(fit)}
    if len(fits) < len(report.fits):
        named = ", ".join(sorted(repr(name) for name in report.fits.keys() - fits.keys()))
        remarks.append(_short(f"not fitted yet for GPU type {named}: the fit in its report is absurd"))
    elif not fits:
        remarks.append("not fitted yet")
    absurd = [name for name in _FIGURES if (getattr(report, name) or 0.0) > MAX_ABS_VALUE]
    if absurd:
        remarks.append(f"absurd in its report and taken as unknown: {', '.join(absurd)}")
    unknown: dict[str, Any] = {name: 0.0 if name == "progress" else None for name in absurd}
    return replace(report, fits=fits, **unknown), tuple(remarks)


def _short(remark: str) -> str:
    return remark if len(remark) <= _MAX_REMARK else remark[: _MAX_REMARK - 3] + "..."

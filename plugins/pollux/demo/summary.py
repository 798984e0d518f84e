"""What the demo says at its end: ``demo-summary.json``, a table, and whether all is well."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from rich.markup import escape
from rich.table import Table

from pollux.demo.jobs import DemoPlan, JobSize
from pollux.verify import Check, JobFigures
from pollux_agent.protocol import DOCUMENT_CONFIG

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Level:
    """From ``t_s``, seconds after the first submission, the job held ``gpus``."""

    t_s: float
    gpus: Count


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobSummary:
    """One job. ``resizes`` are changes between two GPU counts that are not zero; ``moves`` changes of place
    at the same count; ``restart_s`` sums signal to first new step, the first start left out."""

    name: str
    state: str
    jct_s: float
    resizes: Count
    moves: Count
    restart_s: float
    final_metric: float | None
    metric: str
    target: float
    epochs: Count
    mlflow_run_id: str | None
    allocations: tuple[Level, ...]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class CheckSummary:
    """One check of `pollux verify`."""

    name: str
    ok: bool
    explanation: str


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class DemoSummary:
    """``demo-summary.json``. ``total_s`` is the whole run, timing and stack included."""

    schema: Literal[1] = 1
    ok: bool
    jobs: tuple[JobSummary, ...]
    decisions: Count
    double_booked_slots: Count
    peak_memory_bytes: Count
    total_s: float
    num_cores: Count
    state: str
    checks: tuple[CheckSummary, ...]
    warnings: tuple[str, ...] = ()


def job_summaries(
    plan: DemoPlan,
    figures: Sequence[JobFigures],
    *,
    sizes: Mapping[str, JobSize],
    metrics: Mapping[str, float],
) -> tuple[JobSummary, ...]:
    """``metrics`` holds the final metric by job name, as MLflow's file has it."""
    jobs = {job.name: job for job in plan.jobs}
    return tuple(
        JobSummary(
            name=of.name,
            state=of.state,
            jct_s=round(of.jct_s, 2),
            resizes=of.resizes,
            moves=of.moves,
            restart_s=round(of.restart_s, 2),
            final_metric=metrics.get(of.name),
            metric=jobs[of.name].metric,
            target=jobs[of.name].target,
            epochs=sizes[of.name].epochs,
            mlflow_run_id=of.mlflow_run_id,
            allocations=tuple(Level(t_s=round(t, 2), gpus=gpus) for t, gpus in of.allocations),
        )
        for of in figures
        if of.name in jobs
    )


def memory_check(plan: DemoPlan, peak_bytes: int) -> Check:
    """The peak of the stack's memory, the one check whose evidence is not in the state folder."""
    words = f"{peak_bytes / 1e9:.2f} GB at the peak (sum of PSS over the stack's processes, every 5 s)"
    limit = plan.memory_limit_bytes
    if 0 < peak_bytes <= limit:
        return Check(name="memory", ok=True, explanation=words)
    return Check(name="memory", ok=False, explanation=f"{words}; the limit is {limit / 1e9:g} GB")


def summary_table(summary: DemoSummary) -> Table:
    """The jobs as a table."""
    table = Table(title="what became of the jobs")
    for column in ("job", "Airflow", "JCT", "resizes", "lost to restarts", "final metric", "MLflow run"):
        is_text = column in ("job", "Airflow", "MLflow run")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for job in summary.jobs:
        metric = "none" if job.final_metric is None else f"{job.final_metric:.4g}"
        table.add_row(
            escape(job.name),
            escape(job.state),
            f"{job.jct_s:.0f} s",
            str(job.resizes),
            f"{job.restart_s:.1f} s",
            f"{escape(job.metric)} {metric}",
            escape(job.mlflow_run_id or "none"),
        )
    return table

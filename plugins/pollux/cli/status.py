"""``pollux status``: jobs, allocation, goodput and age as a table; also while MLflow is away."""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app
from pollux.cli.opening import StateOption, open_settings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pollux.cluster.base import Cluster, ClusterJob
    from pollux.record import Records
    from pollux.store import JobRecord, ModelStore


@app.command()
def status(
    state: StateOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every two seconds, until Ctrl-C.")] = False,
) -> None:
    """Show the cluster's jobs: GPUs, phase, goodput, progress and age."""
    from pollux.cluster.opening import open_cluster
    from pollux.errors import ClusterError, ConfigError
    from pollux.record import Records
    from pollux.store import ModelStore

    if watch and as_json:
        typer.echo("--watch and --json exclude each other; give one", err=True)
        raise typer.Exit(2)
    config, environ = open_settings(state)
    store = (
        ModelStore(config.mlflow_tracking_uri, experiment=config.experiment, deployment=config.deployment)
        if config.mlflow_tracking_uri
        else None
    )
    records = Records(config.decisions)
    try:
        cluster = open_cluster(config, environ)
        if watch:
            _watch(cluster, store, records)
        elif as_json:
            typer.echo(json.dumps(look(cluster, store, records), sort_keys=True, indent=2))
        else:
            _print(look(cluster, store, records))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except ClusterError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def look(cluster: "Cluster", store: "ModelStore | None", records: "Records") -> dict[str, Any]:
    """What the cluster says of each active job, with what it reported and what the last cycle decided."""
    view = cluster.observe()
    reports, mlflow = _reports(store)
    decision = records.newest_decision()
    decided = decision.jobs if decision else {}
    now = time.time()
    return {
        "nodes": {node.name: node.gpus for node in view.nodes},
        "mlflow": mlflow,
        "jobs": [
            {
                "job_id": job.job_id,
                "name": job.spec.name,
                "phase": job.status.phase,
                "message": _message(job, job.job_id in decided),
                "allocation": dict(job.allocation.placement),
                "held": dict(job.status.held),
                "decision": job.allocation.decision,
                "reason": decided[job.job_id].reason if job.job_id in decided else job.allocation.reason,
                "age_s": round(max(0.0, now - job.submitted_unix_s), 1),
                "restarts": job.status.restarts,
                "mlflow_run_id": job.mlflow_run_id,
                **_reported(reports.get(job.job_id)),
            }
            for job in view.jobs
        ],
    }


def _message(job: "ClusterJob", is_decided: bool) -> str:
    """What the job waits for or does; one without a run is given nothing, so that comes first."""
    if job.status.phase == "waiting" and job.mlflow_run_id is None:
        return "waits for its MLflow run, which a scheduling cycle makes as soon as MLflow answers"
    if job.status.phase == "waiting" and not is_decided and not job.allocation.decision:
        return "waits for the next scheduling cycle: none has run since it was submitted"
    return job.status.message


def _reports(store: "ModelStore | None") -> "tuple[Mapping[str, JobRecord], str]":
    """The reports, and what is to be said about MLflow where they cannot be had."""
    from pollux.errors import StoreError

    if store is None:
        return {}, "MLFLOW_TRACKING_URI is not set, so no goodput is known"
    try:
        return store.reports(), ""
    except StoreError as error:
        return {}, str(error)


def _reported(record: "JobRecord | None") -> dict[str, Any]:
    report = record.report if record else None
    share = None
    if report is not None and report.target_progress:
        share = round(min(1.0, report.progress / report.target_progress), 4)
    return {
        "goodput": report.goodput if report else None,
        "batch_size": report.batch_size if report else None,
        "progress": share,
        "fitted": bool(report and report.fits),
        "remarks": list(record.remarks) if record else [],
    }


def _print(seen: Mapping[str, Any]) -> None:
    from rich.console import Console

    Console().print(_table(seen))


def _watch(cluster: "Cluster", store: "ModelStore | None", records: "Records") -> None:
    """Raises ClusterError if the cluster is away at the beginning; later it is waited for."""
    from rich.live import Live
    from rich.text import Text

    from pollux.errors import ClusterUnavailable

    try:
        with Live(_table(look(cluster, store, records)), auto_refresh=False) as live:
            while True:
                time.sleep(2.0)
                try:
                    live.update(_table(look(cluster, store, records)), refresh=True)
                except ClusterUnavailable as error:
                    live.update(Text(f"waits for the cluster: {error}"), refresh=True)
    except KeyboardInterrupt:
        return


def _table(seen: Mapping[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    total = sum(seen["nodes"].values())
    given = sum(sum(job["allocation"].values()) for job in seen["jobs"])
    table = Table(
        title=f"{given} of {total} GPUs allocated",
        caption=Text(f"MLflow: {seen['mlflow']}") if seen["mlflow"] else None,
    )
    for heading in ("job", "phase", "GPUs", "where", "goodput", "batch", "progress", "age"):
        table.add_column(heading, justify="right" if heading in _RIGHT else "left")
    for job in seen["jobs"]:
        table.add_row(*(Text(cell) for cell in _cells(job)))
    if not seen["jobs"]:
        table.add_row("no active jobs")
    why = [Text(f"{job['name']}: {job['reason'] or job['message']}") for job in seen["jobs"]]
    return Group(table, *why)


_RIGHT = frozenset({"GPUs", "goodput", "batch", "progress", "age"})


def _cells(job: Mapping[str, Any]) -> list[str]:
    placement = job["allocation"]
    return [
        job["name"],
        job["phase"],
        str(sum(placement.values())),
        ", ".join(f"{name}: {gpus}" for name, gpus in sorted(placement.items())) or "-",
        "-" if job["goodput"] is None else f"{job['goodput']:.0f}/s",
        "-" if not job["batch_size"] else str(job["batch_size"]),
        "-" if job["progress"] is None else f"{job['progress']:.0%}",
        _age(job["age_s"]),
    ]


def _age(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

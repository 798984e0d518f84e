"""``pollux cycle``: one scheduling cycle by hand, as the scheduling DAG runs it each minute."""

import json
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import app
from pollux.cli.opening import StateOption, open_settings

if TYPE_CHECKING:
    from pollux.cycle import CycleResult


@app.command()
def cycle(
    state: StateOption = None,
    shadow: Annotated[bool, typer.Option("--shadow", help="Decide and record, but change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run one scheduling cycle now, with the settings of the environment.

    Ends with 1 if the cycle was skipped, because another scheduler is at work, or the cluster or MLflow does
    not answer.
    """
    from pollux.cluster.opening import open_cluster
    from pollux.cycle import run_once
    from pollux.errors import PolluxError
    from pollux.record import Records
    from pollux.store import ModelStore
    from pollux_agent.protocol import to_plain

    config, environ = open_settings(state)
    config = replace(config, shadow=config.shadow or shadow)
    if not config.mlflow_tracking_uri:
        typer.echo("MLFLOW_TRACKING_URI: not set; name the MLflow server that the jobs report to", err=True)
        raise typer.Exit(2)
    store = ModelStore(
        config.mlflow_tracking_uri,
        experiment=config.experiment,
        decisions_experiment=config.decisions_recorded_in,
        deployment=config.deployment,
    )
    try:
        result = run_once(
            open_cluster(config, environ),
            store,
            config,
            now=time.time(),
            holder=f"{config.deployment}/by-hand/{socket.gethostname()}/{os.getpid()}",
            records=Records(config.decisions),
        )
    except PolluxError as error:
        typer.echo(f"the cycle failed: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(to_plain(result), sort_keys=True, indent=2) if as_json else _told(result))
    if result.skipped:
        raise typer.Exit(1)


def _told(result: "CycleResult") -> str:
    """The result in words, a line an action."""
    if result.skipped:
        return f"skipped: {result.skipped}"
    lines = [f"decision {result.decision}, objective {result.objective:.4g}"]
    lines += [f"  {action.job_id}: {action.outcome} {action.message}".rstrip() for action in result.actions]
    lines += [f"  {job_id}: left out, {why}" for job_id, why in result.left_out.items()]
    if not result.actions:
        lines.append("  nothing to change")
    if result.unrecorded:
        lines.append(f"not recorded in MLflow: {result.unrecorded}")
    return "\n".join(lines)

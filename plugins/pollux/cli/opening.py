"""The settings that commands by hand run with: the environment's, filled up from the running stack."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pollux.settings import Settings

DEFAULT_STATE = "state/stack"
StateOption = Annotated[
    Path | None, typer.Option(help="State folder.", show_default=f"POLLUX_STATE, or {DEFAULT_STATE}")
]


def open_settings(state: Path | None) -> "Settings":
    """Settings for ``state``, else POLLUX_STATE, else the stack's usual folder; ends with 2 if wrong.

    MLflow's address comes from the stack's record where MLFLOW_TRACKING_URI is not set.
    """
    from pollux.errors import ConfigError, StackError
    from pollux.settings import settings
    from pollux.stack.record import read_record

    try:
        folder = str(state) if state else os.environ.get("POLLUX_STATE") or DEFAULT_STATE
        config = settings({**os.environ, "POLLUX_STATE": folder})
        record = None if config.mlflow_tracking_uri else read_record(config.state)
    except (ConfigError, StackError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    return replace(config, mlflow_tracking_uri=record.mlflow_url) if record else config

"""The settings that commands by hand run with: the environment's, filled up from the running stack."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pollux.settings import Settings

DEFAULT_STATE = "state/stack"
StateOption = Annotated[
    Path | None, typer.Option(help="State folder.", show_default=f"POLLUX_STATE, or {DEFAULT_STATE}")
]


def open_settings(state: Path | None) -> "tuple[Settings, Mapping[str, str]]":
    """Settings for ``state``, else POLLUX_STATE, else the stack's usual folder, and the variables that they
    and the cluster's come from; ends with 2 if wrong.

    What the environment does not set is as the stack in that folder was started with: the kind of cluster,
    the policy, MLflow's address.
    """
    from pollux.errors import ConfigError, StackError
    from pollux.settings import settings

    try:
        environ = variables(state)
        return settings(environ), environ
    except (ConfigError, StackError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def variables(state: Path | None, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment's over those ``given``, or else those of the stack in the state folder.

    Raises ConfigError and StackError where the stack's record cannot be read.
    """
    folder = str(state) if state else os.environ.get("POLLUX_STATE") or DEFAULT_STATE
    own = {name: value for name, value in os.environ.items() if value}
    return {**(_stack_variables(Path(folder)) if given is None else given), **own, "POLLUX_STATE": folder}


def _stack_variables(state: Path) -> dict[str, str]:
    """The settings of the stack in that folder, with the addresses of its services; none without a stack.

    Raises ConfigError and StackError where its record cannot be read.
    """
    from pollux.stack.record import read_record

    record = read_record(state)
    if record is None:
        return {}
    return {
        **record.plan.settings,
        "MLFLOW_TRACKING_URI": record.mlflow_url,
        "POLLUX_AIRFLOW_URL": record.airflow_url,
        "POLLUX_AIRFLOW_LOGIN": str(record.login),
    }

"""``pollux verify``."""

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import app

PLAIN_WIDTH = 140
"""Columns of the table where there is no terminal to ask."""


@app.command("verify")
def verify_command(
    state: Annotated[Path, typer.Argument(help="State folder of a stack that was stopped.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Recompute from a run's files what it claims: slots, steps, decisions, tasks, MLflow runs.

    Exit code 1 when a check fails, 2 when STATE is no state folder.
    """
    from pollux.errors import ConfigError
    from pollux.policy import decide
    from pollux.verify import read_record, run_checks

    _warn_if_running(state)
    try:
        checks = run_checks(read_record(state), decide)
    except ConfigError as error:
        typer.echo(f"pollux verify: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({"ok": all(c.ok for c in checks), "checks": [asdict(c) for c in checks]}))
    else:
        from rich.console import Console

        from pollux.verify.table import checks_table

        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        Console(width=width).print(checks_table(checks))
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def _warn_if_running(state: Path) -> None:
    from pollux.errors import PolluxError
    from pollux.stack.control import is_running
    from pollux.stack.record import read_record

    with suppress(PolluxError):
        if is_running(read_record(state)):
            typer.echo(
                f"warning: the stack in {state} runs, and what is under way looks wrong; "
                f"stop it first: pollux stack down --state {state}",
                err=True,
            )

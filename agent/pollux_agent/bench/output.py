"""What the bench commands share: the ``--json`` option, and how figures are printed."""

import json
from collections.abc import Mapping
from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def write(figures: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the figures as one JSON object, or ``text`` for a person."""
    typer.echo(json.dumps(figures, sort_keys=True, indent=2) if as_json else text)

"""The ``pollux-agent`` command; each subcommand imports what it needs only when it runs."""

import typer

app = typer.Typer(
    name="pollux-agent",
    help="The training side of Pollux.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """The training side of Pollux."""

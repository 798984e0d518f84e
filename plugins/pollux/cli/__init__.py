"""The ``pollux`` command: one module a subcommand, which imports what it needs only when it runs."""

import typer

app = typer.Typer(
    name="pollux",
    help="Goodput-optimal scheduling of PyTorch training for Airflow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

from pollux.cli import autoscale as autoscale  # noqa: E402
from pollux.cli import bench as bench  # noqa: E402
from pollux.cli import cycle as cycle  # noqa: E402
from pollux.cli import demo as demo  # noqa: E402
from pollux.cli import doctor as doctor  # noqa: E402
from pollux.cli import explain as explain  # noqa: E402
from pollux.cli import local as local  # noqa: E402
from pollux.cli import report as report  # noqa: E402
from pollux.cli import simulate as simulate  # noqa: E402
from pollux.cli import solve as solve  # noqa: E402
from pollux.cli import stack as stack  # noqa: E402
from pollux.cli import status as status  # noqa: E402
from pollux.cli import verify as verify  # noqa: E402

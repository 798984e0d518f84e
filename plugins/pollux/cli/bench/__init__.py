"""``pollux bench``: measurements against the published results and against bounds, one module a command."""

import typer

from pollux.cli import app

bench = typer.Typer(no_args_is_help=True, help="Measure the product: quality, speed and scale.")
app.add_typer(bench, name="bench")

from pollux.cli.bench import kube as kube  # noqa: E402
from pollux.cli.bench import reproduce as reproduce  # noqa: E402
from pollux.cli.bench import resize as resize  # noqa: E402
from pollux.cli.bench import scale as scale  # noqa: E402
from pollux.cli.bench import search as search  # noqa: E402

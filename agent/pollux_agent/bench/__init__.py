"""``pollux-agent bench``: the agent's own measurements, one module a command.

A command imports what it needs only when it runs, and adds itself here by one line.
"""

import typer

bench = typer.Typer(
    help="Measure the agent against its bars, and against a peer where one is installed.",
    no_args_is_help=True,
)

from pollux_agent.bench import efficiency as efficiency  # noqa: E402
from pollux_agent.bench import fit as fit  # noqa: E402
from pollux_agent.bench import overhead as overhead  # noqa: E402
from pollux_agent.bench import reporting as reporting  # noqa: E402
from pollux_agent.bench import restart as restart  # noqa: E402
from pollux_agent.bench import tune as tune  # noqa: E402

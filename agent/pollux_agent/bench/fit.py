"""``pollux-agent bench fit``: how well and how fast the throughput model is fitted to recorded jobs."""

from pathlib import Path
from typing import Annotated

import typer

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write
from pollux_agent.bench.peers import DEFAULT_PEERS, peer_python


@bench.command()
def fit(
    traces: Annotated[Path, typer.Option(help="Folder of the recorded traces, which has apps/.")],
    peers: Annotated[Path, typer.Option(help="The environment that `make peers` made.")] = DEFAULT_PEERS,
    as_json: JsonOption = False,
) -> None:
    """Fit half of the placements of recorded jobs and predict the other half, with AdaptDL beside it."""
    from pollux_agent.bench.fitting import POINTS, SPLITS, measure
    from pollux_agent.errors import DocumentError

    python = peer_python(peers)
    if python is None:
        typer.echo(f"{peers} is not there, so AdaptDL's column is left out; `make peers` makes it", err=True)
    try:
        figures = measure(traces, python, lambda line: typer.echo(line, err=True))
    except DocumentError as error:
        typer.echo(f"pollux-agent bench fit: {error}", err=True)
        raise typer.Exit(2) from None
    lines = [
        f"mean error of a step, {POINTS} points fitted, mean of {SPLITS} splits",
        f"{'':<12} {'fitted':>8} {'held out':>9} {'scalability':>12} {'placements -> scalability':>26}",
    ]
    lines += [
        f"{name:<12} {app['in_sample_mape']:>8.1%} {app['mape']:>9.1%} {app['scalability_mape']:>12.1%}"
        f" {app['extrapolated_mape']:>26.1%}"
        for name, app in figures["apps"].items()
    ]
    lines.append(f"one fit {figures['fit_ms_median']:.1f} ms")
    if python is not None:
        lines.append(
            f"time over AdaptDL's {figures['adaptdl_ratio']:.3f}; objective above AdaptDL's by at most "
            f"{figures['objective_excess_max']:.1e}"
        )
    write(figures, "\n".join(lines), as_json=as_json)

"""``pollux-agent bench reporting``: what a tracking server in a bad mood does to steps."""

from typing import Annotated

import typer

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write

P99_BAR_MS, TOTAL_BAR = 1.0, 1.01


@bench.command()
def reporting(
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a run.")] = 10,
    pairs: Annotated[
        int, typer.Option(min=1, max=50, help="Runs with reports, each beside one without.")
    ] = 5,
    as_json: JsonOption = False,
) -> None:
    """Time steps that report five figures each to a server that is well, slow, busy, broken or silent.

    Fails where the 99th percentile of a step grows by more than 1 ms, the total by more than 1 %, or a figure
    is lost or arrives twice; each is the median over pairs of runs with and without reports.
    """
    from pollux_agent.bench.reporting_runs import MOODS, compare

    figures: dict[str, object] = {}
    failed = False
    for mood in MOODS:
        found = compare(mood, seconds=seconds, pairs=pairs)
        figures |= {
            f"{mood}_p99_added_ms": round(found.p99_added_ms, 3),
            f"{mood}_total_ratio": round(found.total_ratio, 4),
            f"{mood}_lost": found.lost,
            f"{mood}_twice": found.twice,
        }
        failed |= found.p99_added_ms > P99_BAR_MS or found.total_ratio > TOTAL_BAR
        failed |= bool(found.lost or found.twice)
        typer.echo(
            f"{mood}: {found.p99_added_ms:+.2f} ms at the 99th percentile, total x {found.total_ratio:.4f}, "
            f"{found.lost} of {found.sent} figures lost, {found.twice} twice",
            err=True,
        )
    write(figures, "\n".join(f"{name:<24} {value}" for name, value in figures.items()), as_json=as_json)
    raise typer.Exit(int(failed))

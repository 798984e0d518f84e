"""``pollux-agent bench restart``: what a restart costs beside a bare torchrun."""

import statistics
from pathlib import Path
from typing import Annotated

import typer

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write

BAR = 1.5


@bench.command()
def restart(
    pairs: Annotated[int, typer.Option(min=1, max=50, help="Restarts, each beside a bare torchrun.")] = 5,
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Worker processes on this machine.")] = 2,
    slot_share: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Cores of each rank; default: its part of this machine."),
    ] = None,
    example: Annotated[Path | None, typer.Option(help="The digits example, if it is elsewhere.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time the digits example from the signal to the first new step, without the save.

    The bare torchrun beside each restart imports the same and makes one step of the same model. Both have the
    CPU quota of as many slots of a local cluster, from when their workers have torch imported; where control
    groups are not permitted neither has one, and "quota_cores" is 0. Fails where the median ratio is above
    1.5.
    """
    from pollux_agent.bench.restart_runs import bare, example_script, quota
    from pollux_agent.bench.restart_runs import restart as restart_once
    from pollux_agent.errors import DocumentError

    try:
        script = example_script(example)
    except DocumentError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    ratios, counted, saves, bares = [], [], [], []
    quotas = []
    for number in range(pairs):
        with quota(ranks, slot_share) as (members, num_cores):
            if number % 2:
                alone_s = bare(script, ranks, members)
                once = restart_once(script, ranks, members)
            else:
                once = restart_once(script, ranks, members)
                alone_s = bare(script, ranks, members)
        quotas.append(num_cores)
        ratios.append(once.counted_s / alone_s)
        counted.append(once.counted_s)
        saves.append(once.save_s)
        bares.append(alone_s)
        typer.echo(
            f"pair {number + 1}: restart {once.counted_s:.2f} s and {once.save_s:.2f} s for the save, "
            f"torchrun {alone_s:.2f} s",
            err=True,
        )
    figures = {
        "ratio": round(statistics.median(ratios), 3),
        "restart_s": round(statistics.median(counted), 3),
        "save_s": round(statistics.median(saves), 3),
        "bare_s": round(statistics.median(bares), 3),
        "quota_cores": round(min(quotas), 3),
        "pairs": pairs,
    }
    write(figures, "\n".join(f"{name:<12} {value}" for name, value in figures.items()), as_json=as_json)
    raise typer.Exit(int(figures["ratio"] > BAR))

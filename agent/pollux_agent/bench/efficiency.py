"""``pollux-agent bench efficiency``: statistical efficiency as predicted and as recorded."""

from pathlib import Path
from typing import Annotated

import typer

from pollux_agent.bench import bench
from pollux_agent.bench.output import JsonOption, write


@bench.command()
def efficiency(
    traces: Annotated[Path, typer.Option(help="Folder of the recorded traces, which has apps/.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw it: a .png, .svg or .pdf file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare predicted and measured efficiency of recorded trainings, as in Fig. 2 of the Pollux paper."""
    from pollux_agent.bench.efficiencies import compare_all
    from pollux_agent.bench.efficiencies import plot as draw
    from pollux_agent.errors import DocumentError

    try:
        found = compare_all(traces)
        if plot is not None:
            draw(found, plot)
    except DocumentError as error:
        typer.echo(f"pollux-agent bench efficiency: {error}", err=True)
        raise typer.Exit(2) from None
    except (ImportError, OSError, ValueError) as error:
        typer.echo(f"pollux-agent bench efficiency: --plot {plot}: {error}", err=True)
        raise typer.Exit(2) from None
    rows = [
        {
            "application": each.application,
            "predicted_from": each.reference,
            "batch_size": size,
            "measured": round(float(each.measured[size].mean()), 4),
            "predicted": round(float(each.predicted[size].mean()), 4),
            "median_error": round(each.error(size), 4),
        }
        for each in found
        for size in each.measured
    ]
    lines = [f"{'application':<12} {'from M':>7} {'M':>6} {'measured':>9} {'predicted':>10} {'error':>7}"]
    lines += [
        f"{row['application']:<12} {row['predicted_from']:>7} {row['batch_size']:>6} {row['measured']:>9.1%}"
        f" {row['predicted']:>10.1%} {row['median_error']:>7.1%}"
        for row in rows
    ]
    write({"rows": rows}, "\n".join(lines), as_json=as_json)

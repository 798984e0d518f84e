"""``pollux autoscale``: what one recorded training costs on rented nodes, by goodput and by throughput."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli import app

if TYPE_CHECKING:
    from pollux.simulate.autoscale import Rental


@app.command()
def autoscale(
    traces: Annotated[
        Path | None, typer.Option(help="Folder with apps/ and workloads/.", show_default="the synthetic set")
    ] = None,
    application: Annotated[
        str | None,
        typer.Option(help="What is trained.", show_default="imagenet, resnet18 of the synthetic set"),
    ] = None,
    nodes: Annotated[int, typer.Option(help="Most nodes on offer.")] = 16,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs on each of them.")] = 4,
    gpu_type: Annotated[str, typer.Option(help="Type of GPU, by the suffix of its trace files.")] = "gpu",
    interval: Annotated[float, typer.Option(help="Seconds between decisions.")] = 60.0,
    restart_s: Annotated[float, typer.Option(help="Seconds that a restart costs.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Rent nodes for one training, deciding by goodput and by throughput: time, cost and efficiency.

    By goodput as in Pollux section 5.4.1, by throughput after Or et al. (MLSys 2020).
    """
    from rich.console import Console
    from rich.progress import track

    from pollux.errors import TraceError
    from pollux.policy.autoscale import AUTOSCALERS
    from pollux.simulate.autoscale import cloud_settings, rent
    from pollux.simulate.synthetic import synthetic_traces
    from pollux.traces import read_application

    name = application or ("imagenet" if traces else "resnet18")
    try:
        settings = cloud_settings(
            most_nodes=nodes,
            gpus_per_node=gpus_per_node,
            gpu_type=gpu_type,
            interval_s=interval,
            restart_s=restart_s,
        )
        recorded = read_application(traces or synthetic_traces(), name, frozenset({gpu_type}))
        console = Console(stderr=True)
        rentals = [
            rent(recorded, policy, settings)
            for policy in track(AUTOSCALERS, description=f"training {name}", console=console, transient=True)
        ]
    except TraceError as error:
        typer.echo(f"pollux autoscale: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([_plain(rental) for rental in rentals], indent=2))
    else:
        _print(rentals)


def _plain(rental: "Rental") -> dict[str, object]:
    return {
        "policy": rental.policy,
        "application": rental.application,
        "seconds": rental.seconds,
        "node_s": rental.node_s,
        "restarts": rental.restarts,
        "efficiency": round(rental.efficiency, 4),
        "most_nodes": max(moment.nodes for moment in rental.course),
    }


def _print(rentals: "list[Rental]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{rentals[0].application} on rented nodes", title_justify="left")
    for heading in ("by", "hours", "node hours", "restarts", "most nodes", "efficiency"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for rental in rentals:
        table.add_row(
            rental.policy,
            f"{rental.seconds / 3600:.2f}",
            f"{rental.node_s / 3600:.1f}",
            str(rental.restarts),
            str(max(moment.nodes for moment in rental.course)),
            f"{rental.efficiency:.0%}",
        )
    Console().print(table)
    first, last = rentals[0], rentals[-1]
    Console().print(
        f"by {first.policy}: {first.node_s / last.node_s:.2f} x the cost, "
        f"{first.seconds / last.seconds:.2f} x the time of by {last.policy}"
    )

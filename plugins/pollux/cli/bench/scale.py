"""``pollux bench scale``: how long one decision takes on large clusters, and how near the optimum it is."""

import json
from typing import Annotated

import typer

from pollux.cli.bench import bench


@bench.command()
def scale(
    gpus: Annotated[
        str, typer.Option(help="Sizes of clusters, multiples of 64 up to 65536, with commas.")
    ] = "64,512,2048",
    policies: Annotated[str, typer.Option(help="Policies, with commas.")] = "sia,ours",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the snapshots.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects.")] = False,
) -> None:
    """Time one decision, in CPU seconds of one core, on seeded snapshots: three GPU types, 0.6 jobs a GPU.

    lp_s is HiGHS alone on the linear relaxation of the same program, objective_ratio what the decision gains
    against the bound that the relaxation gives.
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table
    from threadpoolctl import threadpool_limits

    from pollux.bench.scale import PROGRAMS, measure
    from pollux.errors import ConfigError

    names = tuple(name.strip() for name in policies.split(",") if name.strip())
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown or not names:
        typer.echo(f"--policies has {', '.join(unknown) or 'none'}; use {' or '.join(PROGRAMS)}", err=True)
        raise typer.Exit(2)
    try:
        sizes = tuple(int(size) for size in gpus.split(","))
    except ValueError:
        typer.echo(f"--gpus is {gpus!r}; give whole numbers with commas, such as 64,512", err=True)
        raise typer.Exit(2) from None
    console = Console(stderr=True)
    rows = []
    try:
        with console.status("measuring"):
            with threadpool_limits(limits=1):
                for row in measure(sizes, policies=names, seed=seed):
                    rows.append(row)
                    console.print(f"{row.gpus} GPUs, {row.jobs} jobs, {row.policy}: {row.decide_s:.3f} s")
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table()
    for name in ("GPUs", "jobs", "policy", "decide s", "LP s", "decide / LP", "objective / bound"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.gpus),
            str(row.jobs),
            row.policy,
            f"{row.decide_s:.3f}",
            f"{row.lp_s:.3f}",
            f"{row.decide_s / row.lp_s:.2f}",
            "-" if row.objective_ratio is None else f"{row.objective_ratio:.5f}",
        )
    Console().print(table)

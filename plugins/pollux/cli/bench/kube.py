"""``pollux bench kube``: a cycle's cost on a large cluster."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.bench import bench

LIMIT_S = 5.0


@bench.command()
def kube(
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Kubeconfig of a cluster for tests. [default: POLLUX_KUBE_CONFIG]")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of 8 GPUs.")] = 256,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that run, of 3 GPUs each.")] = 500,
    changes: Annotated[int, typer.Option(min=0, help="Jobs that each cycle changes.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Cycles to measure.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time a cycle on fake nodes of a real API server: observe, decide and patch. The median is to be at most
    5 s. It makes nodes and a namespace, and removes them again: use a cluster for tests.
    """
    import tempfile

    from rich.console import Console

    from pollux.cluster.k8s import kube_settings
    from pollux.errors import ConfigError, PolluxError
    from pollux.kubebench import GPUS_A_NODE, Size, bench_kube
    from pollux_agent.driver.kube.api import open_api
    from pollux_agent.errors import PolluxAgentError

    if jobs * 3 > nodes * GPUS_A_NODE or -(-jobs // nodes) * 3 >= GPUS_A_NODE:
        typer.echo(f"jobs: {jobs} jobs of 3 GPUs leave no room on {nodes} nodes; at most 2 a node", err=True)
        raise typer.Exit(2)
    size = Size(nodes=nodes, jobs=jobs, changes=min(changes, jobs), rounds=rounds)
    progress = Console(stderr=True)
    try:
        api = open_api(kubeconfig or kube_settings().config)
        with (
            tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder,
            progress.status("starts") as status,
        ):
            timings = bench_kube(
                api, size, Path(folder), lambda what, share: status.update(f"{what}: {share:.0%}")
            )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except (PolluxError, PolluxAgentError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    figures = timings.figures()
    ok = figures["total_s"] <= LIMIT_S and not timings.not_patched
    if as_json:
        typer.echo(json.dumps({"ok": ok, "limit_s": LIMIT_S, **figures}))
    else:
        for name, value in figures.items():
            typer.echo(f"{name:15} {value:10.3f}")
        typer.echo(f"{'ok' if ok else 'too slow'}: at most {LIMIT_S} s in all")
    raise typer.Exit(0 if ok else 1)

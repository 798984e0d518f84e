"""``pollux bench kube``: a cycle's cost on a large cluster."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pollux.cli.bench import bench

if TYPE_CHECKING:
    from pollux.kubebench import Size

LIMIT_S = 5.0


@bench.command()
def kube(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(help="Kubeconfig of a cluster for tests.", show_default="POLLUX_KUBE_CONFIG"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of 8 GPUs.")] = 256,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that run, of 3 GPUs each.")] = 500,
    changes: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Jobs that each cycle changes; give several.", show_default="50, 500"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Cycles to measure for each of them.")] = 5,
    policy: Annotated[
        str, typer.Option(help="Who decides; the population search is for small clusters.")
    ] = "ours",
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time a cycle on fake nodes of a real API server and a real MLflow server: observe, decide and patch.
    The median is to be at most 5 s with the first number of changes, and the API calls are bounded with any.
    It makes nodes and a namespace, and removes them again: use a cluster for tests.
    """
    import tempfile

    from rich.console import Console

    from pollux.cluster.k8s import kube_settings
    from pollux.errors import ConfigError, PolluxError
    from pollux.kubebench import GPUS_A_NODE, Size, bench_kube, figures
    from pollux_agent.driver.kube.api import open_api
    from pollux_agent.errors import PolluxAgentError

    if jobs * 3 > nodes * GPUS_A_NODE or -(-jobs // nodes) * 3 >= GPUS_A_NODE:
        typer.echo(f"jobs: {jobs} jobs of 3 GPUs leave no room on {nodes} nodes; at most 2 a node", err=True)
        raise typer.Exit(2)
    wanted = tuple(dict.fromkeys(min(number, jobs) for number in changes or (50, 500)))
    size = Size(nodes=nodes, jobs=jobs, changes=wanted, rounds=rounds, policy=policy)
    progress = Console(stderr=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was made is removed then too
    try:
        api = open_api(kubeconfig or kube_settings().config)
        with (
            tempfile.TemporaryDirectory(prefix="pollux-bench-") as folder,
            progress.status("starts") as status,
        ):
            cycles = bench_kube(
                api, size, Path(folder), lambda what, share: status.update(f"{what}: {share:.0%}")
            )
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except (PolluxError, PolluxAgentError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    found = {number: figures(rounds) for number, rounds in cycles.items()}
    over = _over(found, size)
    if as_json:
        typer.echo(json.dumps({"ok": not over, "over": over, "changes": found}))
    else:
        typer.echo(f"{'changes':12}" + "".join(f"{number:>10}" for number in found))
        for name in next(iter(found.values())):
            typer.echo(f"{name:12}" + "".join(f"{column[name]:10.3f}" for column in found.values()))
        typer.echo("\n".join(over) or "ok")
    raise typer.Exit(1 if over else 0)


def _over(found: Mapping[int, Mapping[str, float]], size: "Size") -> list[str]:
    """What is above its limit, in words."""
    over = []
    for number, column in found.items():
        limits = {"calls_too_many": 0.0, "not_patched": 0.0}
        if number == size.changes[0]:
            limits["total_s"] = LIMIT_S
        over += [
            f"with {number} changes: {name} is {column[name]:g}, at most {limit:g}"
            for name, limit in limits.items()
            if column[name] > limit
        ]
    return over

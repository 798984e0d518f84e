"""``pollux bench resize``: a resize by phase, on the local cluster and on Kubernetes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli.bench import bench


@bench.command()
def resize(
    rounds: Annotated[int, typer.Option(min=1, help="Each one grows and shrinks the job.")] = 3,
    local: Annotated[bool, typer.Option(help="On a local cluster of its own.")] = True,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="On a Kubernetes cluster too, found as `pollux demo` does.")
    ] = False,
    kubeconfig: Annotated[
        Path | None, typer.Option(envvar="KUBECONFIG", help="A cluster with two nodes that have GPUs.")
    ] = None,
    kube_scripts: Annotated[
        Path | None,
        typer.Option(envvar="POLLUX_KUBE", help="Else a folder with up.sh and node-up.sh, which start one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time resizes of a real training, from the patch of its allocation to its first new step."""
    import tempfile

    from pollux.demo.jobs import quick_plan
    from pollux.demo.kube import KubeChoice
    from pollux.errors import ConfigError, PolluxError
    from pollux.resizebench import PHASES, medians, resizes_on_kubernetes, resizes_on_local
    from pollux.stack.record import StackPlan
    from pollux_agent.errors import PolluxAgentError

    def say(line: str) -> None:
        typer.echo(line, err=True)

    plan, figures = quick_plan(), {}
    with tempfile.TemporaryDirectory(prefix="pollux-resize-") as name:
        folder = Path(name)
        scripts = StackPlan(state=folder).scripts
        try:
            if kubernetes:
                choice = KubeChoice(kubeconfig=kubeconfig, scripts=kube_scripts)
                choice.check()
            if local:
                (folder / "local").mkdir()
                found = resizes_on_local(
                    plan, state=folder / "local", scripts=scripts, rounds=rounds, say=say
                )
                figures["local"] = medians(found)
            if kubernetes:
                (folder / "kube").mkdir()
                found = resizes_on_kubernetes(
                    plan, choice, state=folder / "kube", scripts=scripts, rounds=rounds, say=say
                )
                figures["kubernetes"] = medians(found)
        except ConfigError as error:
            say(str(error))
            raise typer.Exit(2) from None
        except (PolluxError, PolluxAgentError) as error:
            say(str(error))
            raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(figures))
        return
    typer.echo(f"{'seconds':<12}" + "".join(f"{column:>12}" for column in figures))
    for phase in (*PHASES, "total"):
        typer.echo(f"{phase:<12}" + "".join(f"{column[phase]:12.2f}" for column in figures.values()))

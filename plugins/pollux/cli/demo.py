"""``pollux demo``."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from pollux.cli import app

PLAIN_WIDTH = 140
"""Columns of the tables where there is no terminal to ask."""


@app.command("demo")
def demo_command(
    state: Annotated[Path, typer.Option(help="The demo's state folder; a former demo's is replaced.")] = Path(
        "state/demo"
    ),
    summary: Annotated[Path, typer.Option(help="Where the summary goes.")] = Path("demo-summary.json"),
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-allocation.png"),
    minutes: Annotated[
        float | None, typer.Option(min=0.5, max=60, help="How long each job would last alone.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two short jobs and a decision every 5 s instead.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="The name of one job that shall train alone.")] = None,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="On a Kubernetes cluster instead of the local one.")
    ] = False,
    kubeconfig: Annotated[
        Path | None, typer.Option(envvar="KUBECONFIG", help="With --kubernetes: a cluster with GPU nodes.")
    ] = None,
    kube_scripts: Annotated[
        Path | None,
        typer.Option(envvar="POLLUX_KUBE", help="Else a folder with up.sh and node-up.sh, which start one."),
    ] = None,
) -> None:
    """Three real trainings share a small cluster under Airflow; the run checks itself.

    Exit code 1 unless every check holds, 2 when the state folder is not the demo's or no cluster is named.
    """
    from dataclasses import replace

    from rich.console import Console

    from pollux.demo.jobs import demo_plan, quick_plan
    from pollux.demo.kube import KubeChoice
    from pollux.demo.run import Outputs, run_demo
    from pollux.errors import ConfigError, PolluxError
    from pollux_agent.errors import PolluxAgentError

    plan = quick_plan() if quick else demo_plan()
    if minutes is not None:
        plan = replace(plan, seconds_alone=minutes * 60)
    if only is not None:
        try:
            plan = plan.only(only)
        except ConfigError as error:
            _fail(error, 2)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt_once)
    try:
        done = run_demo(
            plan,
            state=state,
            outputs=Outputs(summary=summary.absolute(), picture=picture.absolute()),
            console=Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH),
            kubernetes=KubeChoice(kubeconfig=kubeconfig, scripts=kube_scripts) if kubernetes else None,
        )
    except ConfigError as error:
        _fail(error, 2)
    except (PolluxError, PolluxAgentError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left running\n")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if done.ok else 1)


def _interrupt_once(signum: int, frame: object) -> None:
    """The first signal ends the demo; later ones must not disturb the clearing up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(error: Exception, code: int) -> None:
    sys.stderr.write(f"\nthe demo failed: {error}\n")
    raise typer.Exit(code) from None

"""The ``pollux-agent`` command; each subcommand imports what it needs only when it runs."""

import os
import time

import typer

from pollux_agent.bench import bench

app = typer.Typer(
    name="pollux-agent",
    help="The training side of Pollux.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


@app.callback()
def main() -> None:
    """The training side of Pollux."""


@app.command()
def launch() -> None:
    """Run the workers of one node, as told by the POLLUX_ variables; a driver starts this.

    As a container's first process it is sent signals that have no default action, also before torch is there.
    """
    import signal
    import sys

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from pollux_agent.errors import PolluxAgentError
    from pollux_agent.lifeline import die_with_parent
    from pollux_agent.protocol import JobSpec, decode
    from pollux_agent.settings import worker_settings
    from pollux_agent.torch.warm import check_settings, prepare_environment, warm_up

    try:
        os.environ["POLLUX_LAUNCHED_UNIX_S"] = str(time.time())
        settings = worker_settings()
        die_with_parent(settings.parent_pid if settings else None)
        checked = check_settings(settings)
        prepare_environment(checked)
        warm_up()
        from pollux_agent.torch.launcher import launch as run_workers

        spec = decode(JobSpec, checked.folder.spec.read_bytes())
    except (PolluxAgentError, OSError) as error:
        typer.echo(f"pollux-agent launch: {error}", err=True)
        raise typer.Exit(2) from None
    run_workers(checked, spec)


@app.command()
def drive() -> None:
    """Drive one job on Kubernetes: the operator starts this in the job's driver pod."""
    import logging
    import os
    from pathlib import Path

    logging.basicConfig(level=logging.INFO, format="[driver] %(message)s")
    from pollux_agent.driver.kube.api import open_api
    from pollux_agent.driver.kube.documents import JOB_DIR, NAMESPACE_VARIABLE, POD_VARIABLE
    from pollux_agent.driver.kube.drive import drive as run_driver
    from pollux_agent.errors import PolluxAgentError
    from pollux_agent.protocol import JobFolder

    try:
        status = run_driver(
            open_api(),
            namespace=os.environ[NAMESPACE_VARIABLE],
            pod=os.environ[POD_VARIABLE],
            folder=JobFolder(Path(os.environ.get("POLLUX_JOB_DIR", JOB_DIR))),
        )
    except KeyError as error:
        typer.echo(f"pollux-agent drive: {error.args[0]} is not set; the operator starts this", err=True)
        raise typer.Exit(2) from None
    except (PolluxAgentError, OSError) as error:
        typer.echo(f"pollux-agent drive: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


if __name__ == "__main__":
    app()

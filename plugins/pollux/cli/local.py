"""``pollux local``: the local cluster's service, and its jobs by hand."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app

if TYPE_CHECKING:
    from pollux.cluster.base import ClusterJob
    from pollux.cluster.local import LocalCluster

local = typer.Typer(help="The local cluster: nodes and slots of this machine.", no_args_is_help=True)
app.add_typer(local, name="local")

DEFAULT_STATE = Path("state/stack")
DIGITS = Path("agent/examples/digits.py")
StateOption = Annotated[Path, typer.Option(help="State folder of the cluster.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JobArgument = Annotated[str, typer.Argument(help="The job's id.")]


@local.command()
def serve(
    state: StateOption = DEFAULT_STATE,
    cluster: Annotated[
        Path | None, typer.Option(help="Cluster file.", show_default="STATE/cluster.json")
    ] = None,
    scripts: Annotated[
        Path | None,
        typer.Option(help="Where relative script paths begin.", show_default="POLLUX_SCRIPTS, or here"),
    ] = None,
    slot_cap: Annotated[float, typer.Option(min=0.01, max=1.0, help="Most of a core that a slot is.")] = 1.0,
    grace: Annotated[float, typer.Option(min=0.1, help="Seconds to checkpoint in before SIGKILL.")] = 30.0,
    report_interval: Annotated[float, typer.Option(min=0.1, help="Seconds between workers' reports.")] = 30.0,
    checkpoint_interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between periodic checkpoints.")
    ] = 30.0,
) -> None:
    """Own drivers and workers as processes, until Ctrl-C or SIGTERM."""
    import logging

    from pollux.local.serve import ServeOptions
    from pollux.local.serve import serve as run
    from pollux.settings import settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    with _explained():
        read = settings({**os.environ, "POLLUX_STATE": str(state)})
        options = ServeOptions(
            state=state.absolute(),
            cluster=cluster,
            scripts=scripts or read.scripts or Path.cwd(),
            slot_cap=slot_cap,
            grace_s=grace,
            report_interval_s=report_interval,
            checkpoint_interval_s=checkpoint_interval,
            mlflow_tracking_uri=read.mlflow_tracking_uri,
        )
        run(options)


@local.command()
def jobs(
    state: StateOption = DEFAULT_STATE,
    every: Annotated[bool, typer.Option("--all", help="Also the jobs that are over.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List nodes and jobs."""
    from pollux_agent.protocol import to_plain

    with _explained():
        view = _cluster(state).every_job() if every else _cluster(state).observe()
    lines = [f"{node.name}: {node.gpus} slots" for node in view.nodes]
    lines += [_line(job) for job in view.jobs] or ["no jobs"]
    _write(as_json, to_plain(view), "\n".join(lines))


@local.command()
def submit(
    spec: Annotated[Path, typer.Argument(help="A job spec as JSON.")],
    state: StateOption = DEFAULT_STATE,
    job_id: Annotated[str, typer.Option(show_default="made from the spec's name")] = "",
    fresh: Annotated[bool, typer.Option(help="Start over instead of from the checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Submit a job by hand; it waits until it is given GPUs."""
    from pollux.cluster.base import JobIdentity
    from pollux.cluster.identity import job_id as make_id
    from pollux_agent.protocol import JobSpec, decode

    with _explained():
        job_spec = decode(JobSpec, _spec_file(spec))
        identity = JobIdentity(
            deployment="cli", dag_id="cli", run_id=job_id or job_spec.name, task_id="submit"
        )
        name = job_id or make_id(identity, job_spec.name)
        job = _cluster(state).submit(name, identity=identity, spec=job_spec, run_id=None, fresh=fresh)
    _show(job, as_json=as_json)


@local.command()
def allocate(
    job_id: JobArgument,
    placement: Annotated[str, typer.Argument(help="node-0=2,node-1=1; empty for none.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Give a job GPUs by hand; the scheduler, if it runs, may decide otherwise."""
    from pollux_agent.protocol import Allocation

    with _explained():
        wanted = _placement(placement)
        cluster = _cluster(state)
        number = cluster.next_decision()
        allocation = Allocation(decision=number, placement=wanted, reason="by hand")
        cluster.patch_allocation(
            job_id, expected=cluster.job(job_id).allocation.decision, allocation=allocation
        )
        job = cluster.job(job_id)
    _show(job, as_json=as_json)


@local.command()
def stop(
    job_id: JobArgument,
    state: StateOption = DEFAULT_STATE,
    now: Annotated[bool, typer.Option(help="Without a checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """End a job, after a checkpoint unless --now."""
    with _explained():
        job = _cluster(state).stop(job_id, "failed" if now else "success")
    _show(job, as_json=as_json)


@local.command()
def logs(
    job_id: JobArgument,
    state: StateOption = DEFAULT_STATE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job is over.")] = False,
) -> None:
    """Print what a job's workers printed."""
    from pollux.cluster.base import FINAL_PHASES

    cursor = ""
    with _explained():
        cluster = _cluster(state)
        while True:
            is_over = cluster.job(job_id).status.phase in FINAL_PHASES
            chunk = cluster.logs(job_id, cursor)
            cursor = chunk.cursor
            for line in chunk.lines:
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
            if not chunk.lines and (is_over or not follow):
                return
            if not chunk.lines:
                time.sleep(0.5)


@local.command()
def bench(
    script: Annotated[
        Path, typer.Option(help="The training to measure with; it must take --epochs.")
    ] = DIGITS,
    seconds: Annotated[float, typer.Option(min=5, help="How long to measure each run.")] = 20.0,
    slot_cap: Annotated[float, typer.Option(min=0.01, max=1.0, help="Most of a core that a slot is.")] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """Show that four slots beat one and that a neighbour disturbs little; exit code 1 if not."""
    from dataclasses import asdict

    from rich.progress import Progress

    from pollux.local.bench import MAX_SLOWDOWN, MIN_SPEEDUP
    from pollux.local.bench import bench as run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _explained():
        if not script.is_file():
            raise FileNotFoundError(f"script: there is no file {str(script)!r}; name one with --script")
        with Progress(transient=True, disable=as_json or not sys.stderr.isatty()) as progress:
            task = progress.add_task("starts", total=1.0)

            def follow(what: str, share: float) -> None:
                progress.update(task, description=what, completed=share)

            result = run(script=script.resolve(), seconds=seconds, slot_cap=slot_cap, follow=follow)
    plain = {
        **asdict(result),
        "speedup": result.speedup,
        "slowdown": result.slowdown,
        "ok": result.ok,
    }
    text = (
        f"four slots are {result.speedup:.2f} x as fast as one (at least {MIN_SPEEDUP}): "
        f"{result.four_slots_s:.1f} s instead of {result.one_slot_s:.1f} s to the same progress\n"
        f"a neighbour slows a job by {100 * result.slowdown:.1f} % (at most {100 * MAX_SLOWDOWN:.0f} %)"
    )
    _write(as_json, plain, text)
    raise typer.Exit(0 if result.ok else 1)


def _spec_file(path: Path) -> bytes:
    from pollux.errors import ConfigError

    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"SPEC: {path} cannot be read ({error}); name a job spec as JSON") from None


def _cluster(state: Path) -> "LocalCluster":
    from pollux.cluster.local import LocalCluster

    return LocalCluster(state.absolute() / "local.sock")


def _placement(text: str) -> dict[str, int]:
    from pollux.errors import ConfigError

    placement = {}
    for part in filter(None, text.split(",")):
        node, _, gpus = part.partition("=")
        if not gpus.isdecimal() or int(gpus) < 1:
            raise ConfigError(f"placement: {part!r} is no NODE=GPUS with GPUs of 1 or more")
        placement[node] = int(gpus)
    return placement


def _line(job: "ClusterJob") -> str:
    held = ", ".join(f"{node} x {gpus}" for node, gpus in job.status.held.items()) or "-"
    return f"{job.job_id}  {job.status.phase}  {held}  {job.status.message}"


def _show(job: "ClusterJob", *, as_json: bool) -> None:
    from pollux_agent.protocol import to_plain

    _write(as_json, to_plain(job), _line(job))


def _write(as_json: bool, plain: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(plain) if as_json else text) + "\n")


@contextmanager
def _explained() -> Iterator[None]:
    """Errors as one line and an exit code: 2 for wrong input, 1 for the rest."""
    from pollux.errors import PolluxError, Refused
    from pollux_agent.errors import PolluxAgentError

    try:
        yield
    except (PolluxError, PolluxAgentError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        wrong_input = isinstance(error, ValueError | Refused | FileNotFoundError)
        raise typer.Exit(2 if wrong_input else 1) from None

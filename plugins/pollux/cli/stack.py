"""``pollux stack``: Airflow, MLflow and the local cluster as one stack on this machine."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pollux.cli import app
from pollux.errors import ConfigError, StackError

if TYPE_CHECKING:
    from pollux.stack.record import StackRecord

stack = typer.Typer(
    help="Airflow, MLflow and the local cluster as one stack on this machine.", no_args_is_help=True
)
app.add_typer(stack, name="stack")

StateOption = Annotated[Path, typer.Option(help="State folder of the stack.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

DEFAULT_STATE = Path("state/stack")


@stack.command()
def up(
    state: StateOption = DEFAULT_STATE,
    detach: Annotated[
        bool, typer.Option(help="Return when the stack is ready; it runs until `down`.")
    ] = False,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file: nodes and slots.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between scheduling cycles.")] = 60.0,
    slot_cap: Annotated[float | None, typer.Option(help="Most of a core that one slot may be.")] = None,
    report_interval: Annotated[float | None, typer.Option(help="Seconds between jobs' reports.")] = None,
    checkpoint_interval: Annotated[
        float | None, typer.Option(help="Seconds between jobs' periodic checkpoints.")
    ] = None,
    dags: Annotated[Path | None, typer.Option(help="DAGs folder.", show_default="the project's")] = None,
    airflow_port: Annotated[int | None, typer.Option(show_default="a free one")] = None,
    mlflow_port: Annotated[int | None, typer.Option(show_default="a free one")] = None,
    databases: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with the database URLs of `airflow` and `mlflow`.", show_default="SQLite"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start the stack, or say that it runs; without --detach it runs until Ctrl-C."""
    from pollux.stack import control
    from pollux.stack.progress import StartProgress
    from pollux.stack.record import StackPlan, read_record
    from pollux_agent.errors import DocumentError
    from pollux_agent.protocol import from_plain

    plain: dict[str, Any] = {
        "state": state.absolute(),
        "cluster": cluster,
        "interval_s": interval,
        "slot_cap": slot_cap,
        "report_interval_s": report_interval,
        "checkpoint_interval_s": checkpoint_interval,
        "airflow_port": airflow_port,
        "mlflow_port": mlflow_port,
        "databases": databases,
        "settings": _settings(os.environ),
        **({"dags": dags} if dags else {}),
    }
    signal.signal(signal.SIGTERM, _interrupt)
    was_running = False
    try:
        plan = from_plain(StackPlan, plain)
        was_running = control.is_running(read_record(plan.state))
        with StartProgress(enabled=not as_json and not was_running) as progress:
            record = control.up(plan, tethered=not detach, follow=progress)
    except (ConfigError, DocumentError, StackError) as error:
        _fail(error)
    except KeyboardInterrupt:
        if not was_running:
            _stop(state)
        raise typer.Exit(1) from None
    _show(record, as_json=as_json, was_running=was_running)
    if not detach and not was_running:
        _until_interrupted(record)


_STACKS_OWN = frozenset(
    {"state", "interval_s", "scripts", "mlflow_tracking_uri", "mlflow_url", "airflow_url", "airflow_login"}
)
_PATHS = frozenset({"POLLUX_METRICS_TOKEN", "POLLUX_KUBE_CONFIG", "POLLUX_KUBE_POD_TEMPLATE"})
_MAY_BE_SECRET = frozenset({"driver_env"})


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that the stack is started with, so that commands by hand have the same ones later on."""
    from pollux.cluster.k8s import KubeSettings
    from pollux.settings import Settings

    names = [f"POLLUX_{field.upper()}" for field in Settings.__dataclass_fields__.keys() - _STACKS_OWN]
    given = {name: environ[name] for name in names if environ.get(name)}
    if given.get("POLLUX_CLUSTER") == "kubernetes":
        fields = KubeSettings.__dataclass_fields__.keys() - _MAY_BE_SECRET
        kube = {name: environ.get(name, "") for name in (f"POLLUX_KUBE_{field.upper()}" for field in fields)}
        kube["POLLUX_KUBE_CONFIG"] = kube["POLLUX_KUBE_CONFIG"] or _one_file(environ.get("KUBECONFIG", ""))
        given |= {name: value for name, value in kube.items() if value}
    return {name: str(Path(value).absolute()) if name in _PATHS else value for name, value in given.items()}


def _one_file(kubeconfig: str) -> str:
    """KUBECONFIG where it names one file, else nothing."""
    return "" if os.pathsep in kubeconfig else kubeconfig


@stack.command()
def down(state: StateOption = DEFAULT_STATE) -> None:
    """Stop the stack and all of its processes; nothing to stop is fine."""
    if not _stop(state):
        sys.stdout.write(f"nothing runs in {state}\n")


@stack.command()
def status(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """What runs, and its memory; exit code 1 unless the stack is ready, all of it answers, and its disk has
    room: on a full one the record is of before.
    """
    from pollux.stack import control
    from pollux.stack.record import is_full, read_record

    try:
        record = read_record(state)
    except (ConfigError, StackError) as error:
        _fail(error)
    if record is None or not control.is_running(record):
        phase = (
            record.phase if record is not None and record.phase in ("stopped", "failed") else "not running"
        )
        _write(as_json, {"phase": phase, "error": record.error if record else ""}, f"{state}: {phase}")
        raise typer.Exit(1)
    _show(record, as_json=as_json, was_running=True)
    well = record.phase == "ready" and all(part.ready for part in record.components.values())
    well = well and not is_full(record.plan.state)
    raise typer.Exit(0 if well else 1)


def _show(record: "StackRecord", *, as_json: bool, was_running: bool) -> None:
    from pollux.stack.memory import stack_processes, total_bytes
    from pollux.stack.record import is_full

    memory_bytes = total_bytes(stack_processes(record))
    plain = {
        "phase": record.phase,
        "airflow_url": record.airflow_url,
        "mlflow_url": record.mlflow_url,
        "login": str(record.login),
        "state": str(record.plan.state),
        "memory_bytes": memory_bytes,
        "services": {
            name: {"ready": part.ready, "restarts": part.restarts, "pid": part.process and part.process.pid}
            for name, part in record.components.items()
        },
    }
    lines = [
        f"the stack is {record.phase}" + (" (it was running already)" if was_running else ""),
        f"  Airflow   {record.airflow_url}",
        f"  log-in    {_login(record, secret=sys.stdout.isatty() and not was_running)}",
        f"  MLflow    {record.mlflow_url}",
        f"  state     {record.plan.state}",
        f"  memory    {memory_bytes / 1e9:.2f} GB (sum of PSS)",
    ]
    lines += [
        f"  {name}: ended and was started again {part.restarts} times; see {part.log}"
        for name, part in record.components.items()
        if part.restarts
    ]
    lines += [
        f"  {name}: does not answer; see {part.log}"
        for name, part in record.components.items()
        if record.phase == "ready" and not part.ready
    ]
    if is_full(record.plan.state):
        lines.append("  the disk of the state folder is full: free some space there, and all of it goes on")
    _write(as_json, plain, "\n".join(lines))


def _login(record: "StackRecord", *, secret: bool) -> str:
    """Where the log-in is; with ``secret`` (a person's terminal) the password too."""
    if not secret:
        return f"user and password are in {record.login}"
    user, password = next(iter(json.loads(record.login.read_text()).items()))
    return f"user {user}, password {password} (kept in {record.login})"


def _until_interrupted(record: "StackRecord") -> None:
    from pollux.stack.processes import is_alive, wait_until
    from pollux.stack.record import read_record

    sys.stdout.write("  Ctrl-C stops it\n")
    sys.stdout.flush()
    try:
        while is_alive(record.supervisor):
            wait_until(lambda: not is_alive(record.supervisor), 3600)
    except KeyboardInterrupt:
        _stop(record.plan.state)
        return
    last = read_record(record.plan.state)
    if last is not None and last.phase == "failed":
        _fail(StackError(last.error))


def _stop(state: Path) -> bool:
    """Stop with a message, deaf to further Ctrl-C, so that nothing stays behind."""
    from pollux.stack import control
    from pollux.stack.record import read_record

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        record = read_record(state)
        if record is not None and record.phase != "stopped":
            sys.stdout.write("stopping the stack ...\n")
            sys.stdout.flush()
        stopped = control.down(state)
    except (ConfigError, StackError) as error:
        _fail(error)
    finally:
        signal.signal(signal.SIGINT, before)
    if stopped:
        sys.stdout.write("stopped\n")
    return stopped


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _write(as_json: bool, plain: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(plain) if as_json else text) + "\n")


def _fail(error: Exception) -> None:
    """End with 2 where the input is wrong, with 1 where something else is."""
    sys.stderr.write(f"error: {error}\n")
    raise typer.Exit(2 if isinstance(error, ValueError) else 1)

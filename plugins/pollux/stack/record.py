"""The stack's documents: what was asked for, and ``stack.json``, which says what runs."""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

import pollux
from pollux.errors import ConfigError, StackError
from pollux.local.nodes import read_nodes
from pollux.settings import MAX_INTERVAL_S
from pollux.stack.databases import databases
from pollux.stack.processes import ProcessId, this_boot
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, decode, encode
from pollux_agent.records import write_atomic

Port = Annotated[int, Field(ge=1, le=65535)]
ROOM_BYTES = 1_000_000
MAX_SOCKET_BYTES = 107
"""Longest path of a Unix socket on Linux."""

StackPhase = Literal["starting", "ready", "stopping", "stopped", "failed"]


def _project() -> Path:
    """The project's top folder, where the package is installed in editable mode."""
    return Path(pollux.__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class StackPlan:
    """What a person asked ``pollux stack up`` for.

    ``cluster`` is a cluster file to use instead of the default nodes, ``slot_cap`` the largest fraction of
    a core that one slot may be, ``report_interval_s`` and ``checkpoint_interval_s`` how often jobs report and
    write checkpoints; ports are the kernel's choice unless given. ``databases`` is a file with the URLs of
    Airflow's and MLflow's databases; without it they are SQLite files in the state folder. ``settings`` are
    more variables for the services, such as those of a Kubernetes cluster, which takes the place of the local
    one; no secrets, since ``stack.json`` holds them.
    """

    state: Path
    cluster: Path | None = None
    dags: Path = Field(default_factory=lambda: _project() / "dags")
    scripts: Path = Field(default_factory=lambda: _project() / "agent" / "examples")
    interval_s: Annotated[float, Field(ge=1, le=MAX_INTERVAL_S)] = 60.0
    slot_cap: Annotated[float, Field(ge=0.01, le=1)] | None = None
    report_interval_s: Annotated[float, Field(ge=0.1)] | None = None
    checkpoint_interval_s: Annotated[float, Field(ge=0.1)] | None = None
    airflow_port: Port | None = None
    mlflow_port: Port | None = None
    databases: Path | None = None
    settings: Mapping[str, str] = Field(default_factory=dict)

    @property
    def has_local_cluster(self) -> bool:
        """Whether jobs run on this stack's own local cluster."""
        return self.settings.get("POLLUX_CLUSTER", "local") == "local"

    def check(self) -> None:
        """Raise ConfigError for a folder that is not there, a bad cluster file, or an impossible path."""
        for option, path in (("--state", self.state), ("--dags", self.dags), ("--cluster", self.cluster)):
            if path is not None and not _is_text(path):
                raise ConfigError(f"{option}: {str(path)!r} is no UTF-8; name a path that is")
        for option, path, hint in (
            ("--dags", self.dags, "the folder of the project's DAG files"),
            ("--scripts", self.scripts, "the folder of training scripts"),
        ):
            if not path.is_dir():
                raise ConfigError(f"{option}: {path} is no folder; name {hint}")
        if self.cluster is not None and not self.cluster.is_file():
            raise ConfigError(f"--cluster: {self.cluster} is no file; name a cluster file")
        if self.cluster is not None:
            read_nodes(self.cluster)
        databases(self.state, self.databases)
        if self.airflow_port is not None and self.airflow_port == self.mlflow_port:
            raise ConfigError(f"--mlflow-port: {self.mlflow_port} is Airflow's already; name another")
        socket_bytes = len(os.fsencode(self.state.absolute() / "local.sock"))
        if socket_bytes > MAX_SOCKET_BYTES:
            raise ConfigError(
                f"--state: {self.state} makes a socket path of {socket_bytes} bytes, at most "
                f"{MAX_SOCKET_BYTES} are possible; name a folder with a shorter path"
            )


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ComponentState:
    """One service: its main process (leader of its own session), how often it was restarted, its log."""

    process: ProcessId | None = None
    ready: bool = False
    restarts: Annotated[int, Field(ge=0)] = 0
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class StackRecord:
    """``stack.json``. ``mark`` is in the environment of every process; ``login`` is the log-in file.

    ``boot`` is the run of the machine in which its processes have their numbers; ``execution_port`` is where
    Airflow's task processes report.
    """

    schema: Literal[1] = 1
    phase: StackPhase
    plan: StackPlan
    mark: str
    airflow_port: Port
    execution_port: Port
    mlflow_port: Port
    login: Path
    supervisor: ProcessId
    guard: ProcessId | None = None
    components: Mapping[str, ComponentState] = Field(default_factory=dict)
    error: str = ""
    since_unix_s: float = 0.0
    boot: str = ""

    @property
    def airflow_url(self) -> str:
        return f"http://127.0.0.1:{self.airflow_port}"

    @property
    def execution_url(self) -> str:
        return f"http://127.0.0.1:{self.execution_port}/execution/"

    @property
    def mlflow_url(self) -> str:
        return f"http://127.0.0.1:{self.mlflow_port}"

    @property
    def leaders(self) -> tuple[ProcessId, ...]:
        """Main processes of the services; none after another start of the machine."""
        if self.boot not in ("", this_boot()):
            return ()
        return tuple(state.process for state in self.components.values() if state.process is not None)


def _is_text(path: Path) -> bool:
    """Whether the path can be written down in JSON; one of arbitrary bytes cannot."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def make_state_folder(state: Path) -> None:
    """Make the folder, for its owner alone, if it is not there; raises ConfigError where that cannot be."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--state: {state} cannot be made ({error}); name a folder of yours") from None
    if not os.access(state, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"--state: nothing can be written in {state}; name a folder of yours")


def is_full(state: Path) -> bool:
    """Whether the disk of the folder has no room for as much as a small file."""
    try:
        return shutil.disk_usage(state).free < ROOM_BYTES
    except OSError:
        return False


def record_path(state: Path) -> Path:
    return state / "stack.json"


def read_record(state: Path) -> StackRecord | None:
    """The record of the stack in ``state``; None if none was ever started there.

    Raises ConfigError where it cannot be read, such as under a path that is no folder, and StackError where
    the file is not a record.
    """
    try:
        return decode(StackRecord, record_path(state).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"--state: {state} cannot be read ({error}); name a stack's state folder") from None
    except DocumentError as error:
        raise StackError(f"{record_path(state)}: {error}; stop its processes and remove the file") from None


def write_record(record: StackRecord) -> None:
    write_atomic(record_path(record.plan.state), encode(record).encode())


def _lock_path(state: Path) -> Path:
    return state / "stack.lock"


def lock_file(state: Path) -> int | None:
    """Which file the lock is, None if there is none: another one means that the folder was removed."""
    try:
        return _lock_path(state).stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextmanager
def stack_lock(state: Path) -> Iterator[bool]:
    """Hold the state folder for one supervisor and its guard; yields False if another has it."""
    handle = os.open(_lock_path(state), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)

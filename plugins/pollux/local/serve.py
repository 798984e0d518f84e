"""``pollux local serve``: one service a state folder, on a Unix socket that only its owner can open."""

import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pollux.cluster.local import short_path
from pollux.errors import ConfigError, StackError
from pollux.local.app import make_app
from pollux.local.nodes import read_nodes
from pollux.local.service import LocalService
from pollux.local.slots import Slots
from pollux.local.store import JobStore
from pollux.local.workers import Site, WorkerOptions
from pollux_agent.driver import Timing
from pollux_agent.driver.quota import available_cores, open_cgroups, slot_share

logger = logging.getLogger(__name__)

_TICK_S = 0.2
RESERVED_CORES = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How to run the service; ``slot_cap`` is the most of a core that a slot may be."""

    state: Path
    cluster: Path | None = None
    scripts: Path
    slot_cap: float = 1.0
    grace_s: float = 30.0
    report_interval_s: float = 30.0
    checkpoint_interval_s: float = 30.0
    mlflow_tracking_uri: str = ""

    @property
    def socket(self) -> Path:
        return self.state / "local.sock"


def serve(options: ServeOptions) -> None:
    """Run until SIGTERM or SIGINT; then have all workers checkpoint, and wait until they are gone.

    Call it from the main thread: workers live as long as the thread that started them. Raises ConfigError
    for a wrong cluster file, StackError if another service has this state folder.
    """
    if options.cluster is not None and not options.cluster.is_file():
        raise ConfigError(f"cluster: {options.cluster} is no file; name an existing cluster file")
    try:
        options.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"--state: {options.state} cannot be made ({error}); name a folder of yours"
        ) from None
    with _only_one(options.state):
        nodes = read_nodes(options.cluster or options.state / "cluster.json")
        share = slot_share(
            num_slots=nodes.num_cpu_slots,
            cap=options.slot_cap,
            reserve=RESERVED_CORES,
            num_cores=available_cores(),
        )
        name = hashlib.sha256(bytes(options.state.resolve())).hexdigest()[:10]
        cgroups = open_cgroups(f"pollux-{name}")
        how = (
            "kept by CPU quotas"
            if cgroups
            else "kept by pauses of the agent, since no CPU quota is permitted"
        )
        logger.info(
            "%d slots on %d nodes, each %.3f of a core, %s", nodes.num_slots, len(nodes.nodes), share, how
        )
        site = Site(
            nodes=nodes,
            slots=Slots(nodes),
            cgroups=cgroups,
            options=WorkerOptions(
                slot_share=share,
                grace_s=options.grace_s,
                report_interval_s=options.report_interval_s,
                checkpoint_interval_s=options.checkpoint_interval_s,
                mlflow_tracking_uri=options.mlflow_tracking_uri,
            ),
        )
        service = LocalService(
            store=JobStore(options.state),
            site=site,
            timing=Timing(grace_s=options.grace_s),
            scripts=options.scripts.resolve(),
        )
        try:
            with _listening(options.socket) as listener:
                asyncio.run(_run(service, listener, grace_s=options.grace_s))
        finally:
            if cgroups is not None:
                cgroups.close()


async def _run(service: LocalService, listener: socket.socket, *, grace_s: float) -> None:
    stop, wake = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config = uvicorn.Config(
        make_app(service, wake.set),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    while not stop.is_set() and not serving.done():
        wake.clear()
        service.tick(time.time())
        woken = asyncio.create_task(wake.wait())
        await asyncio.wait(
            {woken, stopping, serving},
            timeout=_TICK_S if service.busy else None,
            return_when=asyncio.FIRST_COMPLETED,
        )
        woken.cancel()
    stopping.cancel()
    server.should_exit = True
    await _close(service, grace_s)
    await serving


async def _close(service: LocalService, grace_s: float) -> None:
    """Have all workers checkpoint and end; drivers kill those that do not."""
    deadline = time.monotonic() + grace_s + 10
    service.tick(time.time(), closing=True)
    while service.has_workers and time.monotonic() < deadline:
        await asyncio.sleep(_TICK_S / 2)
        service.tick(time.time(), closing=True)


@contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel drops with the process."""
    handle = os.open(state / "local.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise StackError(
            f"another local cluster runs in {str(state)!r}; stop it first, or use another state folder"
        ) from None
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The socket, with mode 600 from its first moment on."""
    path.unlink(missing_ok=True)
    old_mask = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            with short_path(path) as name:
                listener.bind(name)
            os.umask(old_mask)
            listener.listen(128)
            yield listener
    finally:
        os.umask(old_mask)
        with suppress(FileNotFoundError):
            path.unlink()

"""The launcher: torch's own elastic agent for the workers of one node, kept off every address but ours.

torchrun's store listens on every interface. Here node rank 0 opens the listening socket itself, on the
rendezvous address alone, and hands it to the store; the other nodes and all workers join as clients.
"""

import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    MultiprocessContext,
    RunProcsResult,
    SignalException,
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from pollux_agent.protocol import JobSpec
from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.warm import cool_down
from pollux_agent.torch.worker import run_forked

_JOIN_TIMEOUT = timedelta(seconds=120)
_BROKEN_GRACE_S = 5
"""Once one worker has died, the others have nobody to train with and get this long to end."""
_FAREWELL_S = 5.0
_MONITOR_S = 0.1


def launch(settings: WorkerSettings, spec: JobSpec) -> NoReturn:
    """Run this node's workers to their end and exit, with status 0 if all of them left with status 0.

    SIGTERM is passed on to the workers, which then have ``settings.grace_s`` until SIGKILL.
    """
    try:
        status = 0 if _run_workers(settings, spec) else 1
    except Exception:  # noqa: BLE001 - the outermost edge
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    cool_down()
    os._exit(status)  # after an error, threads of torch would keep the process alive


def _run_workers(settings: WorkerSettings, spec: JobSpec) -> bool:
    if settings.cpu_group is not None:
        settings.cpu_group.write_text(str(os.getpid()))
    handler = _Rendezvous(settings)
    agent = _Agent(
        WorkerSpec(
            role="worker",
            local_world_size=settings.placement[settings.node],
            rdzv_handler=handler,
            entrypoint=run_forked,
            args=tuple(text.replace("$", "$$") for text in (spec.script, *spec.arguments)),  # torch's macros
            max_restarts=0,
            monitor_interval=_MONITOR_S,
        ),
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        start_method="forkserver",
        exit_barrier_timeout=settings.grace_s,
        shutdown_timeout=max(1, round(settings.grace_s)),
    )
    try:
        result: RunResult = agent.run()
    except SignalException:
        return False
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        handler.farewell()
    return not result.is_failed()


class _Agent(LocalElasticAgent):
    """torch's agent, but when a worker dies its peers get seconds, and one that just vanished is noticed."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids: dict[int, int] = super()._start_workers(worker_group)
        context = self._pcontext
        if isinstance(context, MultiprocessContext):
            _end_soon(context)
        return pids


def _end_soon(context: MultiprocessContext) -> None:
    """Replace how ``context`` waits: a failure ends all within seconds, and a silent end is an end.

    torch waits half a minute for the peers of a worker that died, and for ever for one that gave no answer.
    Ours give none: see :func:`pollux_agent.torch.worker.run_forked`.
    """
    processes = context._pc
    assert processes is not None
    join, poll, close = processes.join, context._poll, context.close

    def join_soon(timeout: float | None = None, grace_period: float | None = _BROKEN_GRACE_S) -> bool:
        return bool(join(timeout, grace_period))

    def poll_or_gone() -> RunProcsResult | None:
        result: RunProcsResult | None = poll()
        if result is None and not processes.sentinels:
            result = poll()
            answers = dict.fromkeys(range(context.nprocs))
            return result or RunProcsResult(answers, {}, context.stdouts, context.stderrs)
        return result

    def close_soon(death_sig: signal.Signals | None = None, timeout: int = _BROKEN_GRACE_S) -> None:
        close(death_sig, timeout)

    processes.join = join_soon
    context._poll = poll_or_gone  # type: ignore[method-assign]
    context.close = close_soon  # type: ignore[method-assign]


class _Rendezvous(RendezvousHandler):
    """Every node knows its rank beforehand; all that is left is the store."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._address, _, port = settings.rendezvous.rpartition(":")
        self._port = int(port)
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "pollux"

    def get_run_id(self) -> str:
        return f"{self._settings.job_id}-{self._settings.incarnation}"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = self._open_store()
        return RendezvousInfo(
            PrefixStore(self.get_run_id(), self._store),
            self._settings.node_rank,
            len(self._settings.placement),
            RendezvousStoreInfo(self._address, self._port),
        )

    def farewell(self) -> None:
        """Node rank 0 keeps the store open until the other nodes are gone too, for some seconds at most."""
        if self._store is None:
            return
        ranks = range(len(self._settings.placement))
        with suppress(RuntimeError):
            self._store.set(f"gone/{self._settings.node_rank}", "1")
            deadline = time.monotonic() + _FAREWELL_S
            while self._settings.node_rank == 0 and time.monotonic() < deadline:
                if self._store.check([f"gone/{rank}" for rank in ranks]):
                    break
                time.sleep(_MONITOR_S)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def _open_store(self) -> TCPStore:
        if self._settings.node_rank != 0:
            return TCPStore(self._address, self._port, is_master=False, timeout=_JOIN_TIMEOUT)
        with socket.create_server((self._address, self._port), backlog=512) as listener:
            return TCPStore(
                self._address,
                self._port,
                is_master=True,
                timeout=_JOIN_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

"""Workers are forked from a process that has everything loaded: one import a node, beside the launcher's.

Nothing here imports torch, so that the process that loads it can begin before the launcher's own imports.
"""

import logging
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util

from pollux_agent.errors import DocumentError
from pollux_agent.settings import WorkerSettings
from pollux_agent.torch.network import interface_towards

PRELOADED = (
    "pollux_agent.torch.deaf",
    "torch",
    "torch.utils.data",
    "torch._dynamo",
    "pollux_agent.torch.job",
    "pollux_agent.torch.worker",
)
"""``torch._dynamo`` because the first optimizer imports it, which takes seconds."""


def prepare_environment(settings: WorkerSettings) -> None:
    """What the workers inherit: one thread a slot, the one network interface that they may use."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    interface = interface_towards(settings.rendezvous.rpartition(":")[0])
    for library in ("GLOO", "NCCL", "TP"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    logging.disable(logging.ERROR)


def warm_up() -> None:
    """Begin to load what workers need, in a process of its own; it ends with this one.

    The main module is the launcher's, which a worker has no use for, so it is not made known to them.
    """
    main = sys.modules["__main__"]
    main.__spec__ = None
    vars(main).pop("__file__", None)
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


def cool_down() -> None:
    """End what :func:`warm_up` began; nothing of it is left when this returns."""
    util._run_finalizers()  # type: ignore[attr-defined]
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    for pid in (server._forkserver_pid, tracker._pid):  # type: ignore[attr-defined]
        if pid is not None:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def check_settings(settings: WorkerSettings | None) -> WorkerSettings:
    """The settings, if they are those of a launcher; raises DocumentError naming the variable."""
    if settings is None:
        raise DocumentError(
            "POLLUX_JOB_ID: not set; the launcher is started by a driver, see ARCHITECTURE.md"
        )
    if settings.node not in settings.placement:
        raise DocumentError(
            f"POLLUX_NODE: {settings.node!r} is not in POLLUX_PLACEMENT {dict(settings.placement)}; "
            "name one of its nodes"
        )
    address, _, port = settings.rendezvous.rpartition(":")
    if not address or not port.isdecimal():
        raise DocumentError(f"POLLUX_RENDEZVOUS: no address:port (got {settings.rendezvous!r})")
    return settings

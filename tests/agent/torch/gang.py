"""Runs a function on several ranks: processes joined by gloo over loopback, forked where torch is loaded."""

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forked import forked

_TIMEOUT_S = 120.0


def run_gang(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank, by rank; fails with a rank's traceback if it raises.

    ``function`` lies at the top level of its module; what it returns is plain values.
    """
    context = forked()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_member,
                args=(sender, str(Path(folder) / "store"), rank, world_size, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return [_result(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _result(rank: int, pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise AssertionError(f"rank {rank} did not answer within {_TIMEOUT_S:.0f} s")
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died without an answer") from None
    if not ok:
        raise AssertionError(f"rank {rank}:\n{value}")
    return value


def _member(
    pipe: Connection,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    try:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            pg_options=options,
        )
        dist.barrier()
        value = function(*args)
        dist.barrier()
        pipe.send((True, value))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))

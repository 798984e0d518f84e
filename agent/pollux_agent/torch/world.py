"""Which of how many replicas this process is, and the process group that joins them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist

from pollux_agent.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among the replicas; ``owned`` if the process group is ours to take down."""

    rank: int
    size: int
    local_rank: int
    num_nodes: int
    device: torch.device
    owned: bool = False

    def broadcast(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Rank 0's integers, on every rank."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.broadcast(tensor, src=0)
        return tuple(tensor.tolist())

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.size == 1:
            return text
        data = text.encode()
        (length,) = self.broadcast((len(data),))
        values = self.broadcast(tuple(data) if self.rank == 0 else (0,) * length)
        return bytes(values).decode()

    def leave(self) -> None:
        """Take the process group down if it is ours."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def join_world(
    settings: WorkerSettings | None,
    device: torch.device,
    environ: Mapping[str, str] | None = None,
    *,
    group_of_one: bool = False,
) -> World:
    """Join the other replicas: an existing process group, a launcher's, or none for one process.

    ``group_of_one``: one process alone gets a group too, which a sharded model needs. A group of ours uses
    nccl where ``device`` is a GPU and gloo otherwise.
    """
    environ = os.environ if environ is None else environ
    size = int(environ.get("WORLD_SIZE", "1"))
    owned = False
    if not dist.is_initialized() and (size > 1 or group_of_one):
        backend = "nccl" if device.type == "cuda" else "gloo"
        if size > 1:
            dist.init_process_group(backend)
        else:
            _form_group_of_one(backend)
        owned = True
    rank = 0
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    local_size = int(environ.get("LOCAL_WORLD_SIZE", str(size)))
    return World(
        rank=rank,
        size=size,
        local_rank=int(environ.get("LOCAL_RANK", "0")) if size > 1 else 0,
        num_nodes=len(settings.placement) if settings is not None else -(-size // local_size),
        device=device,
        owned=owned,
    )


def _form_group_of_one(backend: str) -> None:
    """Without a launcher's address, and open to nobody outside this machine."""
    options = None
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, pg_options=options)


def default_device() -> torch.device:
    """This process's GPU if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)

"""What ranks agree on: the same start, and a few numbers at the end of each step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Posted(Generic[T]):
    about: T
    numbers: Tensor
    arrived: torch.cuda.Event | None


class Mailbox(Generic[T]):
    """Brings a step's numbers from the device to the host.

    Where reading a number means to wait for a GPU (``late``), the numbers come one step later: they are
    copied on the device's own stream, and the copy of the step before has long arrived when it is read.
    """

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self._posted: _Posted[T] | None = None

    def exchange(self, about: T, numbers: Tensor) -> tuple[T, list[float]] | None:
        """Post the numbers of this step; those to act on now with what they are about, None if none are."""
        if not self.late:
            return about, numbers.tolist()
        before = self._posted
        on_gpu = numbers.device.type == "cuda"
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=on_gpu)
        host.copy_(numbers, non_blocking=True)
        arrived = None
        if on_gpu:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(torch.cuda.current_stream(numbers.device))
        self._posted = _Posted(about, host, arrived)
        return None if before is None else _read(before)

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted = None


def _read(posted: _Posted[T]) -> tuple[T, list[float]]:
    if posted.arrived is not None:
        posted.arrived.synchronize()
    return posted.about, posted.numbers.tolist()


def split_double(value: Tensor | float, like: Tensor) -> Tensor:
    """``value`` as two numbers of ``like``'s type and device whose sum is nearer to it than one could be."""
    exact = torch.as_tensor(value, dtype=torch.float64 if like.device.type != "mps" else torch.float32)
    exact = exact.to(like.device, non_blocking=True)
    high = exact.to(like.dtype)
    return torch.stack([high, (exact - high.to(exact.dtype)).to(like.dtype)])


def share_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's values; all ranks have the same tensors in the same order."""
    with torch.no_grad():
        for tensor in tensors:
            same = tensor.detach().contiguous()
            if same.numel():
                dist.broadcast(same, src=0)
                tensor.copy_(same)


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of batch normalisation, which each rank updates from its own samples."""
    return [
        statistic
        for part in model.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for statistic in (part.running_mean, part.running_var)
        if statistic is not None
    ]


def same_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """``tensors``, each on ``device``."""
    return [tensor.to(device, non_blocking=True) for tensor in tensors]

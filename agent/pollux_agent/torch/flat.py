"""Gradients of many parameters as a few flat tensors, on which norms and sums cost one call each."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)
_MOST_OF_A_DOT = 2**30
"""Elements; cuBLAS counts them in 31 bits."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which squares of ``dtype`` are taken: those of half precision overflow."""
    return dtype if dtype in _WIDE else torch.float32


def by_kind(params: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of ``params`` by device and type: each list fits into one flat tensor."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, param in enumerate(params):
        kinds.setdefault((param.device, param.dtype), []).append(number)
    return list(kinds.values())


def views_of(flat: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The places of ``params`` in ``flat``, shaped as they are."""
    parts = torch.split(flat, [param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]


def pack(flat: Tensor, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Write ``gradients`` one behind the other into ``flat``, in its type; zeros for those that are None."""
    dense = [part.reshape(-1) for part in gradients if part is not None and not part.is_sparse]
    if len(dense) == len(gradients):
        torch.cat(dense, out=flat)
        return
    flat.zero_()
    for view, part in zip(views_of(flat, params), gradients, strict=True):
        if part is not None:
            view.copy_(part.to_dense() if part.is_sparse else part)


def dot(first: Tensor, second: Tensor) -> Tensor:
    """Sum of products of two flat tensors as one number, float64 where the device has it.

    Half precision is widened first, since its squares overflow.
    """
    first = first.to(wide(first.dtype))
    if second.dtype is not first.dtype:
        second = second.to(first.dtype)
    if len(first) > _MOST_OF_A_DOT:
        parts = (torch.split(each, _MOST_OF_A_DOT) for each in (first, second))
        return torch.stack([dot(*part) for part in zip(*parts, strict=True)]).sum()
    product = torch.dot(first, second)
    return product if first.device.type == "mps" else product.double()


def all_finite(flats: Sequence[Tensor]) -> Tensor:
    """Whether every element is finite, as one boolean on the first one's device.

    The sum tells at the price of a read; where it is not finite, which may be an overflow, each element is
    looked at (on a GPU, where to look is to wait, at once).
    """
    device = flats[0].device
    if device.type == "cuda":
        return torch.stack([flat.isfinite().all().to(device) for flat in flats]).all()
    for flat in flats:
        if not flat.sum().isfinite() and not flat.isfinite().all():
            return torch.zeros((), dtype=torch.bool, device=device)
    return torch.ones((), dtype=torch.bool, device=device)

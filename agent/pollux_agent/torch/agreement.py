"""What ranks agree on: the same start, and at each step's end one small all-reduce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The same on every rank: ``figures`` are sums over ranks."""

    finite: bool
    stop: bool
    figures: list[float]


def agree(
    gradient_sqr: Tensor, figures: Sequence[Tensor | float], *, stop: bool, average: Sequence[Tensor] = ()
) -> Agreed:
    """Sum ``figures`` over ranks, and learn whether any asks to stop or has a gradient that is not finite.

    ``gradient_sqr`` is the squared norm of this rank's gradient. ``average`` are float tensors that become
    their mean over ranks in place. One all-reduce and one wait for the device; no all-reduce for one rank.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        finite = math.isfinite(float(gradient_sqr))
        return Agreed(finite=finite, stop=stop, figures=[float(figure) for figure in figures])
    device, dtype = gradient_sqr.device, gradient_sqr.dtype
    bad = (~gradient_sqr.isfinite()).to(dtype)
    numbers = [float(stop), *(0.0 if isinstance(figure, Tensor) else figure for figure in figures)]
    message = torch.cat([bad.reshape(1), torch.tensor(numbers, dtype=dtype).to(device)])
    for place, figure in enumerate(figures):
        if isinstance(figure, Tensor):
            message[2 + place] = figure
    width = len(message)
    if average:
        message = torch.cat([message, *(part.detach().reshape(-1).to(message) for part in average)])
    dist.all_reduce(message)
    _spread(message[width:] / dist.get_world_size(), average)
    any_bad, any_stop, *sums = message[:width].tolist()
    return Agreed(finite=any_bad == 0, stop=any_stop > 0, figures=sums)


def _spread(values: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = torch.split(values, [tensor.numel() for tensor in tensors]) if tensors else ()
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def share_from_rank_0(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
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

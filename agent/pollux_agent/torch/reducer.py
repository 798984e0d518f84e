"""Sums weighted gradients over micro-batches and ranks: one all-reduce a bucket and step, within backward.

Each bucket is one flat tensor: its parameters' accumulated gradients, then one flag a parameter that says
whether this rank has a gradient for it. Flags travel in the same all-reduce, so a branch that only some
ranks or micro-batches used costs no traversal of the graph and no further collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass(slots=True)
class _Bucket:
    """``views`` are the places of parameters ``numbers`` in ``flat``, ``flags`` its last elements."""

    numbers: list[int]
    flat: Tensor
    views: list[Tensor]
    flags: Tensor
    used: list[bool]
    waiting: int = 0
    work: dist.Work | None = None


class GradientReducer:
    """Holds the gradients of one step of ``params`` (leaf tensors) over ``world_size`` ranks.

    The order within a step: :meth:`reset`; :meth:`add` after the backward of every micro-batch but the
    last; :meth:`expect` before the last backward, :meth:`ready` within it for each gradient, and
    :meth:`finish` after it. Ranks must build it from the same parameters in the same order.
    """

    def __init__(self, params: Sequence[Tensor], world_size: int) -> None:
        self._params = params
        self._world_size = world_size
        self._buckets = _buckets(params)
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._weight = 0.0
        self._launched = 0

    def reset(self) -> None:
        """Forget what was summed."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.used = [False] * len(bucket.numbers)
            bucket.work = None

    def add(self, weight: float) -> None:
        """Add ``weight`` times every gradient present to the sums, and set them to None."""
        for bucket in self._buckets:
            self._add(bucket, weight)
        for param in self._params:
            param.grad = None

    def expect(self, weight: float) -> None:
        """The next backward is the step's last on this rank; its gradients count ``weight`` times."""
        self._weight = weight
        self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.numbers)

    def ready(self, number: int) -> None:
        """The gradient of parameter ``number`` is complete; full buckets are sent, everywhere in order."""
        self._bucket_of[number].waiting -= 1
        while self._launched < len(self._buckets) and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def finish(self) -> None:
        """Send what is left, wait, and make every ``.grad`` the weighted sum over all ranks.

        A parameter that no rank used keeps None, as it would in one process.
        """
        while self._launched < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
            self._write_back(bucket)

    def _launch(self) -> None:
        bucket = self._buckets[self._launched]
        self._launched += 1
        self._add(bucket, self._weight)
        if self._world_size > 1:
            if all(bucket.used):
                bucket.flags.fill_(1)
            else:
                bucket.flags.copy_(torch.tensor(bucket.used, dtype=bucket.flat.dtype))
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    def _add(self, bucket: _Bucket, weight: float) -> None:
        if weight == 0:
            return
        views, gradients = [], []
        for place, number in enumerate(bucket.numbers):
            gradient = self._params[number].grad
            if gradient is not None:
                bucket.used[place] = True
                views.append(bucket.views[place])
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if gradients:
            torch._foreach_add_(views, gradients, alpha=weight)

    def _write_back(self, bucket: _Bucket) -> None:
        used = bucket.used
        if self._world_size > 1 and not all(used):
            used = [flag > 0 for flag in bucket.flags.tolist()]
        gradients, views = [], []
        for is_used, number, view in zip(used, bucket.numbers, bucket.views, strict=True):
            param = self._params[number]
            if not is_used:
                param.grad = None
            elif param.grad is None or param.grad.is_sparse:
                param.grad = view.clone()
            else:
                gradients.append(param.grad)
                views.append(view)
        if gradients:
            torch._foreach_copy_(gradients, views)


def _buckets(params: Sequence[Tensor]) -> list[_Bucket]:
    """Parameters from last to first, the order in which backward reaches them, by device and type."""
    filling: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    full: list[list[int]] = []
    for number in range(len(params) - 1, -1, -1):
        param = params[number]
        numbers = filling.setdefault((param.device, param.dtype), [])
        numbers.append(number)
        limit = BUCKET_BYTES if full else FIRST_BUCKET_BYTES
        if sum(params[n].numel() for n in numbers) * param.element_size() >= limit:
            full.append(filling.pop((param.device, param.dtype)))
    return [_bucket(params, numbers) for numbers in full + list(filling.values())]


def _bucket(params: Sequence[Tensor], numbers: list[int]) -> _Bucket:
    first = params[numbers[0]]
    sizes = [params[number].numel() for number in numbers]
    flat = torch.zeros(sum(sizes) + len(numbers), dtype=first.dtype, device=first.device)
    *parts, flags = torch.split(flat, [*sizes, len(numbers)])
    views = [part.view(params[number].shape) for part, number in zip(parts, numbers, strict=True)]
    return _Bucket(numbers=numbers, flat=flat, views=views, flags=flags, used=[False] * len(numbers))

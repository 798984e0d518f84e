"""Sums weighted gradients over micro-batches and ranks: one all-reduce a bucket and step, within backward.

Each bucket is one flat tensor with its parameters' accumulated gradients. Behind the last bucket travels the
tail: a flag a parameter that says whether this rank has a gradient for it, figures that ranks agree on, and
running statistics to be averaged. So neither a branch that only some ranks used nor an agreement costs a
collective of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pollux_agent.torch.flat import pack, views_of

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20

See = Callable[[int, Tensor], None]
"""Told a bucket's number and its flat gradient, times its weight, of one micro-batch."""


@dataclass(slots=True)
class _Bucket:
    """``views`` are ``params`` in ``flat``, at the addresses ``places``; ``wire``: ``flat`` and any tail."""

    numbers: list[int]
    params: list[Tensor]
    flat: Tensor
    wire: Tensor
    views: list[Tensor]
    places: list[int]
    used: list[bool]
    filled: bool = False
    waiting: int = 0


class GradientReducer:
    """Holds the gradients of one step of ``params`` (leaf tensors) over ``world_size`` ranks.

    The order within a step: :meth:`reset`; :meth:`add` after the backward of every micro-batch but the
    last; :meth:`expect` before the last backward, :meth:`ready` within it for each gradient, and
    :meth:`finish` after it. Ranks must build it from the same parameters in the same order.

    ``num_figures`` numbers are summed over ranks in the tail; ``statistics`` (floating point) become their
    mean over ranks in place.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        world_size: int,
        *,
        num_figures: int = 0,
        statistics: Sequence[Tensor] = (),
    ) -> None:
        self._params, self._world_size = params, world_size
        self._statistics = list(statistics)
        groups = _groups(params)
        sizes = [len(params), num_figures, sum(each.numel() for each in self._statistics)]
        self._buckets = [
            _bucket(params, numbers, sum(sizes) if number == len(groups) - 1 and world_size > 1 else 0)
            for number, numbers in enumerate(groups)
        ]
        last = self._buckets[-1]
        if len(last.wire) > len(last.flat):
            self._tail, self._own_tail = last.wire[len(last.flat) :], False
        else:
            self._tail = torch.zeros(sum(sizes), dtype=torch.float32, device=last.flat.device)
            self._own_tail = world_size > 1
        self._flags, self.figures, self._means = torch.split(self._tail, sizes)
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._weight = 0.0
        self._see: See | None = None
        self._tell: Callable[[], Tensor] | None = None
        self._launched = 0
        self._works: list[dist.Work] = []

    @property
    def groups(self) -> list[list[int]]:
        """The numbers of each bucket's parameters."""
        return [bucket.numbers for bucket in self._buckets]

    @property
    def flats(self) -> list[Tensor]:
        """The buckets' sums; behind :meth:`finish` those over all ranks."""
        return [bucket.flat for bucket in self._buckets]

    @property
    def in_one(self) -> bool:
        """Whether there is one bucket, so that none is complete before the end of backward."""
        return len(self._buckets) == 1

    def reset(self) -> None:
        """Forget what was summed; a ``.grad`` that is a place in a bucket goes with it.

        ``model.to`` and its like, called since, have given such a place memory of its own.
        """
        for bucket in self._buckets:
            bucket.filled = False
            bucket.used = [False] * len(bucket.numbers)
            moved = False
            for param, view, place in zip(bucket.params, bucket.views, bucket.places, strict=True):
                if param.grad is view:
                    param.grad = None
                    moved = moved or view.data_ptr() != place
            if moved:
                bucket.views = views_of(bucket.flat, bucket.params)
        self._works.clear()

    def add(self, weight: float, see: See | None = None) -> None:
        """Add ``weight`` times every gradient present to the sums, and set them to None."""
        for number in range(len(self._buckets)):
            self._add(number, weight, see)
        for param in self._params:
            param.grad = None

    def expect(self, weight: float, tell: Callable[[], Tensor], see: See | None = None) -> None:
        """The next backward is the step's last on this rank; its gradients count ``weight`` times.

        ``tell`` gives the figures to be summed, a flat tensor of ``num_figures``, once ``see`` has seen all.
        """
        self._weight, self._tell, self._see = weight, tell, see
        self._launched = 0
        for bucket in self._buckets:
            bucket.waiting = len(bucket.numbers)

    def ready(self, number: int) -> None:
        """The gradient of parameter ``number`` is complete; full buckets are sent, everywhere in order."""
        self._bucket_of[number].waiting -= 1
        while self._launched < len(self._buckets) - 1 and self._buckets[self._launched].waiting <= 0:
            self._launch()

    def finish(self) -> None:
        """Send what is left, wait, and make every ``.grad`` the weighted sum over all ranks.

        A parameter that no rank used keeps None, as it would in one process. Each ``.grad`` is a place in its
        bucket until the next :meth:`reset`.
        """
        while self._launched < len(self._buckets):
            self._launch()
        for work in self._works:
            work.wait()
        self._works.clear()
        flags: list[float] | None = None
        for bucket in self._buckets:
            used = bucket.used
            if self._world_size > 1 and not all(used):
                flags = self._flags.tolist() if flags is None else flags
                used = [flags[number] > 0 for number in bucket.numbers]
            for is_used, param, view in zip(used, bucket.params, bucket.views, strict=True):
                param.grad = view if is_used else None
        if self._statistics and self._world_size > 1:
            self._means.div_(self._world_size)
            torch._foreach_copy_(self._statistics, views_of(self._means, self._statistics))

    def _launch(self) -> None:
        number = self._launched
        bucket = self._buckets[number]
        self._launched += 1
        self._add(number, self._weight, self._see)
        if self._world_size == 1:
            return
        if self._launched == len(self._buckets):
            self._write_tail()
            if self._own_tail:
                self._send(self._tail)
        self._send(bucket.wire)

    def _send(self, wire: Tensor) -> None:
        work = dist.all_reduce(wire, async_op=True)
        if work is not None:
            self._works.append(work)

    def _write_tail(self) -> None:
        if all(all(bucket.used) for bucket in self._buckets):
            self._flags.fill_(1)
        else:
            used = {
                number: is_used
                for bucket in self._buckets
                for number, is_used in zip(bucket.numbers, bucket.used, strict=True)
            }
            flags = torch.tensor([used[number] for number in range(len(self._params))])
            self._flags.copy_(flags)
        if self._tell is not None:
            self.figures.copy_(self._tell())
        if self._statistics:
            torch._foreach_copy_(views_of(self._means, self._statistics), self._statistics)

    def _add(self, number: int, weight: float, see: See | None) -> None:
        bucket = self._buckets[number]
        gradients = [param.grad for param in bucket.params]
        if weight == 0:
            if not bucket.filled:
                bucket.flat.zero_()
                bucket.filled = True
            return
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                bucket.used[place] = True
        if see is None and bucket.filled:
            present = [
                (view, part) for view, part in zip(bucket.views, gradients, strict=True) if part is not None
            ]
            if present:
                parts = [part.to_dense() if part.is_sparse else part for _, part in present]
                torch._foreach_add_([view for view, _ in present], parts, alpha=weight)
            return
        flat = torch.empty_like(bucket.flat) if bucket.filled else bucket.flat
        pack(flat, bucket.params, gradients)
        if weight != 1:
            flat.mul_(weight)
        if see is not None:
            see(number, flat)
        if bucket.filled:
            bucket.flat.add_(flat)
        bucket.filled = True


def _groups(params: Sequence[Tensor]) -> list[list[int]]:
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
    return full + list(filling.values())


def _bucket(params: Sequence[Tensor], numbers: list[int], tail_size: int) -> _Bucket:
    own = [params[number] for number in numbers]
    size = sum(param.numel() for param in own)
    tail_size = tail_size if own[0].dtype in (torch.float32, torch.float64) else 0
    wire = torch.zeros(size + tail_size, dtype=own[0].dtype, device=own[0].device)
    flat = wire[:size]
    views = views_of(flat, own)
    return _Bucket(
        numbers=numbers,
        params=own,
        flat=flat,
        wire=wire,
        views=views,
        places=[view.data_ptr() for view in views],
        used=[False] * len(own),
    )

"""Data sets without an order of their own to choose from: streams, read once from front to end.

Every rank reads the same stream and keeps its part of each step. The position is the number of samples that
the job has consumed. A stream with ``state_dict()`` and ``load_state_dict()`` goes on from its own state;
any other is read again and the consumed samples are skipped, which is exact if it gives the same samples in
the same order each time. ``set_epoch(number)``, where a stream has it, is called before each pass.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from pollux_agent.torch.sampler import BatchPlan, MicroBatch, Position, split_step


class StreamPosition(Position):
    """The position in a stream; ``num_samples`` is learned at the end of the first pass if it is unknown."""

    def __init__(self, num_samples: int | None, *, seed: int) -> None:
        super().__init__(seed=seed)
        self.num_samples = num_samples
        self.stream: dict[str, Any] | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the stream of this pass has come to its end."""
        return self._ended

    def end(self) -> None:
        """The stream has no more samples in this pass."""
        self._ended = True
        if self.num_samples is None:
            self.num_samples = self.cursor

    def next_epoch(self) -> None:
        super().next_epoch()
        self.stream = None
        self._ended = False

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"stream": self.stream, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.num_samples is None:
            self.num_samples = state["num_samples"]
        self.stream, self._ended = state["stream"], state["ended"]


Read = tuple[Any, MicroBatch, dict[str, Any] | None]
"""A collated batch, what it is of its step, and the stream's state after that step."""


class StreamReader(IterableDataset[Read]):
    """One rank's micro-batches of a stream, from ``position`` to the end of the pass.

    ``plan`` is asked before each step; ``least`` is the fewest samples that a micro-batch may hold.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        position: StreamPosition,
        plan: Callable[[], BatchPlan],
        *,
        rank: int,
        num_replicas: int,
        least: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, collate
        self._rank, self._num_replicas, self._least = rank, num_replicas, least
        self._epoch, self._cursor, self._state = position.epoch, position.cursor, position.stream

    def __iter__(self) -> Iterator[Read]:
        samples = self._samples()
        has_state = _has_state(self._dataset)
        while True:
            plan = self._plan()
            step = list(islice(samples, plan.batch_size))
            if not step:
                return
            state = self._dataset.state_dict() if has_state else None  # type: ignore[attr-defined]
            cut = split_step(
                range(len(step)),
                plan.micro_batches,
                rank=self._rank,
                num_replicas=self._num_replicas,
                least=self._least,
                largest=-(-plan.batch_size // (self._num_replicas * plan.micro_batches)),
            )
            for micro in cut:
                yield self._collate([step[index] for index in micro.indices]), micro, state

    def _samples(self) -> Iterator[Any]:
        """The stream from the position on."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        if self._state is not None and _has_state(self._dataset):
            self._dataset.load_state_dict(self._state)  # type: ignore[attr-defined]
            return iter(self._dataset)
        samples = iter(self._dataset)
        for _ in islice(samples, self._cursor):
            pass
        return samples


def _has_state(dataset: object) -> bool:
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")

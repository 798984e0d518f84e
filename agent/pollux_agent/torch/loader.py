"""The elastic loader: gives the user's loop one micro-batch after another, and counts what was consumed."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from pollux_agent.torch.sampler import BatchPlan, ElasticSampler, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """What is passed on to torch's DataLoader."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None


class Steps(Protocol):
    """Whom the loader tells about the steps that it cuts the data into."""

    @property
    def plan(self) -> BatchPlan:
        """How the next step is cut."""
        ...

    @property
    def stepped(self) -> bool:
        """Whether the step in progress has come to its update."""
        ...

    def begin_pass(self) -> None:
        """The loop over the loader begins."""
        ...

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch is given to the loop."""
        ...

    def end(self) -> bool:
        """The loop is done with it; whether to go on."""
        ...

    def abandon(self) -> None:
        """The loop was left within a step."""
        ...


class ElasticLoader:
    """Iterates from the sampler's cursor to the end of the pass, in steps as ``steps`` plans them.

    Samples count as consumed when their step has ended, however far worker processes have read ahead.
    When the plan changes, reading starts again at the cursor.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticSampler,
        steps: Steps,
        *,
        rank: int,
        num_replicas: int,
        options: LoaderOptions,
    ) -> None:
        self._dataset, self._sampler, self._steps = dataset, sampler, steps
        self._rank, self._num_replicas, self._options = rank, num_replicas, options

    def __len__(self) -> int:
        """Micro-batches from the cursor to the end of the pass, as planned now."""
        plan = self._steps.plan
        return -(-self._sampler.remaining // plan.batch_size) * plan.micro_batches

    def __iter__(self) -> Iterator[Any]:
        self._steps.begin_pass()
        going = True
        while going and self._sampler.remaining:
            plan = self._steps.plan
            feed = _Feed(self._sampler, plan, self._rank, self._num_replicas)
            for batch in self._inner(feed):
                micro = feed.loaded.popleft()
                self._steps.begin(micro)
                ended = False
                try:
                    yield batch
                    ended = True
                finally:
                    if not ended:
                        self._leave(micro)
                if micro.last:
                    self._sampler.advance(micro.step_samples)
                going = self._steps.end()
                if not going or (micro.last and self._steps.plan != plan):
                    break

    def _leave(self, micro: MicroBatch) -> None:
        """A loop that is left after its step's update keeps the step; one that is left earlier loses it.

        A loop is left by ``break`` as well as by an error of the script, which may be one rank's alone: what
        has not come to its update is dropped without a word to the other ranks.
        """
        if micro.last and self._steps.stepped:
            self._sampler.advance(micro.step_samples)
            self._steps.end()
        else:
            self._steps.abandon()

    def _inner(self, feed: "_Feed") -> DataLoader[Any]:
        options = self._options
        generator = torch.Generator().manual_seed(
            hash((self._sampler.seed, self._sampler.epoch, self._rank)) & (2**63 - 1)
        )
        return DataLoader(
            self._dataset,
            batch_sampler=feed,
            num_workers=options.num_workers,
            collate_fn=options.collate_fn,
            pin_memory=options.pin_memory,
            worker_init_fn=_WorkerInit(options.worker_init_fn),
            generator=generator,
        )


class _Feed:
    """The index lists that torch's loader reads, ahead of use; ``loaded`` are those read and not yet used."""

    def __init__(self, sampler: ElasticSampler, plan: BatchPlan, rank: int, num_replicas: int) -> None:
        self._micro_batches = sampler.micro_batches(plan, rank=rank, num_replicas=num_replicas)
        self.loaded: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for micro in self._micro_batches:
            self.loaded.append(micro)
            yield list(micro.indices)


class _WorkerInit:
    """Keeps a stop signal to all processes from ending the loader's own before the checkpoint.

    They end with the loader, or with the training process.
    """

    def __init__(self, chained: Callable[[int], None] | None) -> None:
        self._chained = chained

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._chained is not None:
            self._chained(worker_id)


def num_samples(dataset: Dataset[Any]) -> int:
    """Length of a map-style data set; raises TypeError for one without."""
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"train_set is a {type(dataset).__name__} without a length; the elastic loader needs a map-style "
            "data set (with __len__ and __getitem__)"
        )
    return len(dataset)

"""The elastic loader: gives the user's loop one micro-batch after another, and counts what was consumed."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from multiprocessing.synchronize import Event as EndingFlag
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from pollux_agent.errors import DocumentError, LoopError
from pollux_agent.torch.sampler import BatchPlan, ElasticSampler, MicroBatch, Position
from pollux_agent.torch.stream import Read, StreamPosition, StreamReader


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

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train."""
        ...

    def begin_pass(self) -> None:
        """The loop over the loader begins."""
        ...

    def begin(self, micro: MicroBatch) -> None:
        """A micro-batch is given to the loop."""
        ...

    def end(self, *, left: bool = False) -> bool:
        """The loop is done with it; whether to go on. ``left``: it is at its end, and hears of no error."""
        ...

    def abandon(self) -> None:
        """The loop was left within a step."""
        ...


class ElasticLoader(Protocol):
    """Iterates from the job's position to the end of the pass, in steps as ``steps`` plans them."""

    def __len__(self) -> int:
        """Micro-batches from the position to the end of the pass, as planned now."""
        ...

    def __iter__(self) -> Iterator[Any]: ...

    def abandon(self) -> None:
        """Drop the step in progress, of a loop that does not go on."""
        ...


class _Loader:
    """Samples count as consumed when their step has ended, however far worker processes have read ahead.

    When the plan changes, reading starts again at the position, unless the reader follows the plan.
    """

    follows_plan = False

    def __init__(
        self, position: Position, steps: Steps, *, rank: int, num_replicas: int, options: LoaderOptions
    ) -> None:
        self._position, self._steps = position, steps
        self._rank, self._num_replicas, self._options = rank, num_replicas, options
        self._passes = 0

    def __len__(self) -> int:
        plan, total = self._steps.plan, self._position.num_samples
        if total is None:
            raise TypeError("the length of the stream is not known before its first end; give num_samples")
        return -(-(total - self._position.cursor) // plan.batch_size) * plan.micro_batches

    def __iter__(self) -> Iterator[Any]:
        self._steps.begin_pass()
        self._passes += 1
        own = self._passes
        going = not self._steps.finished
        while going and not self._position.ended:
            plan = self._steps.plan
            for batch, micro, state in self._read(plan):
                self._steps.begin(micro)
                ended = False
                try:
                    yield batch
                    ended = True
                finally:
                    if not ended and own == self._passes:
                        self._leave(micro, state)
                if own != self._passes:
                    raise LoopError(
                        "a loop over job.loader began within another one; read evaluation data, or the "
                        "training data again, with a DataLoader of your own"
                    )
                if micro.last:
                    self._advance(micro, state)
                going = self._steps.end()
                if not going or (micro.last and self._steps.plan is not plan and not self.follows_plan):
                    break
            else:
                self._end()

    def abandon(self) -> None:
        self._steps.abandon()

    def _leave(self, micro: MicroBatch, state: dict[str, Any] | None) -> None:
        """A loop that is left after its step's update keeps the step; one that is left earlier loses it.

        A loop is left by ``break`` as well as by an error of the script, which may be one rank's alone: what
        has not come to its update is dropped without a word to the other ranks.
        """
        if micro.last and self._steps.stepped:
            self._advance(micro, state)
            self._steps.end(left=True)
        else:
            self._steps.abandon()

    def _read(self, plan: BatchPlan) -> Iterator[Read]:
        raise NotImplementedError

    def _advance(self, micro: MicroBatch, state: dict[str, Any] | None) -> None:
        self._position.advance(micro.step_samples)

    def _end(self) -> None:
        """All of the pass was read."""

    def _generator(self) -> torch.Generator:
        """Random numbers for worker processes: other ones for each pass and rank."""
        position = self._position
        seed = hash((position.seed, position.epoch, self._rank)) & (2**63 - 1)
        return torch.Generator().manual_seed(seed)


class MapLoader(_Loader):
    """Of a data set with ``__getitem__``, in the order of its sampler."""

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
        super().__init__(sampler, steps, rank=rank, num_replicas=num_replicas, options=options)
        self._dataset, self._sampler = dataset, sampler

    def _read(self, plan: BatchPlan) -> Iterator[Read]:
        options, ending = self._options, _ending(self._options)
        feed = _Feed(self._sampler, plan, self._rank, self._num_replicas)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=feed,
            num_workers=options.num_workers,
            collate_fn=options.collate_fn,
            pin_memory=options.pin_memory,
            worker_init_fn=_WorkerInit(options.worker_init_fn, ending),
            generator=self._generator(),
        )
        try:
            for batch in loader:
                yield batch, feed.loaded.popleft(), None
        finally:
            if ending is not None:
                ending.set()


class StreamLoader(_Loader):
    """Of a data set with ``__iter__`` alone, in the order in which it comes.

    More than one worker process could not keep that order, so one does all reading where ``num_workers`` is
    not 0.
    """

    _position: StreamPosition

    def __init__(
        self,
        dataset: IterableDataset[Any],
        position: StreamPosition,
        steps: Steps,
        *,
        rank: int,
        num_replicas: int,
        options: LoaderOptions,
        least: int = 1,
    ) -> None:
        super().__init__(position, steps, rank=rank, num_replicas=num_replicas, options=options)
        self._dataset, self._least = dataset, least
        self.follows_plan = options.num_workers == 0

    def _read(self, plan: BatchPlan) -> Iterator[Read]:
        options, ending = self._options, _ending(self._options)
        reader = StreamReader(
            self._dataset,
            self._position,
            (lambda: self._steps.plan) if self.follows_plan else _Fixed(plan),
            rank=self._rank,
            num_replicas=self._num_replicas,
            least=self._least,
            collate=options.collate_fn or default_collate,
        )
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            num_workers=min(options.num_workers, 1),
            pin_memory=options.pin_memory,
            worker_init_fn=_WorkerInit(options.worker_init_fn, ending),
            generator=self._generator(),
        )
        try:
            yield from loader
        finally:
            if ending is not None:
                ending.set()

    def _advance(self, micro: MicroBatch, state: dict[str, Any] | None) -> None:
        super()._advance(micro, state)
        self._position.stream = state

    def _end(self) -> None:
        if self._position.cursor == 0:
            raise DocumentError("train_set gave no sample in a whole pass; is its source empty or used up?")
        self._position.end()


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A plan that does not change; unlike a lambda it can be sent to a worker process."""

    plan: BatchPlan

    def __call__(self) -> BatchPlan:
        return self.plan


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

    They end with the loader (``ending``: it is about to, and torch signals one that hangs), or with the
    training process.
    """

    def __init__(self, chained: Callable[[int], None] | None, ending: EndingFlag | None) -> None:
        self._chained, self._ending = chained, ending

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGTERM, self._end)
        if self._chained is not None:
            self._chained(worker_id)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        if self._ending is not None and self._ending.is_set():
            os._exit(0)


def _ending(options: LoaderOptions) -> EndingFlag | None:
    return multiprocessing.Event() if options.num_workers else None


def dataset_length(dataset: Dataset[Any], given: int | None) -> int | None:
    """Samples in a pass: ``given`` for a stream, or its own length if it knows one, else None.

    Raises TypeError for what is neither a map-style data set nor a stream, DocumentError for one that is
    empty and for a length that is given to a data set that has its own.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "train_set is a DataLoader; give its data set (loader.dataset): the job makes the loader, from "
            "num_workers, collate_fn, pin_memory and worker_init_fn"
        )
    length = _length(dataset, given)
    if length == 0:
        raise DocumentError(f"train_set is empty: its {type(dataset).__name__} has 0 samples; give it some")
    return length


def _length(dataset: Dataset[Any], given: int | None) -> int | None:
    if isinstance(dataset, IterableDataset):
        if given is not None and given < 1:
            raise DocumentError(f"num_samples is {given}; give the samples of a pass, or leave it out")
        return given if given is not None else _own_length(dataset)
    if not isinstance(dataset, Sized):
        raise TypeError(
            f"train_set is a {type(dataset).__name__} without a length; the elastic loader needs a map-style "
            "data set (with __len__ and __getitem__) or an IterableDataset"
        )
    if given is not None and given != len(dataset):
        raise DocumentError(
            f"num_samples is {given}, but train_set has {len(dataset)}; leave it out, it is for streams"
        )
    return len(dataset)


def _own_length(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:
        return None

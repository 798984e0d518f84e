"""The elastic sampler: every sample once a pass, whatever happens to replicas and batch size on the way.

The order of a pass depends on seed and pass number alone, and the only position is the number of samples
that the whole job has consumed. So a pass that is interrupted continues with any number of replicas, any
batch size and any accumulation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a step is cut: M = ``batch_size`` samples over all replicas, in s + 1 = ``micro_batches`` each."""

    batch_size: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One rank's part of a step: ``indices`` to load, of which the first ``num_samples`` count.

    ``num_samples`` is the length of ``indices``; less where too few samples were left for the least that a
    micro-batch may hold, and 0 where the rank had none and borrowed all to stay in step with the others.
    ``step_samples`` and ``micro_batches`` are those of the whole step.
    """

    indices: tuple[int, ...]
    num_samples: int
    position: int
    micro_batches: int
    step_samples: int

    @property
    def first(self) -> bool:
        return self.position == 0

    @property
    def last(self) -> bool:
        return self.position == self.micro_batches - 1


class Position:
    """Where a job is in its data: pass number ``epoch``, and ``cursor``, the samples of it consumed so far.

    ``closed`` says that what the script does after a pass has been done for this one. ``num_samples`` is the
    length of a pass, None while it is unknown.
    """

    num_samples: int | None

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.epoch = 0
        self.cursor = 0
        self.closed = False

    @property
    def ended(self) -> bool:
        """Whether the pass has no more samples."""
        return self.num_samples is not None and self.cursor >= self.num_samples

    def advance(self, step_samples: int) -> None:
        """Count the samples of a finished step."""
        self.cursor += step_samples
        self.closed = False

    def next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0
        self.closed = False

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "closed": self.closed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.epoch, self.cursor, self.seed = state["epoch"], state["cursor"], state["seed"]
        self.closed = state.get("closed", False)


class ElasticSampler(Position):
    """The position in a data set of known length; no micro-batch holds less than ``least`` samples."""

    num_samples: int

    def __init__(self, num_samples: int, *, seed: int, least: int = 1) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; the training set needs at least one sample")
        super().__init__(seed=seed)
        self.num_samples = num_samples
        self._least = least

    @property
    def remaining(self) -> int:
        """Samples of this pass that no step has consumed."""
        return self.num_samples - self.cursor

    def advance(self, step_samples: int) -> None:
        """Count the samples of a finished step; raises ValueError for more than remain."""
        if not 0 <= step_samples <= self.remaining:
            raise ValueError(
                f"step_samples is {step_samples}, but the pass has {self.remaining} samples left"
            )
        super().advance(step_samples)

    def order(self) -> NDArray[np.int64]:
        """The pass's permutation of all samples, shape (num_samples,); the same on every rank."""
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)

    def micro_batches(self, plan: BatchPlan, *, rank: int, num_replicas: int) -> Iterator[MicroBatch]:
        """What ``rank`` loads from the cursor to the end of the pass; does not move the cursor."""
        order = self.order()
        spare = order[: self._least].tolist()
        largest = -(-plan.batch_size // (num_replicas * plan.micro_batches))
        alone = num_replicas * plan.micro_batches == 1 and plan.batch_size >= self._least
        for start in range(self.cursor, self.num_samples, plan.batch_size):
            taken = order[start : start + plan.batch_size].tolist()
            if alone and len(taken) == plan.batch_size:
                yield _whole_step(taken)
                continue
            yield from split_step(
                taken,
                plan.micro_batches,
                rank=rank,
                num_replicas=num_replicas,
                least=self._least,
                largest=largest,
                spare=spare,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; raises ValueError if the data set has another size by now."""
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the checkpoint was made with {state['num_samples']} training samples, but the script now "
                f"has {self.num_samples}; restore the data set, or start afresh without the checkpoint"
            )
        super().load_state_dict(state)


def _whole_step(samples: Sequence[int]) -> MicroBatch:
    """What :func:`split_step` gives one rank that does not accumulate, in less time."""
    count = len(samples)
    return MicroBatch(
        indices=tuple(samples), num_samples=count, position=0, micro_batches=1, step_samples=count
    )


def split_step(
    samples: Sequence[int],
    micro_batches: int,
    *,
    rank: int,
    num_replicas: int,
    least: int = 1,
    largest: int | None = None,
    spare: Sequence[int] = (),
) -> Iterator[MicroBatch]:
    """Cut a step evenly over replicas, and each share over micro-batches, both within one sample.

    A micro-batch holds ``least`` to ``largest`` samples (by default what an even cut into ``micro_batches``
    gives). A step that is too small is cut for fewer replicas and micro-batches; what has too few samples
    even so, or none, is filled up with borrowed ones, of this step and of ``spare``. All ranks get the same
    number of micro-batches.
    """
    count = len(samples)
    if largest is None:
        largest = -(-count // (num_replicas * micro_batches))
    largest = max(largest, least)
    used = min(num_replicas, max(1, count // least, -(-count // largest)))
    needed = -(-count // (used * largest))
    micro_batches = max(needed, min(micro_batches, count // used // least))
    share = _part(samples, rank, used) if rank < used else ()
    for position in range(micro_batches):
        own = _part(share, position, micro_batches)
        yield MicroBatch(
            indices=(*own, *_borrowed(own, least - len(own), samples, spare)),
            num_samples=len(own),
            position=position,
            micro_batches=micro_batches,
            step_samples=count,
        )


def _borrowed(own: Sequence[int], count: int, samples: Sequence[int], spare: Sequence[int]) -> list[int]:
    """``count`` samples that are not ``own``; the same ones again where there are no others."""
    if count <= 0:
        return []
    others = [index for index in dict.fromkeys(chain(samples, spare)) if index not in own]
    return list(islice(cycle(others or own), count))


def _part(items: Sequence[int], part: int, num_parts: int) -> Sequence[int]:
    """Part number ``part`` of ``num_parts`` contiguous ones; the first ones get the remainder."""
    size, extra = divmod(len(items), num_parts)
    start = part * size + min(part, extra)
    return items[start : start + size + (part < extra)]

"""The elastic sampler: every sample once a pass, whatever happens to replicas and batch size on the way.

The order of a pass depends on seed and pass number alone, and the only position is the number of samples
that the whole job has consumed. So a pass that is interrupted continues with any number of replicas, any
batch size and any accumulation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """How a step is cut: M = ``batch_size`` samples over all replicas, in s + 1 = ``micro_batches`` each."""

    batch_size: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One rank's part of a step: ``indices`` to load, of which ``num_samples`` count.

    ``num_samples`` is the length of ``indices``, or 0 when the rank had nothing left and borrowed one sample
    to stay in step with the others. ``step_samples`` and ``micro_batches`` are those of the whole step.
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


class ElasticSampler:
    """The position in the data: pass number ``epoch`` and ``cursor``, the samples of it consumed so far."""

    def __init__(self, num_samples: int, *, seed: int) -> None:
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; the training set needs at least one sample")
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0
        self.cursor = 0

    @property
    def remaining(self) -> int:
        """Samples of this pass that no step has consumed."""
        return self.num_samples - self.cursor

    def advance(self, step_samples: int) -> None:
        """Count the samples of a finished step."""
        if not 0 <= step_samples <= self.remaining:
            raise ValueError(
                f"step_samples is {step_samples}, but the pass has {self.remaining} samples left"
            )
        self.cursor += step_samples

    def next_epoch(self) -> None:
        self.epoch += 1
        self.cursor = 0

    def order(self) -> NDArray[np.int64]:
        """The pass's permutation of all samples, shape (num_samples,); the same on every rank."""
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)

    def micro_batches(self, plan: BatchPlan, *, rank: int, num_replicas: int) -> Iterator[MicroBatch]:
        """What ``rank`` loads from the cursor to the end of the pass; does not move the cursor."""
        order = self.order()
        for start in range(self.cursor, self.num_samples, plan.batch_size):
            taken = order[start : start + plan.batch_size]
            yield from split_step(taken.tolist(), plan.micro_batches, rank=rank, num_replicas=num_replicas)

    def state_dict(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "seed": self.seed,
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state`` was taken; raises ValueError if the data set has another size by now."""
        if state["num_samples"] != self.num_samples:
            raise ValueError(
                f"the checkpoint was made with {state['num_samples']} training samples, but the script now "
                f"has {self.num_samples}; restore the data set, or start afresh without the checkpoint"
            )
        self.epoch, self.cursor, self.seed = state["epoch"], state["cursor"], state["seed"]


def split_step(
    samples: Sequence[int], micro_batches: int, *, rank: int, num_replicas: int
) -> Iterator[MicroBatch]:
    """Cut a step evenly over replicas, and each share over micro-batches, both within one sample."""
    share = _part(samples, rank, num_replicas)
    largest_share = -(-len(samples) // num_replicas)
    micro_batches = min(micro_batches, largest_share)
    for position in range(micro_batches):
        own = _part(share, position, micro_batches)
        yield MicroBatch(
            indices=tuple(own or samples[:1]),
            num_samples=len(own),
            position=position,
            micro_batches=micro_batches,
            step_samples=len(samples),
        )


def _part(items: Sequence[int], part: int, num_parts: int) -> Sequence[int]:
    """Part number ``part`` of ``num_parts`` contiguous ones; the first ones get the remainder."""
    size, extra = divmod(len(items), num_parts)
    start = part * size + min(part, extra)
    return items[start : start + size + (part < extra)]

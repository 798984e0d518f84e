"""Data sets and streams: each sample once a pass across any resizes in its middle, whoever reads ahead."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from elastic_runs import Line, linear_model
from gang import run_gang
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from pollux_agent.errors import DocumentError
from pollux_agent.torch import ElasticJob
from pollux_agent.torch.loader import LoaderOptions, MapLoader, StreamLoader
from pollux_agent.torch.sampler import BatchPlan, ElasticSampler, MicroBatch, Position
from pollux_agent.torch.stream import StreamPosition


class Numbers(Dataset[int]):
    """The numbers from 0 on."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same numbers as a stream, in another order each pass; ``reads`` counts what was taken of it."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.reads = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return self._from(0)

    def _from(self, start: int) -> Iterator[int]:
        for number in np.random.default_rng(self.epoch).permutation(self.count)[start:]:
            self.reads += 1
            self.at = getattr(self, "at", 0) + 1
            yield int(number)


class StreamWithState(Stream):
    """It knows where it is."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self._from(self.at)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Turns:
    """The job's side of a loader: the plan, and a stop after some steps."""

    stepped = True
    finished = False

    def __init__(self, plan: BatchPlan, steps: int) -> None:
        self.plan, self.steps = plan, steps
        self.micro: MicroBatch | None = None

    def begin_pass(self) -> None: ...

    def begin(self, micro: MicroBatch) -> None:
        self.micro = micro

    def end(self) -> bool:
        assert self.micro is not None
        self.steps -= self.micro.last
        return self.steps > 0

    def abandon(self) -> None: ...


def gang_pass(
    kind: str,
    count: int,
    state: dict[str, Any] | None,
    plan: BatchPlan,
    *,
    ranks: int,
    steps: int,
    workers: int,
) -> tuple[list[int], dict[str, Any], bool]:
    """Up to ``steps`` steps on all ranks: samples that counted, position after, whether the pass ended."""
    seen: list[int] = []
    states, ended, turns = [], [], []
    for rank in range(ranks):
        position: Position
        options = LoaderOptions(num_workers=workers)
        told = Turns(plan, steps)
        if kind == "map":
            position = ElasticSampler(count, seed=3)
            loader: Any = MapLoader(
                Numbers(count), position, told, rank=rank, num_replicas=ranks, options=options
            )
        else:
            position = StreamPosition(None, seed=3)
            stream = Stream(count) if kind == "stream" else StreamWithState(count)
            loader = StreamLoader(stream, position, told, rank=rank, num_replicas=ranks, options=options)
        if state is not None:
            position.load_state_dict(state)
        num_turns = 0
        for batch in loader:
            assert told.micro is not None
            seen += batch.tolist()[: told.micro.num_samples]
            num_turns += 1
        turns.append(num_turns)
        states.append(position.state_dict())
        ended.append(position.ended)
    assert len(set(turns)) == 1, "ranks differ in micro-batches, so a collective would hang"
    assert all(other == states[0] for other in states)
    return seen, states[0], ended[0]


resizes = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3)), max_size=5
)


def check_one_pass(kind: str, count: int, parts: list[tuple[int, int, int, int]], workers: int) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for ranks, batch_size, micro_batches, steps in [*parts, (2, 5, 2, count + 1)]:
        plan = BatchPlan(batch_size=batch_size, micro_batches=micro_batches)
        got, state, ended = gang_pass(kind, count, state, plan, ranks=ranks, steps=steps, workers=workers)
        seen += got
        if ended:
            break
    assert sorted(seen) == list(range(count))
    assert state is not None and state["cursor"] == count


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["map", "stream", "stream with state"]), st.integers(1, 50), resizes)
def test_each_sample_counts_once_a_pass_across_resizes(kind, count, parts) -> None:
    check_one_pass(kind, count, parts, workers=0)


@settings(deadline=None, max_examples=4)
@given(st.integers(8, 40), resizes)
@pytest.mark.parametrize("kind", ["map", "stream", "stream with state"])
def test_each_sample_counts_once_though_worker_processes_read_ahead(kind, count, parts) -> None:
    check_one_pass(kind, count, parts[:3], workers=2)


def test_a_stream_with_state_is_not_read_again() -> None:
    position = StreamPosition(None, seed=0)
    for steps, reads in [(2, 8), (1, 4)]:
        stream = StreamWithState(100)
        told = Turns(BatchPlan(batch_size=4, micro_batches=1), steps)
        loader = StreamLoader(stream, position, told, rank=0, num_replicas=1, options=LoaderOptions())
        assert sum(len(batch) for batch in loader) == reads
        assert stream.reads == reads
        resumed = StreamPosition(None, seed=0)
        resumed.load_state_dict(position.state_dict())
        position = resumed


class LineStream(IterableDataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """The samples of a line as a stream."""

    def __init__(self, count: int) -> None:
        self.line = Line(count)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        return (self.line[index] for index in range(len(self.line)))


def train(
    stream: Any, seen: list[tuple[int, int]], *, epochs: float = 2, stop_at: int = -1, **options: Any
) -> ElasticJob:
    """Train on a stream of (inputs, targets, index), and note (pass, index) of what was used in ``seen``."""
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job = ElasticJob(model, optimizer, stream, **({"batch_size": 4, "max_batch_size": 4} | options))
    for epoch in job.epochs(epochs):
        for inputs, targets, indices in job.loader:
            optimizer.zero_grad()
            F.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
            seen += [(epoch, index) for index in indices.tolist()]
            if job.step + 1 == stop_at:
                job.stop()
    return job


TWO_PASSES_OF_18 = Counter((epoch, index) for epoch in range(2) for index in range(18))


def test_the_length_of_a_stream_is_learned_in_its_first_pass() -> None:
    seen: list[tuple[int, int]] = []
    job = train(LineStream(18), seen)
    assert Counter(seen) == TWO_PASSES_OF_18
    assert job.progress == pytest.approx(9)
    assert job.statistical_epoch == pytest.approx(2)
    assert job.complete


def test_a_stream_of_known_length_can_end_within_a_pass() -> None:
    seen: list[tuple[int, int]] = []
    job = train(LineStream(16), seen, epochs=1.5, num_samples=16, lr_schedule=lambda epoch: 1 - epoch / 2)
    assert len(seen) == 24
    assert len(job.loader) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stopped_training_on_a_stream_goes_on_at_the_next_sample(tmp_path: Path, workers: int) -> None:
    seen: list[tuple[int, int]] = []
    for stop_at in (3, 7):
        with pytest.raises(SystemExit):
            train(LineStream(18), seen, stop_at=stop_at, checkpoint_dir=tmp_path, num_workers=workers)
    job = train(LineStream(18), seen, checkpoint_dir=tmp_path, num_workers=workers)
    assert Counter(seen) == TWO_PASSES_OF_18
    assert job.complete


def on_ranks(count: int) -> tuple[list[tuple[int, int]], float, list[float]]:
    seen: list[tuple[int, int]] = []
    job = train(LineStream(count), seen, batch_size=6, max_batch_size=6, max_local_batch_size=2)
    return seen, job.progress, job.model.weight.flatten().tolist()


def test_the_uneven_end_of_a_stream_does_not_hang_and_trains_as_on_one_rank() -> None:
    ((_, _, want),) = run_gang(1, on_ranks, 17)
    answers = run_gang(3, on_ranks, 17)
    for _, progress, weight in answers:
        assert progress == pytest.approx(34 / 6)
        assert weight == pytest.approx(want, abs=1e-6)
    used = Counter(pair for seen, *_ in answers for pair in seen)
    assert set(used) == {(epoch, index) for epoch in range(2) for index in range(17)}


@pytest.mark.parametrize(
    ("stream", "arguments", "message"),
    [
        pytest.param(LineStream(0), {}, "gave no sample", id="empty"),
        pytest.param(LineStream(8), {"lr_schedule": lambda epoch: 1.0}, "give num_samples", id="no length"),
        pytest.param(LineStream(8), {"num_samples": 0}, "num_samples is 0", id="no samples"),
        pytest.param(Line(8), {"num_samples": 9}, "has 8; leave it out", id="another length"),
    ],
)
def test_streams_that_cannot_be_trained_on_are_named(
    stream: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DocumentError, match=message):
        train(stream, [], **arguments)


def test_what_is_no_data_set_is_named() -> None:
    with pytest.raises(TypeError, match="IterableDataset"):
        train(iter([1, 2, 3]), [])

"""The elastic sampler shows each sample once a pass, across any sequence of resizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux_agent.torch.sampler import BatchPlan, ElasticSampler, split_step

plans = st.tuples(
    st.integers(1, 6),  # replicas
    st.integers(1, 40),  # batch size
    st.integers(1, 4),  # micro-batches
    st.integers(1, 5),  # steps until the next resize
)


def take(sampler: ElasticSampler, plan: BatchPlan, *, num_replicas: int, steps: int) -> list[int]:
    """Samples that count in the next ``steps`` steps over all ranks; advances the sampler."""
    ranks = [
        list(sampler.micro_batches(plan, rank=rank, num_replicas=num_replicas))
        for rank in range(num_replicas)
    ]
    assert len({len(micro) for micro in ranks}) == 1, (
        "ranks differ in micro-batches, so a collective would hang"
    )
    seen: list[int] = []
    for turn in zip(*ranks, strict=True):
        assert len({(m.position, m.micro_batches, m.step_samples) for m in turn}) == 1
        for micro in turn:
            assert micro.indices
            seen.extend(micro.indices[: micro.num_samples])
        if turn[0].last:
            sampler.advance(turn[0].step_samples)
            steps -= 1
            if steps == 0:
                break
    return seen


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 120), st.integers(0, 5), st.lists(plans, min_size=1, max_size=8), plans)
def test_each_sample_counts_once_a_pass_whatever_the_resizes(num_samples, seed, resizes, last) -> None:
    sampler = ElasticSampler(num_samples, seed=seed)
    seen: list[int] = []
    for replicas, batch_size, micro_batches, steps in resizes:
        plan = BatchPlan(batch_size=batch_size, micro_batches=micro_batches)
        seen += take(sampler, plan, num_replicas=replicas, steps=steps)
        resumed = ElasticSampler(num_samples, seed=seed + 1)
        resumed.load_state_dict(sampler.state_dict())
        sampler = resumed
    plan = BatchPlan(batch_size=last[1], micro_batches=last[2])
    seen += take(sampler, plan, num_replicas=last[0], steps=num_samples + 1)
    assert sorted(seen) == list(range(num_samples))
    assert sampler.remaining == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 5))
def test_a_step_is_split_evenly_and_ranks_without_samples_borrow_one(
    num_samples, replicas, micro_batches
) -> None:
    samples = list(range(100, 100 + num_samples))
    ranks = [
        list(split_step(samples, micro_batches, rank=rank, num_replicas=replicas)) for rank in range(replicas)
    ]
    shares = [sum(micro.num_samples for micro in rank) for rank in ranks]
    assert sum(shares) == num_samples
    assert max(shares) - min(shares) <= 1
    for rank in ranks:
        sizes = [micro.num_samples for micro in rank]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(micro.indices) == max(1, micro.num_samples) for micro in rank)
        assert all(index in samples for micro in rank for index in micro.indices)
        assert [micro.last for micro in rank] == [False] * (len(rank) - 1) + [True]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(1, 12))
def test_no_micro_batch_is_smaller_than_the_least_or_larger_than_memory_holds(
    num_samples, replicas, micro_batches, least, room
) -> None:
    samples, spare = list(range(100, 100 + num_samples)), [7, 8, 9]
    largest = max(least, room, -(-num_samples // (replicas * micro_batches)))
    ranks = [
        list(
            split_step(
                samples,
                micro_batches,
                rank=rank,
                num_replicas=replicas,
                least=least,
                largest=largest,
                spare=spare,
            )
        )
        for rank in range(replicas)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    counted = [index for rank in ranks for micro in rank for index in micro.indices[: micro.num_samples]]
    assert sorted(counted) == samples
    for micro in (micro for rank in ranks for micro in rank):
        assert least <= len(micro.indices) <= largest
        assert set(micro.indices) <= {*samples, *spare}
        assert len(micro.indices) == max(micro.num_samples, least)


def test_a_micro_batch_is_filled_up_only_where_there_is_no_other_way() -> None:
    samples = list(range(5))
    ranks = [list(split_step(samples, 2, rank=r, num_replicas=4, least=2, largest=4)) for r in range(4)]
    assert [[micro.num_samples for micro in rank] for rank in ranks] == [[3], [2], [0], [0]]


def test_a_full_step_gives_every_micro_batch_the_same_size() -> None:
    (first, second) = split_step(list(range(48)), 2, rank=1, num_replicas=3)
    assert (first.num_samples, second.num_samples) == (8, 8)


def test_the_order_is_the_same_everywhere_and_another_each_pass() -> None:
    one, other = ElasticSampler(50, seed=3), ElasticSampler(50, seed=3)
    assert np.array_equal(one.order(), other.order())
    one.next_epoch()
    assert not np.array_equal(one.order(), other.order())


def test_ten_samples_over_three_ranks_then_two_are_seen_once() -> None:
    sampler = ElasticSampler(10, seed=0)
    seen = take(sampler, BatchPlan(batch_size=4, micro_batches=1), num_replicas=3, steps=1)
    assert sampler.cursor == 4
    seen += take(sampler, BatchPlan(batch_size=4, micro_batches=1), num_replicas=2, steps=9)
    assert sorted(seen) == list(range(10))


def test_a_data_set_of_another_size_is_refused() -> None:
    state = ElasticSampler(10, seed=0).state_dict()
    with pytest.raises(ValueError, match=r"10 training samples, but the script now has 11"):
        ElasticSampler(11, seed=0).load_state_dict(state)

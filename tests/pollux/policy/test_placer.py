"""Placement of chosen configurations: everything that fits by count finds a place, with few moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_builder import after_decision, make_job, make_snapshot, new_job

from pollux.policy import decide
from pollux.policy.assign import choose
from pollux.policy.options import options_of
from pollux.policy.placer import place
from pollux.snapshot import PolicySettings, Snapshot


@st.composite
def crowds(draw: st.DrawFn) -> Snapshot:
    """Jobs of any size, some of them running or of a fixed odd size, on nodes of several sizes."""
    nodes = {f"n{index}": draw(st.sampled_from([4, 4, 6, 8])) for index in range(draw(st.integers(1, 8)))}
    free = dict(nodes)
    jobs = []
    for index in range(draw(st.integers(1, 20))):
        where = draw(st.sampled_from(list(nodes)))
        held = draw(st.sampled_from([1, 2, 4]))
        placement = {where: held} if free[where] >= held and draw(st.booleans()) else {}
        if placement:
            free[where] -= held
        gang = 1 if placement else draw(st.sampled_from([1, 1, 1, 3, 5, 7, 9, 13]))
        most = 64 if gang == 1 else gang
        jobs.append(
            make_job(f"job-{index}", min_gpus=gang, max_gpus=most, max_gpus_seen=64, placement=placement)
        )
    return make_snapshot(jobs, nodes=nodes)


def is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


@pytest.mark.parametrize("padded", [False, True])
@given(snapshot=crowds(), seed=st.integers(0, 100))
@settings(deadline=None, max_examples=60)
def test_every_choice_within_the_capacities_finds_its_place(
    padded: bool, snapshot: Snapshot, seed: int
) -> None:
    """Padded capacities promise that always, the others where all counts within a node are powers of two."""
    options = options_of(snapshot, padded=padded)
    gain = np.random.default_rng(seed).uniform(0.1, 1.0, len(options.job))
    choice = choose(options, gain, must=np.zeros(len(snapshot.jobs), dtype=np.bool_))
    placements = place(snapshot, options, choice.option)
    sizes = {node.name: node.gpus for node in snapshot.nodes}
    picked = choice.option[choice.option >= 0]
    odd = any(not is_power_of_two(int(gpus)) for gpus in options.gpus[picked[options.width[picked] == 0]])
    spanning: list[str] = []
    for row, chosen in enumerate(choice.option.tolist()):
        where = placements[row]
        if not padded and chosen >= 0 and not where and odd:
            continue
        assert sum(where.values()) == (options.gpus[chosen] if chosen >= 0 else 0)
        assert len(where) == (options.nodes[chosen] if chosen >= 0 else 0)
        if len(where) > 1:
            assert sum(gpus < sizes[name] for name, gpus in where.items()) <= 1
            spanning += where
    assert len(spanning) == len(set(spanning))
    for name, size in sizes.items():
        assert sum(where.get(name, 0) for where in placements) <= size


def test_jobs_stay_unless_the_free_gpus_are_too_scattered() -> None:
    stay = [make_job(f"stay-{index}", placement={f"n{index}": 1}, max_gpus=1) for index in range(3)]
    large = make_job("large", min_gpus=4, max_gpus=4)
    snapshot = make_snapshot([*stay, large], nodes=dict.fromkeys(("n0", "n1", "n2"), 4))
    options = options_of(snapshot)
    choice = choose(options, np.ones(len(options.job)), must=np.zeros(4, dtype=np.bool_))
    placements = place(snapshot, options, choice.option)
    moved = [
        job.job_id for job, where in zip(snapshot.jobs, placements, strict=True) if where != job.placement
    ]
    assert len(moved) == 2 and "large" in moved
    assert max(placements[3].values()) == 4


@pytest.mark.parametrize("dear", range(3))
@pytest.mark.parametrize("gpus", [4, 8])
def test_who_has_to_move_is_whose_restart_is_cheapest(dear: int, gpus: int) -> None:
    stay = [
        make_job(
            f"stay-{row}", placement={f"n{row}": 1}, max_gpus=1, restart_s=300.0 if row == dear else 30.0
        )
        for row in range(3)
    ]
    large = make_job("large", min_gpus=gpus, max_gpus=gpus)
    snapshot = make_snapshot([*stay, large], nodes=dict.fromkeys(("n0", "n1", "n2"), 4))
    options = options_of(snapshot)
    choice = choose(options, np.ones(len(options.job)), must=np.zeros(4, dtype=np.bool_))
    placements = place(snapshot, options, choice.option)
    assert sum(placements[3].values()) == gpus
    assert placements[dear] == stay[dear].placement


def test_what_a_gang_leaves_of_its_last_node_serves_another_job() -> None:
    running = make_job("running", placement={"n0": 2}, max_gpus=4, target_progress=1e6)
    gang = new_job("gang", kind="rigid", min_gpus=3, max_gpus=3)
    for name in ("sia", "ours"):
        snapshot = make_snapshot([running, gang], nodes={"n0": 2, "n1": 2}, policy=PolicySettings(name=name))
        decision = decide(snapshot)
        assert sum(decision.jobs["gang"].placement.values()) == 3
        assert sum(decision.jobs["running"].placement.values()) == 1
        assert decide(after_decision(snapshot, decision)).jobs["running"].placement

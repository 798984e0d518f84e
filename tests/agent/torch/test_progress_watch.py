"""The watch on training that falls behind its predicted progress."""

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest

from pollux_agent.model.goodput import BatchLimits
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.torch.history import History
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.tuner import Tuner
from pollux_agent.torch.watch import POINTS, ProgressWatch

PARAMS = ThroughputParams(
    alpha_grad=0.1,
    beta_grad=0.001,
    alpha_sync_local=0.2,
    beta_sync_local=0.0,
    alpha_sync_node=0.3,
    beta_sync_node=0.0,
    gamma=1.0,
)
LIMITS = BatchLimits(initial_batch_size=32, max_batch_size=1024, max_local_batch_size=256)
AT_M0 = BatchPlan(batch_size=32, micro_batches=1)


def straight(progress: float) -> float:
    """A loss that falls as the logarithm of progress grows."""
    return 3 - 0.4 * math.log(progress)


def flattening(progress: float) -> float:
    """A loss that falls fast and then hardly at all, as one of a small data set does."""
    return 0.05 + 2.3 * math.exp(-progress / 60)


def train(
    breaks_at: int,
    *,
    rounds: int = 120,
    seed: int = 0,
    noise: float = 0.05,
    curve: Callable[[float], float] = straight,
) -> tuple[History, list[int]]:
    """Steps of a job whose loss follows ``curve``, but stands still above ``breaks_at``."""
    rng = np.random.default_rng(seed)
    history = History()
    tuner = Tuner(
        LIMITS,
        adaptive=True,
        num_nodes=1,
        num_replicas=2,
        prior=PARAMS,
        watch=ProgressWatch("loss", history),
    )
    plan = tuner.choose(100_000.0, None, largest_batch_size=0)
    real, sizes = 0.0, []
    for _ in range(rounds):
        for _ in range(10):
            history.progress += plan.batch_size / 32
            real += plan.batch_size / 32 if plan.batch_size <= breaks_at else 0.0
            history.max_batch_size_seen = max(history.max_batch_size_seen, plan.batch_size)
            tuner.observe({"loss": curve(real) + rng.normal(0, noise), "other": 1.0})
        plan = tuner.choose(100_000.0, plan, largest_batch_size=history.max_batch_size_seen)
        sizes.append(plan.batch_size)
    return history, sizes


@pytest.mark.parametrize("seed", range(5))
def test_a_rule_that_carries_lets_the_batch_grow_to_what_is_best(seed: int) -> None:
    history, sizes = train(breaks_at=2048, seed=seed)
    assert sizes[-1] > 512
    assert history.held_batch_size == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_has_fallen_already_is_no_sign_of_a_rule_that_breaks(seed: int) -> None:
    history, sizes = train(breaks_at=2048, seed=seed, curve=flattening)
    assert sizes[-1] > 512
    assert history.held_batch_size == 0


@pytest.mark.parametrize("seed", range(5))
def test_where_the_loss_falls_behind_the_batch_goes_back_and_stays(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    history, sizes = train(breaks_at=128, seed=seed)
    assert max(sizes) == 256
    assert history.held_batch_size == sizes[-1] == 128
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "raised to 256" in told.getMessage() and "stay at 128" in told.getMessage()


def test_what_was_held_is_held_after_a_restart() -> None:
    history, _ = train(breaks_at=64)
    again = History()
    again.load_state_dict(history.state_dict())
    tuner = Tuner(
        LIMITS, adaptive=True, num_nodes=1, num_replicas=2, prior=PARAMS, watch=ProgressWatch("loss", again)
    )
    plan = tuner.choose(100_000.0, None, largest_batch_size=again.max_batch_size_seen)
    assert plan.batch_size == 64
    assert again.batch_size_limit(LIMITS) == 64  # what the scheduler is told
    assert History().batch_size_limit(LIMITS) == LIMITS.max_batch_size


def test_a_loss_that_is_no_number_takes_the_raise_back() -> None:
    history = History()
    watch = ProgressWatch("loss", history)
    watch.chosen(32)
    for step in range(POINTS):
        history.progress = step + 1.0
        watch.observe(2.0 - 0.1 * step)
    assert watch.limit == math.inf
    watch.chosen(64)
    assert watch.limit == 64
    watch.observe(math.nan)
    assert watch.limit == history.held_batch_size == 32


def test_without_figures_the_batch_is_not_raised() -> None:
    history = History()
    tuner = Tuner(
        LIMITS, adaptive=True, num_nodes=1, num_replicas=2, prior=PARAMS, watch=ProgressWatch("loss", history)
    )
    plan = tuner.choose(100_000.0, None, largest_batch_size=0)
    assert tuner.choose(100_000.0, plan, largest_batch_size=32) == plan == AT_M0

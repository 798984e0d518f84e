"""The tuner, and the step times that it learns from."""

from collections.abc import Iterable

import numpy as np
import pytest

from pollux_agent.model.fit import Observation, PaperThroughput
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.torch.profile import KEPT_TIMES, WARM_UP_STEPS, Pace, Profile, StepTimer
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.tuner import Tuner, local_batch_size

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


def tuner(num_replicas: int = 2, *, adaptive: bool = True, fitted: bool = True) -> Tuner:
    return Tuner(
        LIMITS,
        adaptive=adaptive,
        num_nodes=1,
        num_replicas=num_replicas,
        prior=PARAMS if fitted else None,
    )


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_a_job_starts_at_m0_whatever_an_earlier_fit_says(num_replicas: int) -> None:
    assert tuner(num_replicas).choose(5000.0, None, largest_batch_size=0) == AT_M0


def test_where_m0_does_not_divide_evenly_the_next_batch_above_is_used() -> None:
    plan = tuner(3).choose(None, None, largest_batch_size=0)
    assert plan == BatchPlan(batch_size=33, micro_batches=1)


def test_without_noise_or_fit_the_plan_stays() -> None:
    assert tuner().choose(None, AT_M0, largest_batch_size=32) == AT_M0
    assert tuner(fitted=False).choose(5000.0, AT_M0, largest_batch_size=32) == AT_M0


def test_a_noisy_gradient_lets_the_batch_grow_by_doublings_to_what_is_best() -> None:
    choosing, plan, largest = tuner(), AT_M0, 32
    sizes = []
    for _ in range(8):
        plan = choosing.choose(100_000.0, plan, largest_batch_size=largest)
        largest = max(largest, plan.batch_size)
        sizes.append(plan.batch_size)
    assert sizes[:4] == [64, 128, 256, 512]
    assert sizes[-1] > 512
    assert all(size <= LIMITS.max_batch_size for size in sizes)


def test_no_gpu_gets_less_than_its_least_however_small_the_batches_were_before() -> None:
    limits = BatchLimits(
        initial_batch_size=4, max_batch_size=1024, max_local_batch_size=64, min_local_batch_size=8
    )
    choosing = Tuner(limits, adaptive=True, num_nodes=2, num_replicas=4, prior=PARAMS)
    plan = choosing.choose(100_000.0, None, largest_batch_size=8)
    assert plan == BatchPlan(batch_size=32, micro_batches=1)


def test_one_gpu_grows_by_accumulation_so_that_noise_can_be_seen() -> None:
    plan = tuner(1).choose(100_000.0, AT_M0, largest_batch_size=32)
    assert plan == BatchPlan(batch_size=64, micro_batches=2)


def test_a_gain_below_five_percent_changes_nothing() -> None:
    choosing = tuner()
    best = choosing.choose(300.0, AT_M0, largest_batch_size=1024)
    near = BatchPlan(batch_size=best.batch_size + 2, micro_batches=best.micro_batches)
    assert choosing.choose(300.0, near, largest_batch_size=1024) == near


def test_a_fixed_batch_stays_m0_in_as_few_pieces_as_memory_allows() -> None:
    limits = BatchLimits(initial_batch_size=33, max_batch_size=1024, max_local_batch_size=4)
    fixed = Tuner(limits, adaptive=False, num_nodes=1, num_replicas=2, prior=PARAMS)
    plan = fixed.choose(5000.0, AT_M0, largest_batch_size=33)
    assert plan == BatchPlan(batch_size=33, micro_batches=5)  # 17 samples a replica, 4 at a time


def test_the_prediction_is_the_models() -> None:
    predicted = tuner().predict(96.0, BatchPlan(batch_size=64, micro_batches=1))
    assert predicted is not None
    assert predicted.throughput == pytest.approx(64 / (0.1 + 0.032 + 0.2))
    assert predicted.efficiency == pytest.approx((96 + 32) / (96 + 64))


def test_a_fit_follows_the_measured_step_times() -> None:
    profile = Profile()
    for local in (8, 32, 128):
        for _ in range(5):
            profile.record((1, 1, local), accum_s=[0.1 + 0.001 * local], optim_s=0.1 + 0.001 * local)
    fitting = tuner(1, fitted=False)
    fitting.refit(profile)
    assert fitting.params is not None
    assert fitting.params.alpha_grad == pytest.approx(0.1, rel=0.05)
    assert fitting.params.beta_grad == pytest.approx(0.001, rel=0.05)


def test_a_profile_is_not_moved_by_outliers_and_survives_a_checkpoint() -> None:
    profile = Profile()
    for optim_s in [0.2] * 9 + [30.0]:
        profile.record((1, 2, 16), accum_s=[], optim_s=optim_s)
    again = Profile()
    again.load_state_dict(profile.state_dict())
    (observation,) = again.observations()
    assert observation.optim_step_time_s == 0.2
    assert observation.accum_step_time_s is None
    assert (observation.num_nodes, observation.num_replicas, observation.local_batch_size) == (1, 2, 16)
    assert observation.count == 10 <= KEPT_TIMES


class Clock:
    """Time that passes only when told, and by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.cpu += seconds

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_timer_leaves_out_what_happens_at_the_boundary_and_the_warm_up() -> None:
    clock = Clock()
    timer = StepTimer(clock=lambda: clock.now)
    taken = []
    for _ in range(WARM_UP_STEPS + 1):
        timer.start()
        for seconds in (1.0, 1.5, 2.0):
            clock.now += seconds
            timer.end()
        taken.append(timer.take())
        clock.now += 100.0
    assert [measured for *_, measured in taken] == [False] * WARM_UP_STEPS + [True]
    assert taken[-1][:2] == ([1.0, 1.5], 2.0)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_the_pace_keeps_cpu_time_at_the_share(share: float) -> None:
    clock = Clock()
    pace = Pace(share, clock=lambda: clock.now, cpu_clock=lambda: clock.cpu, sleep=clock.sleep)
    for step in range(200):
        clock.work(0.02 + 0.01 * (step % 3))
        pace.pause()
    assert clock.cpu / clock.now == pytest.approx(share, rel=0.02)


def test_waiting_earns_the_pace_no_long_burst() -> None:
    clock = Clock()
    pace = Pace(0.5, credit_s=0.05, clock=lambda: clock.now, cpu_clock=lambda: clock.cpu, sleep=clock.sleep)
    clock.sleep(60.0)
    pace.pause()
    before = clock.now
    clock.work(1.0)
    pace.pause()
    assert clock.now - before == pytest.approx(2.0, abs=0.11)


def test_an_earlier_run_stands_in_for_what_this_one_has_not_tried() -> None:
    profile = Profile()
    for local in (8, 32, 128):
        profile.record((1, 1, local), accum_s=[0.1 + 0.001 * local], optim_s=0.1 + 0.001 * local)
    fitting = tuner(1, fitted=False)
    fitting.refit(profile)
    assert fitting.params is not None
    assert fitting.params.alpha_sync_node == 0.0
    fitting.learn(PARAMS)
    fitting.refit(profile)
    assert fitting.params.alpha_sync_node == pytest.approx(PARAMS.alpha_sync_node)
    assert fitting.params.alpha_grad == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_a_noisy_but_stationary_profile_leaves_the_batch_alone(num_replicas: int) -> None:
    """Step times vary by 10 % and the noise scale by 5 % around one value; only a real gain changes M."""
    rng = np.random.default_rng(2)
    choosing = tuner(num_replicas, fitted=False)
    profile, plan, plans = Profile(), AT_M0, []
    for _ in range(60):
        local = local_batch_size(plan, num_replicas)
        for _ in range(20):
            grad_s, sync_s = 0.1 + 0.001 * local, 0.0 if num_replicas == 1 else 0.2
            accum_s = [grad_s * rng.lognormal(0, 0.1) for _ in range(plan.micro_batches - 1)]
            profile.record(
                (1, num_replicas, local), accum_s=accum_s, optim_s=(grad_s + sync_s) * rng.lognormal(0, 0.1)
            )
        choosing.refit(profile)
        noise_scale = 500.0 * rng.lognormal(0, 0.05)
        plan = choosing.choose(noise_scale, plan, largest_batch_size=1024)
        plans.append(plan)
    assert plans[-1].batch_size > AT_M0.batch_size
    assert len(set(plans[10:])) == 1


def test_the_papers_model_given_as_the_users_chooses_as_the_built_in_one() -> None:
    profile = Profile()
    for local in (8, 16, 32):
        profile.record((1, 2, local), accum_s=[0.1 + 0.001 * local], optim_s=0.3 + 0.001 * local)
    given = Tuner(LIMITS, adaptive=True, num_nodes=1, num_replicas=2, throughput=PaperThroughput())
    built_in = tuner(2, fitted=False)
    plans = []
    for choosing in (given, built_in):
        choosing.refit(profile)
        plans.append(choosing.choose(5000.0, AT_M0, largest_batch_size=1024))
    assert plans[0] == plans[1] != AT_M0
    assert given.model == built_in.params


class Broken:
    """A throughput model whose fit always fails."""

    def fit(self, profile: Iterable[Observation], *, prior: ThroughputParams | None = None) -> None:
        raise ZeroDivisionError("no data")


def test_an_error_in_the_users_throughput_model_does_not_end_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choosing = Tuner(LIMITS, adaptive=True, num_nodes=1, num_replicas=2, throughput=Broken())
    profile = Profile()
    profile.record((1, 2, 16), accum_s=[], optim_s=0.2)
    choosing.refit(profile)
    assert choosing.choose(5000.0, AT_M0, largest_batch_size=32) == AT_M0
    assert "Broken" in caplog.text

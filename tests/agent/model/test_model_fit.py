"""The throughput fit: known parameters come back, priors hold, and nothing makes it raise."""

import csv
import os
from dataclasses import asdict, astuple, replace
from math import inf, isfinite, nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import approx_fprime

from pollux_agent.model.fit import Observation, fit_throughput, paper_tier
from pollux_agent.model.throughput import ThroughputParams, grad_time, is_sane, step_time
from pollux_agent.model.tiers import Objective, usable

TRUTH = ThroughputParams(
    alpha_grad=0.05,
    beta_grad=0.002,
    alpha_sync_local=0.03,
    beta_sync_local=0.0005,
    alpha_sync_node=0.12,
    beta_sync_node=0.002,
    gamma=1.6,
)
CONFIGURATIONS = (
    (1, 1, 32),
    (1, 1, 64),
    (1, 2, 32),
    (1, 4, 64),
    (1, 4, 128),
    (2, 4, 32),
    (2, 8, 64),
    (4, 16, 128),
)


def observe(*configurations: tuple[int, int, int], truth: ThroughputParams = TRUTH) -> list[Observation]:
    return [
        Observation(
            num_nodes=nodes,
            num_replicas=replicas,
            local_batch_size=local,
            optim_step_time_s=float(step_time(truth, nodes, replicas, local)),
            accum_step_time_s=float(grad_time(truth, local)),
        )
        for nodes, replicas, local in configurations
    ]


def mean_error(params: ThroughputParams, profile: list[Observation]) -> float:
    """Mean relative error of the predicted optimizer step."""
    errors = [
        abs(
            float(step_time(params, o.num_nodes, o.num_replicas, o.local_batch_size)) / o.optim_step_time_s
            - 1
        )
        for o in profile
    ]
    return float(np.mean(errors))


def test_known_parameters_come_back() -> None:
    found = fit_throughput(observe(*CONFIGURATIONS))
    assert found is not None
    assert found.alpha_grad == pytest.approx(TRUTH.alpha_grad, rel=0.01)
    assert found.beta_grad == pytest.approx(TRUTH.beta_grad, rel=0.01)
    assert mean_error(found, observe(*CONFIGURATIONS)) < 0.01
    assert mean_error(found, observe((2, 6, 100), (3, 12, 48))) < 0.03


def test_noise_of_five_percent_is_averaged_out() -> None:
    rng = np.random.default_rng(1)
    noisy = [
        Observation(
            **{
                **asdict(seen),
                "optim_step_time_s": seen.optim_step_time_s * float(np.exp(rng.normal(0, 0.05))),
                "accum_step_time_s": (seen.accum_step_time_s or 0) * float(np.exp(rng.normal(0, 0.05))),
            }
        )
        for seen in observe(*CONFIGURATIONS) * 8
    ]
    found = fit_throughput(noisy)
    assert found is not None
    assert mean_error(found, observe(*CONFIGURATIONS)) < 0.05


@pytest.mark.parametrize("accumulated", [True, False], ids=["with accumulation", "without"])
def test_the_gradient_is_exact(accumulated: bool) -> None:
    profile = observe(*CONFIGURATIONS)
    if not accumulated:
        profile = [replace(seen, accum_step_time_s=None) for seen in profile]
    points = usable(profile, paper_tier, 2)
    assert points is not None
    objective = Objective(points)
    for seed in range(5):
        factors = np.random.default_rng(seed).uniform(0.3, 3.0, size=7)
        theta = np.array(astuple(TRUTH)) * factors
        theta[6] = 1.0 + factors[6]
        _, gradient = objective(theta)
        numeric = approx_fprime(theta, lambda x: objective(x)[0], 1e-7 * theta)
        assert gradient * theta == pytest.approx(numeric * theta, abs=1e-5)


def test_on_one_gpu_synchronisation_is_taken_to_be_free() -> None:
    found = fit_throughput(observe((1, 1, 32), (1, 1, 64), (1, 1, 128)))
    assert found is not None
    assert astuple(found)[2:] == (0.0, 0.0, 0.0, 0.0, 1.0)
    assert found.alpha_grad == pytest.approx(TRUTH.alpha_grad, rel=0.01)


@pytest.mark.parametrize("restarted", [False, True], ids=["at once", "after a restart on more GPUs"])
def test_on_one_node_several_nodes_are_taken_to_cost_a_tenth_more(restarted: bool) -> None:
    before = fit_throughput(observe((1, 1, 32), (1, 1, 64))) if restarted else None
    found = fit_throughput(observe((1, 1, 32), (1, 2, 64), (1, 2, 32)), prior=before)
    assert found is not None
    assert found.alpha_sync_local > 0
    assert found.alpha_sync_node == pytest.approx(1.1 * found.alpha_sync_local)
    assert (found.beta_sync_local, found.beta_sync_node) == (0.0, 0.0)


def test_with_two_gpus_on_two_nodes_one_node_is_taken_to_be_free() -> None:
    found = fit_throughput(observe((1, 1, 32), (2, 2, 64), (2, 2, 32)))
    assert found is not None
    assert found.alpha_sync_local == 0.0
    assert found.alpha_sync_node > 0
    assert found.beta_sync_node == 0.0


def test_with_one_batch_size_half_of_the_computation_is_constant() -> None:
    found = fit_throughput(observe((1, 1, 64), (1, 2, 64)))
    assert found is not None
    compute_s = float(grad_time(TRUTH, 64))
    assert found.alpha_grad == pytest.approx(compute_s / 2)
    assert found.beta_grad * 64 == pytest.approx(compute_s / 2, rel=0.02)


def test_without_accumulation_the_optimizer_steps_are_enough() -> None:
    profile = [
        Observation(
            num_nodes=seen.num_nodes,
            num_replicas=seen.num_replicas,
            local_batch_size=seen.local_batch_size,
            optim_step_time_s=seen.optim_step_time_s,
        )
        for seen in observe(*CONFIGURATIONS)
    ]
    found = fit_throughput(profile)
    assert found is not None
    assert mean_error(found, profile) < 0.02


def test_an_earlier_fit_stands_in_for_what_was_not_tried_yet() -> None:
    found = fit_throughput(observe((1, 1, 32), (1, 1, 64)), prior=TRUTH)
    assert found is not None
    assert found.alpha_sync_local == pytest.approx(TRUTH.alpha_sync_local)
    assert found.beta_sync_node == pytest.approx(TRUTH.beta_sync_node)
    assert fit_throughput([], prior=TRUTH) == TRUTH


def point(**change: object) -> Observation:
    plain: dict[str, object] = {
        "num_nodes": 1,
        "num_replicas": 1,
        "local_batch_size": 32,
        "optim_step_time_s": 0.1,
        "accum_step_time_s": 0.1,
    }
    return Observation(**{**plain, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        point(optim_step_time_s=nan),
        point(optim_step_time_s=inf),
        point(optim_step_time_s=0.0),
        point(optim_step_time_s=-1.0),
        point(optim_step_time_s=1e9),
        point(num_nodes=2),
        point(num_nodes=0),
        point(local_batch_size=0),
        point(count=0),
    ],
)
def test_an_impossible_observation_is_left_out(bad: Observation) -> None:
    assert fit_throughput([bad]) is None
    good = observe(*CONFIGURATIONS)
    assert fit_throughput([*good, bad]) == fit_throughput(good)


def test_one_observation_and_equal_observations_give_the_same_fit() -> None:
    once = fit_throughput([point()])
    assert once is not None
    assert is_sane(once)
    assert astuple(once) == pytest.approx(astuple(fit_throughput([point()] * 5) or once))
    assert float(step_time(once, 1, 1, 32)) == pytest.approx(0.1, rel=0.01)


def test_equal_configurations_count_by_their_steps() -> None:
    found = fit_throughput(
        [
            point(optim_step_time_s=0.1, accum_step_time_s=None, count=3),
            point(optim_step_time_s=0.2, accum_step_time_s=None, count=1),
        ]
    )
    assert found is not None
    assert float(step_time(found, 1, 1, 32)) == pytest.approx(0.125, rel=0.01)


seconds = st.one_of(st.floats(), st.floats(1e-6, 1e3), st.just(0.0))
observations = st.builds(
    Observation,
    num_nodes=st.integers(-1, 4),
    num_replicas=st.integers(-1, 8),
    local_batch_size=st.integers(-1, 4096),
    optim_step_time_s=seconds,
    accum_step_time_s=st.one_of(st.none(), seconds),
    count=st.integers(0, 1000),
)


@given(profile=st.lists(observations, max_size=8))
@settings(deadline=None, max_examples=100)
def test_it_never_raises_and_what_it_gives_is_sane(profile: list[Observation]) -> None:
    found = fit_throughput(profile)
    if found is not None:
        assert is_sane(found)
        assert isfinite(float(step_time(found, 2, 8, 64, 3)))


APPS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")


@pytest.mark.needs("traces")
@pytest.mark.parametrize("app", APPS)
def test_the_fit_of_recorded_jobs_is_within_ten_percent_on_average(app: str) -> None:
    """Pollux section 5.2 states an average error of at most 10 % for these six jobs."""
    profile = []
    with (Path(os.environ["POLLUX_TRACES"]) / "apps" / app / "placements.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        for row in csv.DictReader(file):
            step_s, sync_s = float(row["step_time"]), float(row["sync_time"])
            profile.append(
                Observation(
                    num_nodes=len(row["placement"]),
                    num_replicas=sum(int(digit) for digit in row["placement"]),
                    local_batch_size=int(row["local_bsz"]),
                    optim_step_time_s=step_s,
                    accum_step_time_s=step_s - sync_s,
                )
            )
    found = fit_throughput(profile)
    assert found is not None
    assert mean_error(found, profile) <= 0.10

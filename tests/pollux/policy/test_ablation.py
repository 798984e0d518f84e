"""Our policy less one ingredient: it sees of its jobs what it says, and decides as ours does on that."""

from dataclasses import replace

import numpy as np
import pytest
from snapshot_builder import make_job, make_snapshot

from pollux.errors import ConfigError
from pollux.policy import POLICIES, STUDIED, decide
from pollux.policy.ablation import ABLATION, MISTAKE, Variant
from pollux.policy.options import options_of
from pollux.policy.ours import formulate, noise_growth
from pollux.snapshot import Job, Snapshot

JOBS = [
    make_job("short", target_progress=2e4, progress=1.9e4, restart_s=20.0, placement={"node-0": 1}),
    make_job("long", target_progress=9e5, progress=1e3, restart_s=200.0, placement={"node-0": 1}),
    make_job("silent", restart_s=None),
]


def cluster(policy: str) -> Snapshot:
    plain = make_snapshot(JOBS)
    return replace(plain, policy=replace(plain.policy, name=policy))


def variant(name: str) -> Variant:
    return next(each for each in ABLATION if each.name == name)


@pytest.mark.parametrize("name", list(STUDIED))
def test_it_decides_as_ours_does_on_what_it_sees(name: str) -> None:
    snapshot = cluster(name)
    decision = decide(snapshot, studied=True)
    growth = noise_growth(snapshot)
    jobs = tuple(variant(name).see(*pair) for pair in zip(snapshot.jobs, growth, strict=True))
    seen = replace(cluster("ours"), jobs=jobs)
    assert decision.policy == name
    assert decision.jobs == decide(seen).jobs


def test_each_hides_or_distorts_one_thing() -> None:
    changed = {
        each.name: {
            field
            for job in JOBS
            for field in Job.__dataclass_fields__
            if getattr(each.see(job, 2.0), field) != getattr(job, field)
        }
        for each in ABLATION
    }
    assert changed == {
        "ours-without-remaining": {"target_progress"},
        "ours-misled": {"target_progress"},
        "ours-without-restart-cost": {"restart_s"},
        "ours-free-restarts": {"restart_s"},
        "ours-by-throughput": {"noise_scale"},
        "ours-shortsighted": {"noise_scale"},
    }


def test_the_misled_one_is_wrong_about_what_is_left_by_the_factor_in_either_direction() -> None:
    jobs = [make_job(f"job-{number}", target_progress=1e5, progress=4e4) for number in range(40)]
    seen = [variant("ours-misled").see(job, 1.0) for job in jobs]
    left = {round((job.target_progress or 0.0) - job.progress) for job in seen}
    assert left == {round(6e4 * MISTAKE), round(6e4 / MISTAKE)}


@pytest.mark.parametrize("name", list(STUDIED))
def test_they_are_no_policies_to_choose(name: str) -> None:
    assert name not in POLICIES
    with pytest.raises(
        ConfigError, match=f"'{name}', which is for simulations only; use one of pollux, sia, ours"
    ):
        decide(cluster(name))


def test_the_shortsighted_one_takes_noise_to_stay_as_it_is() -> None:
    snapshot = cluster("ours")
    growth = noise_growth(snapshot)
    jobs = tuple(variant("ours-shortsighted").see(*pair) for pair in zip(snapshot.jobs, growth, strict=True))
    options = formulate(replace(snapshot, jobs=jobs)).options
    assert np.allclose(options.goodput, options_of(snapshot).goodput, rtol=1e-6)
    assert not np.allclose(options.goodput, formulate(snapshot).options.goodput, rtol=1e-6)

"""Goodput estimators of a user's own, Sia section 3.4: found by name, asked, and not trusted."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from snapshot_builder import make_job, make_snapshot

from pollux import estimators
from pollux.estimators import with_estimates
from pollux.plan import check
from pollux.policy import POLICIES, decide
from pollux.snapshot import GoodputCurve, Job, Node, PolicySettings, Snapshot
from pollux_agent.protocol import decode, encode

MODULE = "company_estimators"


class Saturating:
    """Batch inference that reads from one disk: each GPU adds as much, up to two."""

    def goodput(self, job: Job, gpu_type: str, num_nodes: Any, num_replicas: Any) -> Any:
        return np.minimum(num_replicas, 2) * 100.0


class Timely:
    """Inference that keeps its latency on two GPUs or more of one node."""

    def goodput(self, job: Job, gpu_type: str, num_nodes: Any, num_replicas: Any) -> Any:
        return ((num_replicas >= 2) & (num_nodes == 1)).astype(float)


@pytest.fixture(autouse=True)
def company() -> Iterator[ModuleType]:
    module = ModuleType(MODULE)
    module.Saturating, module.Timely = Saturating, Timely  # type: ignore[attr-defined]
    sys.modules[MODULE] = module
    yield module
    del sys.modules[MODULE]


def own(estimator: str, **change: Any) -> Job:
    return make_job("own", **{"estimator": estimator, "fits": {}, "noise_scale": None} | change)


def asked(*jobs: Job, policy: str = "ours", modules: tuple[str, ...] = (MODULE,), **nodes: int) -> Snapshot:
    plain = make_snapshot(list(jobs), nodes=nodes or {"n0": 4, "n1": 4}, policy=PolicySettings(name=policy))
    return with_estimates(plain, modules)


def gpus_of(snapshot: Snapshot) -> dict[str, int]:
    return {name: sum(job.placement.values()) for name, job in decide(snapshot).jobs.items()}


@pytest.mark.parametrize("policy", ["pollux", "sia", "ours", "optimus-scaling"])
def test_a_job_gets_no_more_than_its_own_estimator_says_it_can_use(policy: str) -> None:
    """By the fit both would share evenly; by its estimator a third GPU is worth nothing to one of them."""
    limited = own(f"{MODULE}:Saturating", max_gpus_seen=8, target_progress=1e5)
    train = make_job("train", max_gpus_seen=8, target_progress=1e5)
    gpus = gpus_of(asked(limited, train, policy=policy))
    assert gpus["own"] == 2
    assert gpus["train"] >= 4


@pytest.mark.parametrize("policy", ["pollux", "sia", "ours"])
def test_a_service_gets_gpus_on_which_it_keeps_its_promise_or_none(policy: str) -> None:
    service = own(f"{MODULE}:Timely", max_gpus_seen=8)
    assert gpus_of(asked(service, policy=policy))["own"] in (2, 4)
    assert gpus_of(asked(service, policy=policy, n0=1, n1=1)) == {"own": 0}


def test_an_entry_point_needs_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="saturating", value=f"{MODULE}:Saturating", group=estimators.GROUP)

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        return [point] if (group, name) == (point.group, point.name) else []

    monkeypatch.setattr(estimators, "entry_points", entry_points)
    (job,) = asked(own("saturating"), modules=()).jobs
    assert job.estimates["gpu"].one_node == (100.0, 200.0, 200.0, 200.0)
    assert job.estimates["gpu"].several_nodes == (200.0,) * 7
    assert not job.remarks


def test_each_type_is_asked_about_what_it_has() -> None:
    nodes = (Node(name="a0", gpus=2, gpu_type="a"), Node(name="b0", gpus=1, gpu_type="b"))
    nodes += (Node(name="b1", gpus=1, gpu_type="b"), Node(name="c0", gpus=8, gpu_type="c"))
    plain = make_snapshot([own(f"{MODULE}:Saturating", gpu_types=("a", "b"))])
    (job,) = with_estimates(replace(plain, nodes=nodes), (MODULE,)).jobs
    shapes = {kind: (len(each.one_node), len(each.several_nodes)) for kind, each in job.estimates.items()}
    assert shapes == {"a": (2, 0), "b": (1, 1)}


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_saved_snapshot_replays_without_the_estimator(policy: str, company: ModuleType) -> None:
    snapshot = asked(own(f"{MODULE}:Saturating"), make_job("train"), policy=policy)
    once = encode(decide(snapshot))
    del company.Saturating
    assert encode(decide(decode(Snapshot, encode(snapshot)))) == once


def _exits() -> Any:
    raise SystemExit(3)


GARBAGE: dict[str, Callable[[Any], Any]] = {
    "says nan": lambda counts: counts * np.nan,
    "says inf": lambda counts: counts * np.inf,
    "says -1": lambda counts: -1.0 * counts,
    "says 1e+30": lambda counts: 1e30 * counts,
    "answered shape ()": lambda counts: 1.0,
    "answered shape (9,)": lambda counts: np.ones(9),
    "raised TypeError": lambda counts: None if counts is None else {"goodput": 1},
    "raised ValueError": lambda counts: "much",
    "raised ZeroDivisionError": lambda counts: 1 / 0,
    "raised SystemExit: 3": lambda counts: _exits(),
}


@pytest.mark.parametrize("remark", list(GARBAGE))
def test_what_is_no_goodput_counts_as_not_fitted_and_is_named(remark: str, company: ModuleType) -> None:
    class Garbage:
        def goodput(self, job: Job, gpu_type: str, num_nodes: Any, num_replicas: Any) -> Any:
            return GARBAGE[remark](num_replicas)

    company.Garbage = Garbage  # type: ignore[attr-defined]
    snapshot = asked(own(f"{MODULE}:Garbage"), make_job("other"))
    bad, other = snapshot.jobs
    assert not bad.estimates and other == make_job("other")
    assert f"not fitted yet: its estimator '{MODULE}:Garbage' {remark}" in bad.remarks[0]
    unfitted = replace(make_job("own", fits={}, noise_scale=None), remarks=bad.remarks)
    for policy in POLICIES:
        settings = PolicySettings(name=policy)
        same = replace(snapshot, policy=settings, jobs=(unfitted, other))
        assert encode(decide(replace(snapshot, policy=settings))) == encode(decide(same)), policy


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("policy", list(POLICIES))
def test_answers_of_any_size_make_no_quotient_overflow(policy: str) -> None:
    curve = GoodputCurve(one_node=(1e-300, 1e15, 1e-9), several_nodes=(1e15, 1e-300, 0.0, 1e-9))
    jobs = [own("own", estimates={"gpu": curve}, placement={f"n{index}": index}) for index in (1, 2)]
    jobs = [replace(job, job_id=f"job-{index}") for index, job in enumerate(jobs)]
    snapshot = make_snapshot(
        [*jobs, make_job("train")], nodes={"n1": 4, "n2": 4}, policy=PolicySettings(name=policy)
    )
    check(snapshot, decide(snapshot))


def test_an_estimator_without_answers_does_not_fall_back_on_a_fit() -> None:
    """The fit is of training steps, and would be taken for what the job is worth."""
    snapshot = make_snapshot([make_job("own", estimator="gone")], policy=PolicySettings(name="ours"))
    assert decide(snapshot).jobs["own"].goodput is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("nobody", "is no entry point of pollux.goodput_estimators here", id="not installed"),
        pytest.param("os:abort", "is in module os, which POLLUX_ESTIMATORS does not list", id="not allowed"),
        pytest.param(f"{MODULE}:Missing", "raised AttributeError", id="no such class"),
        pytest.param("not_there:Any", "raised ModuleNotFoundError", id="no such module"),
        pytest.param("shutil:rmtree", "is no class with a method goodput", id="a function"),
        pytest.param("queue:Queue", "is no class with a method goodput", id="a class of something else"),
    ],
)
def test_a_name_that_is_no_estimator_is_refused_without_calling_it(name: str, why: str) -> None:
    (job,) = asked(own(name), modules=(MODULE, "not_there", "shutil", "queue")).jobs
    assert why in job.remarks[0]


def test_one_that_hangs_costs_one_wait_however_many_jobs_name_it(
    monkeypatch: pytest.MonkeyPatch, company: ModuleType
) -> None:
    class Hangs:
        def goodput(self, job: Job, gpu_type: str, num_nodes: Any, num_replicas: Any) -> Any:
            time.sleep(60)

    company.Hangs = Hangs  # type: ignore[attr-defined]
    monkeypatch.setattr(estimators, "PATIENCE_S", 0.3)
    begin_s = time.monotonic()
    jobs = [replace(own(f"{MODULE}:Hangs"), job_id=f"job-{index}") for index in range(20)]
    snapshot = asked(*jobs, own(f"{MODULE}:Saturating"))
    assert time.monotonic() - begin_s < 3
    assert all("took longer than 0.3 s" in job.remarks[0] for job in snapshot.jobs[:20])
    assert snapshot.jobs[20].estimates


def test_slow_ones_together_take_a_share_of_the_cycle(
    monkeypatch: pytest.MonkeyPatch, company: ModuleType
) -> None:
    for index in range(8):

        class Slow:
            def goodput(self, job: Job, gpu_type: str, num_nodes: Any, num_replicas: Any) -> Any:
                time.sleep(0.25)
                return num_replicas

        setattr(company, f"Slow{index}", Slow)
    monkeypatch.setattr(estimators, "PATIENCE_S", 0.4)
    monkeypatch.setattr(estimators, "SHARE", 0.4 / 60)
    jobs = [replace(own(f"{MODULE}:Slow{index}"), job_id=f"job-{index}") for index in range(8)]
    begin_s = time.monotonic()
    snapshot = asked(*jobs)
    assert time.monotonic() - begin_s < 1.5
    assert snapshot.jobs[0].estimates
    assert "was not asked" in snapshot.jobs[-1].remarks[0]

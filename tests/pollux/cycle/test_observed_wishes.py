"""What a job asks for and whether it restarts, as policies see it, and what its reason says of wishes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cycle_builder import START_UNIX_S, a_report, a_spec, an_identity

from pollux.cluster.base import ClusterJob, ClusterView, JobStatus
from pollux.errors import ConfigError
from pollux.observe import build_snapshot
from pollux.policy import POLICIES, decide
from pollux.policy.models import job_models
from pollux.settings import Settings, settings
from pollux.snapshot import Job, Node, Snapshot
from pollux.store import JobRecord
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import Allocation, Report

NO_SYNC = ThroughputParams(
    alpha_grad=0.1,
    beta_grad=0.01,
    alpha_sync_local=0.0,
    beta_sync_local=0.0,
    alpha_sync_node=0.0,
    beta_sync_node=0.0,
    gamma=1.0,
)


def snapshot_of(
    job: ClusterJob, *, report: Report | None = None, after_s: float = 0.0, **options: Any
) -> Snapshot:
    return build_snapshot(
        ClusterView(nodes=(Node(name="node-0", gpus=4),), jobs=(job,)),
        {job.job_id: JobRecord(run_id="run", report=report)},
        decision=1,
        now_unix_s=START_UNIX_S + after_s,
        settings=Settings(state=Path("state"), **options),
        state={},
    )


def a_job(status: JobStatus | None = None, **wishes: Any) -> ClusterJob:
    return ClusterJob(
        job_id="digits",
        identity=an_identity("digits"),
        spec=replace(a_spec(), **wishes),
        submitted_unix_s=START_UNIX_S,
        allocation=Allocation(decision=1, placement={"node-0": 1}),
        status=status or JobStatus(),
    )


WISHES: dict[str, Any] = {
    "priority": 5.0,
    "team": "red",
    "reserved_from_unix_s": START_UNIX_S,
    "reserved_until_unix_s": START_UNIX_S + 600,
    "model": "mlp",
    "estimator": "latency",
    "latency_limit_s": 0.5,
}


def test_a_jobs_wishes_reach_the_policy() -> None:
    (job,) = snapshot_of(a_job(**WISHES), quotas={"red": 2}, policy="ours").jobs
    assert {name: getattr(job, name) for name in WISHES} == WISHES
    assert not job.remarks


def test_a_type_that_a_report_measured_on_one_gpu_scales_as_the_type_measured_on_several() -> None:
    """Its own fit knows no synchronisation, so that alone it would count as scaling perfectly."""
    several, one = a_report("digits").fits["gpu"], replace(NO_SYNC, alpha_grad=0.2, beta_grad=0.02)
    report = a_report("digits", fits={"gpu": several, "t4": one}, gpus_seen={"gpu": 4, "t4": 1})
    (job,) = snapshot_of(a_job(), report=report).jobs
    assert job.gpus_seen == {"gpu": 4, "t4": 1}
    known, slow = (model.params for model in job_models(job, ("gpu", "t4")))
    assert known is not None and slow is not None

    def times_as_long(gpus: int) -> float:
        spread = [float(fit.step_time(1, gpus, job.max_local_batch_size, 0)) for fit in (known, slow)]
        return spread[1] / spread[0]

    assert times_as_long(4) == pytest.approx(times_as_long(1))
    assert times_as_long(1) > 1.5


def test_a_teams_quota_bounds_what_its_jobs_get() -> None:
    plain = snapshot_of(a_job(max_gpus=4, team="red"), policy="ours")
    grown = replace(plain, jobs=(replace(plain.jobs[0], max_gpus_seen=4),))
    bounded = replace(grown, quotas={"red": 2})
    assert [sum(decide(each).jobs["digits"].placement.values()) for each in (grown, bounded)] == [4, 2]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_reason_names_the_wishes_that_a_policy_does_not_heed(policy: str) -> None:
    (job,) = snapshot_of(a_job(**WISHES), quotas={"red": 2}, policy=policy).jobs
    want = {
        "ours": (),
        "sia": ("policy sia does not heed its priority",),
    }.get(policy, (f"policy {policy} does not heed its priority and reservation and team's quota",))
    assert job.remarks == want


@pytest.mark.parametrize(
    ("phase", "after_s", "want"),
    [
        pytest.param("starting", 0.0, True, id="workers started"),
        pytest.param("stopping", 59.0, True, id="a checkpoint is written"),
        pytest.param("starting", 61.0, False, id="for longer than three mean restarts of 20 s"),
        pytest.param("running", 0.0, False, id="it trains"),
        pytest.param("waiting", 0.0, False, id="it has nothing"),
    ],
)
def test_a_job_restarts_from_the_stop_signal_to_its_first_step(
    phase: Any, after_s: float, want: bool
) -> None:
    job = a_job(JobStatus(phase=phase, since_unix_s=START_UNIX_S))
    report = a_report("digits", mean_restart_s=20.0)
    assert snapshot_of(job, report=report, after_s=after_s).jobs[0].restarting is want


def test_quotas_are_read_from_json() -> None:
    environ = {"POLLUX_STATE": "state", "POLLUX_QUOTAS": '{"red": 4, "blue": 8}'}
    assert settings(environ).quotas == {"red": 4, "blue": 8}


def test_modules_of_estimators_are_read_with_commas() -> None:
    environ = {"POLLUX_STATE": "state", "POLLUX_ESTIMATORS": "company.estimators, other,"}
    assert settings(environ).estimators == ("company.estimators", "other")


@pytest.mark.parametrize("text", ["red=4", '{"red": -1}', '{"red": "all"}', "[4]"])
def test_a_wrong_quota_names_the_variable(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)quotas"):
        settings({"POLLUX_STATE": "state", "POLLUX_QUOTAS": text})


def test_jobs_without_wishes_look_as_before() -> None:
    (job,) = snapshot_of(a_job()).jobs
    default = Job(job_id="x", initial_batch_size=1, max_batch_size=1, max_local_batch_size=1)
    for name in ("priority", "team", "reserved_from_unix_s", "restarting", "gpus_per_replica", "remarks"):
        assert getattr(job, name) == getattr(default, name)

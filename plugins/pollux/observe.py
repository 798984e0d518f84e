"""From what cluster and model store say to the snapshot that a policy decides on; pure."""

from collections.abc import Mapping
from typing import Any

from pollux.cluster.base import ClusterJob, ClusterView
from pollux.policy import HEED_CLAIMS, HEED_PRIORITY
from pollux.settings import Settings
from pollux.snapshot import DEFAULT_RESTART_S, Job, Node, PolicySettings, Snapshot
from pollux.store import JobRecord
from pollux_agent.protocol import Placement, Report

STALE_REPORT_S = 300.0
"""A job that holds GPUs and has not reported for this long is named in its decision's reason."""

_LONGEST_RESTART = 3.0
"""A restart that takes so many times as long as the job's own mean counts as one no more."""


def is_ours(job: ClusterJob, settings: Settings) -> bool:
    """Whether this deployment gives the job its GPUs: its own, and nobody asked for its end."""
    return job.identity.deployment == settings.deployment and job.status.stop is None


def build_snapshot(
    view: ClusterView,
    records: Mapping[str, JobRecord],
    *,
    decision: int,
    now_unix_s: float,
    settings: Settings,
    state: Mapping[str, Any],
) -> Snapshot:
    """All of one decision's input.

    A job takes part if it is ours and has a record, that is, an MLflow run. What any other job holds or was
    given is not ours to give and is left out of the nodes.
    """
    taking_part = [job for job in view.jobs if is_ours(job, settings) and job.job_id in records]
    ids = {job.job_id for job in taking_part}
    others = [occupied(job) for job in view.jobs if job.job_id not in ids]
    nodes = tuple(
        Node(
            name=node.name,
            gpu_type=node.gpu_type,
            gpus=max(0, node.gpus - sum(placement.get(node.name, 0) for placement in others)),
        )
        for node in view.nodes
    )
    sizes = {node.name: node.gpus for node in view.nodes}
    return Snapshot(
        decision=decision,
        now_unix_s=now_unix_s,
        interval_s=settings.interval_s,
        policy=PolicySettings(name=settings.policy, fairness_p=settings.fairness_p, seed=settings.seed),
        nodes=nodes,
        jobs=tuple(_job(job, records[job.job_id], sizes, now_unix_s, settings) for job in taking_part),
        quotas=settings.quotas,
        state=state,
    )


def occupied(job: ClusterJob) -> Placement:
    """GPUs per node that nobody else may be given: held now, or to be taken by the job's allocation."""
    held = job.status.held
    given: Placement = {} if job.status.stop else job.allocation.placement
    return {name: max(held.get(name, 0), given.get(name, 0)) for name in held.keys() | given.keys()}


def _job(
    job: ClusterJob, record: JobRecord, sizes: Mapping[str, int], now_unix_s: float, settings: Settings
) -> Job:
    spec, status, report = job.spec, job.status, record.report
    remarks = list(record.remarks)
    if report is not None and not _is_about(report, job):
        remarks.append(
            f"not fitted yet: its report has batch sizes M0 {report.initial_batch_size}, at most "
            f"{report.max_batch_size} and {report.max_local_batch_size} a GPU, which the job's spec does "
            "not allow"
        )
        report = None
    remarks += _silence(job, report, now_unix_s)
    remarks += _unheeded(job, settings)
    placement = job.allocation.placement
    gone = [name for name, gpus in placement.items() if gpus > sizes.get(name, 0)]
    if gone:
        remarks.append(f"its GPUs on {', '.join(sorted(gone))} are gone, or more than a quota leaves")
        placement = {}
    return Job(
        job_id=job.job_id,
        name=spec.name,
        kind=spec.kind,
        min_gpus=spec.min_gpus,
        max_gpus=spec.max_gpus,
        preemptible=spec.preemptible and not record.skewed,
        gpu_types=spec.gpu_types,
        initial_batch_size=spec.initial_batch_size,
        max_batch_size=report.max_batch_size if report else spec.batch_size_limit,
        max_local_batch_size=report.max_local_batch_size if report else spec.max_local_batch_size,
        min_local_batch_size=spec.min_local_batch_size,
        placement=placement,
        age_s=max(0.0, now_unix_s - job.submitted_unix_s),
        attained_gpu_s=status.attained_gpu_s,
        restarts=max(status.restarts, report.restarts if report else 0),
        restart_s=_restart_s(report),
        max_gpus_seen=max(status.max_gpus_seen, report.max_gpus_seen if report else 0),
        gpus_seen=report.gpus_seen if report else {},
        fits=report.fits if report else {},
        noise_scale=report.noise_scale if report else None,
        progress=report.progress if report else 0.0,
        target_progress=report.target_progress if report else None,
        decision=job.allocation.decision,
        remarks=tuple(remarks),
        restarting=_is_restarting(job, _restart_s(report), now_unix_s),
        trained_s=max(0.0, now_unix_s - status.since_unix_s) if status.phase == "running" else None,
        gpus_per_replica=spec.gpus_per_replica,
        reserved_from_unix_s=spec.reserved_from_unix_s,
        reserved_until_unix_s=spec.reserved_until_unix_s,
        priority=spec.priority,
        team=spec.team,
        model=spec.model,
        estimator=spec.estimator,
        latency_limit_s=spec.latency_limit_s,
    )


def _is_about(report: Report, job: ClusterJob) -> bool:
    """Whether the report's batch sizes lie within the spec's; a script may narrow them, never widen."""
    spec = job.spec
    return (
        report.initial_batch_size == spec.initial_batch_size
        and report.initial_batch_size <= report.max_batch_size <= spec.batch_size_limit
        and spec.min_local_batch_size <= report.max_local_batch_size <= spec.max_local_batch_size
    )


def _silence(job: ClusterJob, report: Report | None, now_unix_s: float) -> list[str]:
    """A remark if the job holds GPUs and has said nothing for long."""
    if not job.status.held:
        return []
    last_unix_s = max(job.status.since_unix_s, report.time_unix_s if report else 0.0)
    silent_s = now_unix_s - last_unix_s
    if silent_s <= STALE_REPORT_S:
        return []
    used = "; its last fit is used" if report and report.fits else ""
    return [f"{job.spec.name} has not reported for {silent_s / 60:.0f} minutes{used}"]


def _unheeded(job: ClusterJob, settings: Settings) -> list[str]:
    """A remark on what the job asks for and the policy does not know."""
    spec, policy = job.spec, settings.policy
    asked = {
        "priority": spec.priority != 1.0 and policy not in HEED_PRIORITY,
        "reservation": (spec.reserved_from_unix_s, spec.reserved_until_unix_s) != (None, None)
        and policy not in HEED_CLAIMS,
        "team's quota": spec.team in settings.quotas and policy not in HEED_CLAIMS,
    }
    unheeded = [name for name, is_so in asked.items() if is_so]
    return [f"policy {policy} does not heed its {' and '.join(unheeded)}"] if unheeded else []


def _is_restarting(job: ClusterJob, restart_s: float | None, now_unix_s: float) -> bool:
    """Whether workers were stopped or started and have not trained yet, for not much longer than usual."""
    if job.status.phase not in ("starting", "stopping"):
        return False
    usual_s = DEFAULT_RESTART_S if restart_s is None else restart_s
    return now_unix_s - job.status.since_unix_s <= _LONGEST_RESTART * usual_s


def _restart_s(report: Report | None) -> float | None:
    """The job's own measured delay of a restart, else of its first start, else None."""
    if report is None:
        return None
    return report.first_start_s if report.mean_restart_s is None else report.mean_restart_s

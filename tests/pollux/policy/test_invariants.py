"""What all policies keep on random snapshots, with everything that a snapshot can hold.

POLLUX_EXAMPLES sets the number of random snapshots for each policy; 10,000 of them take about an hour.
"""

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_builder import snapshots

from pollux.plan import check
from pollux.policy import POLICIES, decide
from pollux.policy.models import standing_jobs
from pollux.policy.options import is_reserved
from pollux.snapshot import Decision, GoodputCurve, Job, Snapshot
from pollux_agent.protocol import encode

EXAMPLES = settings(
    deadline=None,
    max_examples=int(os.environ.get("POLLUX_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow],
)


@st.composite
def rich_snapshots(draw: st.DrawFn) -> Snapshot:
    """Random clusters and jobs: some reserved, hybrid-parallel, inference, or in a team with a quota."""
    snapshot = draw(snapshots(max_nodes=6, max_jobs=9))
    jobs = tuple(draw(_enriched(job, snapshot.now_unix_s)) for job in snapshot.jobs)
    quotas = draw(st.dictionaries(st.sampled_from(["red", "blue"]), st.integers(0, 6), max_size=2))
    return replace(snapshot, jobs=jobs, quotas=quotas)


@st.composite
def _enriched(draw: st.DrawFn, job: Job, now_unix_s: float) -> Job:
    begins = draw(st.sampled_from([None, None, None, now_unix_s - 60, now_unix_s + 60]))
    unit = draw(st.sampled_from([1, 1, 2, 4]))
    return replace(
        job,
        kind="hybrid_parallel" if unit > 1 else job.kind,
        gpus_per_replica=unit,
        gpus_seen=draw(st.dictionaries(st.sampled_from(["gpu", "a100"]), st.integers(0, 16), max_size=2)),
        reserved_from_unix_s=begins,
        reserved_until_unix_s=None if begins is None else begins + draw(st.sampled_from([30.0, 600.0])),
        max_local_batch_size_of=draw(
            st.dictionaries(st.sampled_from(["gpu", "a100"]), st.integers(1, 2**40), max_size=2)
        ),
        restarting=draw(st.sampled_from([False, False, False, True])),
        trained_s=draw(st.one_of(st.none(), st.floats(0, 1e9))),
        priority=draw(st.sampled_from([1.0, 1.0, 0.001, 50.0])),
        team=draw(st.sampled_from(["", "red", "blue"])),
        target_progress=draw(st.one_of(st.none(), st.floats(0, 1e12))),
        progress=draw(st.floats(0, 1e12)),
        estimator=draw(st.sampled_from(["training", "training", "throughput", "latency", "own"])),
        estimates=draw(st.dictionaries(st.sampled_from(["gpu", "a100"]), _curves(), max_size=2)),
        latency_limit_s=draw(st.one_of(st.none(), st.floats(0, 10))),
    )


def _curves() -> st.SearchStrategy[GoodputCurve]:
    values = st.lists(st.one_of(st.floats(0, 1e3), st.sampled_from([0.0, 1e-300, 1e15])), max_size=9)
    return st.builds(GoodputCurve, one_node=values.map(tuple), several_nodes=values.map(tuple))


def decided(snapshot: Snapshot, name: str) -> tuple[Snapshot, Decision]:
    snapshot = replace(snapshot, policy=replace(snapshot.policy, name=name))
    decision = decide(snapshot)
    check(snapshot, decision)
    return snapshot, decision


@pytest.mark.parametrize("name", list(POLICIES))
@given(snapshot=rich_snapshots())
@EXAMPLES
def test_every_rule_is_kept_and_the_same_snapshot_gives_the_same_decision(
    name: str, snapshot: Snapshot
) -> None:
    snapshot, decision = decided(snapshot, name)
    assert encode(decide(snapshot)) == encode(decision)


@pytest.mark.parametrize("name", ["sia", "ours"])
@given(snapshot=rich_snapshots())
@EXAMPLES
def test_reservations_units_and_quotas_are_kept(name: str, snapshot: Snapshot) -> None:
    snapshot, decision = decided(snapshot, name)
    standing, used = standing_jobs(snapshot), Counter[str]()
    for job in snapshot.jobs:
        placement = decision.jobs[job.job_id].placement
        gpus = sum(placement.values())
        reserved = is_reserved(job, snapshot.now_unix_s) and job.num_gpus >= job.min_gpus
        if job.job_id in standing and (reserved or not job.preemptible or job.restarting):
            assert dict(placement) == dict(job.placement)
            continue
        assert gpus % job.gpus_per_replica == 0
        used[job.team] += gpus
    pinned = Counter[str]()
    for job in snapshot.jobs:
        pinned[job.team] += sum(decision.jobs[job.job_id].placement.values())
    for team, quota in snapshot.quotas.items():
        held = pinned[team] - used[team]
        assert used[team] <= max(quota - held, 0)

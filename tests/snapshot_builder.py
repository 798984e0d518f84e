"""Snapshots for tests of policies and plans: by hand, random, and moved on by one decision."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pollux.snapshot import Decision, Job, Node, PolicySettings, Snapshot
from pollux_agent.model.throughput import ThroughputParams

SCALES_WELL = ThroughputParams(
    alpha_grad=0.01,
    beta_grad=0.002,
    alpha_sync_local=0.005,
    beta_sync_local=0.0001,
    alpha_sync_node=0.02,
    beta_sync_node=0.0005,
    gamma=1.5,
)
SCALES_BADLY = replace(SCALES_WELL, alpha_sync_local=0.5, alpha_sync_node=5.0)


def make_job(job_id: str = "job", **change: Any) -> Job:
    """A fitted job that scales well and has run on 4 GPUs before, an hour old, unless changed."""
    plain: dict[str, Any] = {
        "initial_batch_size": 64,
        "max_batch_size": 2048,
        "max_local_batch_size": 256,
        "max_gpus": 8,
        "age_s": 3600.0,
        "max_gpus_seen": 4,
        "fits": {"gpu": SCALES_WELL},
        "noise_scale": 1000.0,
    }
    return Job(job_id=job_id, **(plain | change))


def new_job(job_id: str, **change: Any) -> Job:
    """A job that was just submitted."""
    return make_job(job_id, **({"age_s": 0.0, "max_gpus_seen": 0, "fits": {}, "noise_scale": None} | change))


def make_snapshot(jobs: list[Job], *, nodes: Mapping[str, int] | None = None, **change: Any) -> Snapshot:
    """Two nodes of two GPUs and the policy pollux unless given otherwise."""
    sizes = {"node-0": 2, "node-1": 2} if nodes is None else nodes
    plain: dict[str, Any] = {
        "decision": 7,
        "now_unix_s": 1e9,
        "interval_s": 60.0,
        "nodes": tuple(Node(name=name, gpus=gpus) for name, gpus in sizes.items()),
        "jobs": tuple(jobs),
        "policy": PolicySettings(name="pollux"),
    }
    return Snapshot(**(plain | change))


def after_decision(snapshot: Snapshot, decision: Decision) -> Snapshot:
    """The next cycle's snapshot if the decision is carried out at once and nothing else changes."""
    jobs = []
    for job in snapshot.jobs:
        placement = dict(decision.jobs[job.job_id].placement)
        gpus = sum(placement.values())
        changed = placement != dict(job.placement)
        jobs.append(
            replace(
                job,
                placement=placement,
                age_s=job.age_s + snapshot.interval_s,
                restarts=job.restarts + (1 if changed and job.placement else 0),
                max_gpus_seen=max(job.max_gpus_seen, gpus),
                attained_gpu_s=job.attained_gpu_s + gpus * snapshot.interval_s,
            )
        )
    return replace(
        snapshot,
        decision=snapshot.decision + 1,
        now_unix_s=snapshot.now_unix_s + snapshot.interval_s,
        jobs=tuple(jobs),
        state=decision.state,
    )


def any_params() -> st.SearchStrategy[ThroughputParams]:
    """Parameters of any size, sane or not, but finite: others cannot be in a document."""
    value = st.one_of(st.floats(0, 1), st.floats(0, 1e12), st.sampled_from([0.0, 1e-320, 1e300, -1.0]))
    return st.builds(
        ThroughputParams,
        **dict.fromkeys(
            (
                "alpha_grad",
                "beta_grad",
                "alpha_sync_local",
                "beta_sync_local",
                "alpha_sync_node",
                "beta_sync_node",
            ),
            value,
        ),
        gamma=st.one_of(st.floats(1, 10), st.floats(0, 100)),
    )


@st.composite
def snapshots(draw: st.DrawFn, max_nodes: int = 5, max_jobs: int = 6) -> Snapshot:
    """Any cluster and jobs: types, pinned jobs, odd bounds, garbage fits, allocations that hold no more."""
    types = draw(st.sampled_from([("gpu",), ("gpu", "a100")]))
    unit = draw(st.sampled_from([1, 1, 2]))
    nodes = tuple(
        Node(name=f"n{index}", gpus=unit * draw(st.integers(0, 4)), gpu_type=draw(st.sampled_from(types)))
        for index in range(draw(st.integers(1, max_nodes)))
    )
    free = {node.name: node.gpus for node in nodes}
    busy: set[str] = set()
    jobs = [draw(_jobs(f"job-{index}", nodes, free, busy)) for index in range(draw(st.integers(0, max_jobs)))]
    return Snapshot(
        decision=draw(st.integers(0, 1000)),
        now_unix_s=1e9,
        interval_s=60.0,
        policy=PolicySettings(
            name="pollux",
            fairness_p=draw(st.sampled_from([-20.0, -1.0, 0.0, 0.5, 1.0, 5.0])),
            population=20,
            generations=10,
            seed=draw(st.integers(0, 5)),
        ),
        nodes=nodes,
        jobs=tuple(jobs),
    )


@st.composite
def _jobs(draw: st.DrawFn, job_id: str, nodes: tuple[Node, ...], free: dict[str, int], busy: set[str]) -> Job:
    placement = draw(_placements(nodes, free, busy))
    held = sum(placement.values())
    least = draw(st.integers(1, 3))
    return Job(
        job_id=job_id,
        kind=draw(st.sampled_from(["adaptive", "strong_scaling", "rigid"])),
        min_gpus=least,
        max_gpus=least + draw(st.integers(0, 8)),
        preemptible=draw(st.booleans()),
        gpu_types=draw(st.sampled_from([(), ("gpu",), ("a100",), ("h100", "gpu")])),
        initial_batch_size=draw(st.integers(1, 300)),
        max_batch_size=draw(st.integers(1, 9000)),
        max_local_batch_size=draw(st.integers(1, 300)),
        min_local_batch_size=draw(st.integers(1, 40)),
        placement=placement,
        age_s=draw(st.floats(0, 1e6)),
        restarts=draw(st.integers(0, 50)),
        restart_s=draw(st.one_of(st.none(), st.floats(0, 500))),
        max_gpus_seen=max(held, draw(st.integers(0, 8))),
        fits=draw(st.dictionaries(st.sampled_from(["gpu", "a100"]), any_params(), max_size=2)),
        noise_scale=draw(st.one_of(st.none(), st.floats(0, 1e6), st.sampled_from([0.0, 1e308]))),
    )


@st.composite
def _placements(
    draw: st.DrawFn, nodes: tuple[Node, ...], free: dict[str, int], busy: set[str]
) -> dict[str, int]:
    """What a job may hold: free GPUs of one type; now and then some that are not there."""
    if draw(st.integers(0, 9)) == 0:
        return {draw(st.sampled_from(["gone", "n0"])): draw(st.integers(1, 6))}
    kind = draw(st.sampled_from([node.gpu_type for node in nodes]))
    placement = {
        node.name: draw(st.integers(1, free[node.name]))
        for node in nodes
        if node.gpu_type == kind and free[node.name] and draw(st.booleans())
    }
    if len(placement) > 1:
        placement = {name: gpus for name, gpus in placement.items() if name not in busy}
    if len(placement) > 1:
        busy.update(placement)
    for name, gpus in placement.items():
        free[name] -= gpus
    return placement

"""The demo's jobs on a small cluster in memory: the default policy grows one and shrinks one for another.

Time goes by the second. A job computes as its model says, stands still while it (re)starts, and tells the
scheduler what it could know from the configurations that it has run on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from pollux.demo.jobs import DemoPlan, demo_plan, quick_plan, size_jobs
from pollux.demo.sizing import Timing
from pollux.plan import plan as plan_actions
from pollux.policy import decide
from pollux.snapshot import Job, Node, PolicySettings, Snapshot
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import ThroughputParams

LIMITS = BatchLimits(initial_batch_size=32, max_batch_size=1024, max_local_batch_size=256)
EPOCH = 45.0
"""Steps of size M0 in an epoch."""


@dataclass(slots=True, kw_only=True)
class Training:
    name: str
    submitted_s: float
    target: float
    truth: ThroughputParams
    restart_s: float
    noise: float
    placement: dict[str, int] = field(default_factory=dict)
    progress: float = 0.0
    starting_s: float = 0.0
    restarts: int = 0
    most: int = 0
    across: bool = False
    sizes: list[int] = field(default_factory=list)
    trained_s: float = 0.0

    @property
    def gpus(self) -> int:
        return sum(self.placement.values())

    def second(self) -> None:
        if not self.placement:
            return
        if self.starting_s > 0:
            self.starting_s -= 1.0
            return
        self.most = max(self.most, self.gpus)
        self.across |= len(self.placement) > 1
        self.trained_s += 1.0
        model = GoodputModel(self.truth, self.noise, LIMITS)
        self.progress += model.best(len(self.placement), self.gpus).goodput / LIMITS.initial_batch_size

    def place(self, placement: dict[str, int]) -> None:
        self.restarts += bool(self.placement)
        self.placement, self.starting_s, self.trained_s = placement, self.restart_s, 0.0
        self.sizes.append(self.gpus)

    def known(self) -> dict[str, ThroughputParams]:
        """Synchronisation takes no time as far as it has not been seen."""
        params = self.truth
        if self.most <= 1:
            params = replace(params, alpha_sync_local=0.0, beta_sync_local=0.0)
        if not self.across:
            params = replace(
                params, alpha_sync_node=params.alpha_sync_local, beta_sync_node=params.beta_sync_local
            )
        return {"gpu": params} if self.most else {}

    def observed(self, now_s: float, capacity: int) -> Job:
        return Job(
            job_id=self.name,
            max_gpus=capacity,
            initial_batch_size=LIMITS.initial_batch_size,
            max_batch_size=LIMITS.max_batch_size,
            max_local_batch_size=LIMITS.max_local_batch_size,
            placement=self.placement,
            age_s=now_s - self.submitted_s,
            restarts=self.restarts,
            restart_s=self.restart_s if self.most else None,
            restarting=self.starting_s > 0,
            trained_s=self.trained_s if self.placement and self.starting_s <= 0 else None,
            max_gpus_seen=self.most,
            gpus_seen={"gpu": self.most} if self.most else {},
            fits=self.known(),
            noise_scale=self.noise if self.most else None,
            progress=self.progress,
            target_progress=self.target if self.most else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Airflow takes ``late_s`` to show a job; the scripts were timed at ``timed`` of their speed."""

    late_s: int
    timed: float


def rehearse(
    demo: DemoPlan, *, truth: ThroughputParams, restart_s: float, noise: float, machine: Machine
) -> list[Training]:
    """The demo's jobs after the last one has ended."""
    alone = GoodputModel(truth, noise, LIMITS).best(1, 1).goodput / LIMITS.initial_batch_size
    timing = Timing(progress_per_s=machine.timed * alone, epoch_progress=EPOCH, start_s=restart_s)
    sizes = size_jobs(demo, {job.script: timing for job in demo.jobs})
    nodes = tuple(Node(name=node.name, gpus=node.slots) for node in demo.nodes.nodes)
    capacity = demo.nodes.num_slots
    trainings: list[Training] = []
    last_s = 0.0
    state: Mapping[str, Any] = {}
    for now_s in range(3600):
        active = [each for each in trainings if each.progress < each.target]
        works = all(each.placement and each.starting_s <= 0 for each in active)
        full = sum(each.gpus for each in active) >= capacity and works
        due = not trainings or full or now_s - last_s >= demo.patience_s
        if due and len(trainings) < len(demo.jobs):
            job = demo.jobs[len(trainings)]
            target = sizes[job.name].target_progress
            trainings.append(
                Training(
                    name=job.name,
                    submitted_s=now_s,
                    target=target,
                    truth=truth,
                    restart_s=restart_s,
                    noise=noise,
                )
            )
            last_s = now_s
        elif not active:
            return trainings
        if now_s % demo.interval_s == 0:
            active = [
                each
                for each in trainings
                if each.progress < each.target and now_s >= each.submitted_s + machine.late_s
            ]
            snapshot = Snapshot(
                decision=now_s,
                now_unix_s=now_s,
                interval_s=demo.interval_s,
                policy=PolicySettings(),
                nodes=nodes,
                jobs=tuple(each.observed(now_s, capacity) for each in active),
                state=state,
            )
            decision = decide(snapshot)
            state = decision.state
            by_name = {each.name: each for each in active}
            for action in plan_actions(snapshot, decision):
                by_name[action.job_id].place(dict(action.after))
        for each in trainings:
            if each.progress < each.target:
                each.second()
    raise AssertionError([(each.name, each.progress, each.target, each.sizes) for each in trainings])


@pytest.mark.parametrize(
    ("sync_s", "noise"), [(0.002, 2000.0), (0.002, 200.0), (0.03, 200.0), (0.05, 2000.0)]
)
@pytest.mark.parametrize("restart_s", [3.0, 8.0, 14.0])
@pytest.mark.parametrize(
    "machine", [Machine(late_s=0, timed=1.0), Machine(late_s=20, timed=0.85)], ids=["idle", "busy"]
)
@pytest.mark.parametrize("demo", [demo_plan(), quick_plan()], ids=["demo", "quick"])
def test_one_job_is_grown_and_one_is_shrunk(
    demo: DemoPlan, machine: Machine, restart_s: float, sync_s: float, noise: float
) -> None:
    """Four slots are 2 to 3.6 times as fast as one here."""
    truth = ThroughputParams(
        alpha_grad=0.02,
        beta_grad=0.0008,
        alpha_sync_local=sync_s,
        beta_sync_local=0.0,
        alpha_sync_node=2 * sync_s,
        beta_sync_node=0.0,
        gamma=1.5,
    )
    trainings = rehearse(demo, truth=truth, restart_s=restart_s, noise=noise, machine=machine)
    steps = [pair for each in trainings for pair in pairwise(each.sizes)]
    assert any(0 < before < after for before, after in steps)
    assert any(before > after > 0 for before, after in steps)
    assert len(trainings) == len(demo.jobs)

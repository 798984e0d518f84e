"""From a decision to ordered actions, each with its reason; printing the plan is the dry run."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import DecisionError
from pollux.policy.models import standing_jobs
from pollux.snapshot import Decision, Job, Node, Snapshot
from pollux_agent.protocol import DOCUMENT_CONFIG, Placement

ActionKind = Literal["stop", "shrink", "move", "start", "grow"]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Action:
    """One change of one job's allocation.

    ``expected`` is the number of the decision that the change replaces: the cluster refuses it if the job
    has another one by then. stop: down to nothing; shrink, grow: fewer or more GPUs; start: from nothing;
    move: as many GPUs elsewhere.
    """

    job_id: str
    kind: ActionKind
    before: Placement = Field(default_factory=dict)
    after: Placement = Field(default_factory=dict)
    expected: Annotated[int, Field(ge=0, strict=True)]
    reason: str

    @property
    def only_gives_back(self) -> bool:
        """Whether it needs no GPU that the job does not hold, so that it can never wait for another job."""
        return all(gpus <= self.before.get(name, 0) for name, gpus in self.after.items())


def plan(snapshot: Snapshot, decision: Decision) -> tuple[Action, ...]:
    """The changes that the decision asks for: first those that give GPUs back, then moves, then the rest.

    Jobs that keep their allocation have no action. Raises DecisionError as :func:`check` does.
    """
    check(snapshot, decision)
    actions = []
    for job in snapshot.jobs:
        answer = decision.jobs[job.job_id]
        if dict(answer.placement) == dict(job.placement):
            continue
        actions.append(
            Action(
                job_id=job.job_id,
                kind=_kind(sum(job.placement.values()), sum(answer.placement.values())),
                before=job.placement,
                after=answer.placement,
                expected=job.decision,
                reason=answer.reason,
            )
        )
    return tuple(sorted(actions, key=_turn))


def _kind(before: int, after: int) -> ActionKind:
    if after == 0:
        return "stop"
    if before == 0:
        return "start"
    if after == before:
        return "move"
    return "shrink" if after < before else "grow"


def _turn(action: Action) -> int:
    if action.only_gives_back:
        return 0
    return 2 if action.kind in ("start", "grow") else 1


def check(snapshot: Snapshot, decision: Decision) -> None:
    """Whether the decision keeps every rule of its snapshot; written apart from the policies on purpose.

    An allocation that a job holds and keeps is held to no rule but the GPUs being there. Raises
    DecisionError naming the job or node and the rule: another snapshot's decision, jobs left out,
    unknown nodes, a GPU given twice, GPU types, min and max, the growth limit, a pinned job that
    changes, two jobs that span nodes on one node.
    """
    if decision.decision != snapshot.decision:
        raise DecisionError(f"decision {decision.decision} answers snapshot {snapshot.decision}; solve again")
    wanted, answered = {job.job_id for job in snapshot.jobs}, set(decision.jobs)
    if wanted != answered:
        raise DecisionError(f"jobs: the decision and its snapshot differ in {sorted(wanted ^ answered)}")
    nodes = {node.name: node for node in snapshot.nodes}
    standing, kept = standing_jobs(snapshot), set()
    given: dict[str, int] = defaultdict(int)
    spanning: dict[str, list[str]] = defaultdict(list)
    for job in snapshot.jobs:
        placement = decision.jobs[job.job_id].placement
        if job.job_id in standing and dict(placement) == dict(job.placement):
            kept.add(job.job_id)
        else:
            _check_change(job, placement, nodes, stands=job.job_id in standing)
        for name, gpus in placement.items():
            given[name] += gpus
            if len(placement) > 1 and snapshot.policy.avoid_interference:
                spanning[name].append(job.job_id)
    for name, gpus in given.items():
        if gpus > nodes[name].gpus:
            raise DecisionError(f"node {name} has {nodes[name].gpus} GPUs, but the decision gives {gpus}")
    for name, jobs in spanning.items():
        if len(jobs) > 1 and not kept.issuperset(jobs):
            raise DecisionError(f"node {name} has more than one job that spans nodes: {', '.join(jobs)}")


def _check_change(job: Job, placement: Placement, nodes: Mapping[str, Node], *, stands: bool) -> None:
    unknown = sorted(set(placement) - set(nodes))
    if unknown:
        raise DecisionError(f"job {job.job_id} is given GPUs on unknown nodes: {', '.join(unknown)}")
    if stands and not job.preemptible:
        raise DecisionError(
            f"job {job.job_id} may not be preempted, but goes from {job.placement} to {placement}"
        )
    types = {nodes[name].gpu_type for name in placement}
    if len(types) > 1 or (job.gpu_types and not types <= set(job.gpu_types)):
        raise DecisionError(
            f"job {job.job_id} is given GPUs of type {', '.join(sorted(types))}; it takes one type"
            + (f" of {', '.join(job.gpu_types)}" if job.gpu_types else "")
        )
    gpus = sum(placement.values())
    limit = max(job.gpu_limit, min(job.num_gpus, job.max_gpus))
    if gpus and not job.min_gpus <= gpus <= limit:
        raise DecisionError(
            f"job {job.job_id} is given {gpus} GPUs, but may have 0 or {job.min_gpus} to {limit} now "
            f"(max_gpus {job.max_gpus}, and at most twice the {job.max_gpus_seen} seen so far)"
        )

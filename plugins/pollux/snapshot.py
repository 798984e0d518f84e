"""What a policy sees and what it answers: plain frozen data, saved as JSON, so any cycle can be replayed."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import DOCUMENT_CONFIG, ESTIMATOR_PATTERN, JobKind, Placement

Count = Annotated[int, Field(ge=0, le=2**53, strict=True)]
Positive = Annotated[int, Field(ge=1, le=2**40, strict=True)]
NodeGpus = Annotated[int, Field(ge=0, le=1024, strict=True)]
SearchSize = Annotated[int, Field(ge=1, le=10_000, strict=True)]
Seconds = Annotated[float, Field(ge=0)]
FairnessP = Annotated[float, Field(ge=-1000, le=1000)]
Weight = Annotated[float, Field(ge=1e-3, le=1e3)]
Estimator = Annotated[str, Field(pattern=ESTIMATOR_PATTERN)]
MIN_GOODPUT, MAX_GOODPUT = 1e-9, 1e15
"""Less than the one counts as none, more than the other is refused: quotients stay numbers."""

Goodput = Annotated[float, Field(ge=0, le=MAX_GOODPUT)]

BUILT_IN_ESTIMATORS = frozenset({"training", "throughput", "latency"})
"""What a job's goodput may be without any code of a user's; Sia section 3.4."""

DEFAULT_RESTART_S = 30.0
"""Restart delay delta of a job of which nothing was measured yet; Pollux section 4.2."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Node:
    """A node and the GPUs on it that are ours to give: free, or held by a job of this snapshot."""

    name: str
    gpus: NodeGpus
    gpu_type: str = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Oracle:
    """What nobody can know of a running job, for baselines that are oracles by definition.

    ``step_time_s`` are the true seconds of a step at the job's batch size on 1, 2, ... GPUs packed on as few
    nodes as can be; ``remaining_steps`` is how many steps it will still take.
    """

    step_time_s: tuple[Annotated[float, Field(gt=0)], ...]
    remaining_steps: Seconds


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class GoodputCurve:
    """What a user-defined estimator says of a job on one type of GPU: goodput in any unit, 0 where useless.

    ``one_node`` is that of 1, 2, ... replicas on a node, ``several_nodes`` that of 2, 3, ... replicas on the
    fewest nodes, but two at least. Counts beyond the last one are worth nothing.
    """

    one_node: tuple[Goodput, ...] = ()
    several_nodes: tuple[Goodput, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Job:
    """One active job (running or waiting) at the time of the snapshot.

    ``placement`` is what the job holds or was given last; empty while it waits. ``fits`` and
    ``noise_scale`` come from the job's report and were checked: finite and sane, or absent; then
    ``remarks`` says why. ``max_gpus_seen`` is the largest GPU count that it has run on, or that an earlier
    run of its model was measured on. ``restarts`` counts changes of its allocation so far and ``restart_s``
    is its own measured delay, None while unknown.
    ``progress`` and ``target_progress`` count steps of size M0.

    ``gpus_seen`` is the largest count measured per GPU type: a fit of a type that is absent there, or 1,
    knows nothing of synchronisation. ``max_local_batch_size_of`` says what fits in memory where that differs
    by GPU type. A job that is ``restarting`` has not taken a step on its GPUs yet; others have trained on
    them for ``trained_s``, None while unknown. ``gpus_per_replica`` is what one replica of a hybrid-parallel
    job takes, ``gpus_per_replica_of`` the same where it differs by GPU type. From ``reserved_from_unix_s``
    until ``reserved_until_unix_s`` the job has first claim on its ``min_gpus``. ``priority`` says how much
    the job counts and ``team`` whose quota it uses. ``model`` names what is trained. ``estimator`` says what
    its goodput is: of a training, the throughput of batch inference, or whether inference of one batch meets
    ``latency_limit_s`` (Sia section 3.4), or what ``estimates`` say by GPU type: the answers of the
    user-defined estimator of that name, without which the job is not fitted. ``oracle`` is there in
    simulations only, and :func:`pollux.policy.decide` shows it to no policy but those declared as oracles.
    """

    job_id: str
    name: str = ""
    kind: JobKind = "adaptive"
    min_gpus: Positive = 1
    max_gpus: Positive = 1
    preemptible: bool = True
    gpu_types: tuple[str, ...] = ()
    initial_batch_size: Positive
    max_batch_size: Positive
    max_local_batch_size: Positive
    min_local_batch_size: Positive = 1
    placement: Placement = Field(default_factory=dict)
    age_s: Seconds = 0.0
    attained_gpu_s: Seconds = 0.0
    restarts: Count = 0
    restart_s: Seconds | None = None
    max_gpus_seen: Count = 0
    fits: Mapping[str, ThroughputParams] = Field(default_factory=dict)
    noise_scale: Seconds | None = None
    progress: Seconds = 0.0
    target_progress: Seconds | None = None
    decision: Count = 0
    remarks: tuple[str, ...] = ()
    gpus_seen: Mapping[str, Count] = Field(default_factory=dict)
    max_local_batch_size_of: Mapping[str, Positive] = Field(default_factory=dict)
    restarting: bool = False
    trained_s: Seconds | None = None
    gpus_per_replica: Positive = 1
    gpus_per_replica_of: Mapping[str, Positive] = Field(default_factory=dict)
    reserved_from_unix_s: float | None = None
    reserved_until_unix_s: float | None = None
    priority: Weight = 1.0
    team: str = ""
    model: str = ""
    estimator: Estimator = "training"
    latency_limit_s: Seconds | None = None
    estimates: Mapping[str, GoodputCurve] = Field(default_factory=dict)
    oracle: Oracle | None = None

    @property
    def num_gpus(self) -> int:
        """GPUs that the job holds now."""
        return sum(self.placement.values())

    def local_limit(self, gpu_type: str) -> int:
        """Largest batch size of one GPU of that type; never below the least."""
        most = self.max_local_batch_size_of.get(gpu_type, self.max_local_batch_size)
        return max(most, self.min_local_batch_size)

    @property
    def gpu_limit(self) -> int:
        """Most GPUs it may get now: twice the largest count seen, within its own bounds (Pollux 4.1)."""
        return min(self.max_gpus, max(1, self.min_gpus, 2 * self.max_gpus_seen))


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class PolicySettings:
    """What an operator of the cluster may turn: the policy's name and its knobs.

    ``fairness_p`` None is the policy's own default. Of sia (section 3.4): ``no_allocation_penalty`` is
    lambda, and without ``restart_discount`` a change costs nothing. With ``avoid_interference`` a node serves
    at most one job that spans nodes (Pollux section 4.2.1).
    """

    name: str = "ours"
    fairness_p: FairnessP | None = None
    no_allocation_penalty: Annotated[float, Field(ge=0, le=1e6)] = 1.1
    restart_discount: bool = True
    avoid_interference: bool = True
    population: SearchSize = 100
    generations: SearchSize = 100
    seed: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Snapshot:
    """The whole input of one decision. ``state`` is what the policy's last decision asked to remember.

    ``quotas`` bounds the GPUs that the jobs of a team hold together; a team that is not there has no bound.

    Raises DocumentError (through the codec) where two nodes or two jobs have one name, or a job's bounds
    leave no number of GPUs.
    """

    schema: Literal[1] = 1
    decision: Count
    now_unix_s: float
    interval_s: Seconds
    policy: PolicySettings = Field(default_factory=PolicySettings)
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    quotas: Mapping[str, Count] = Field(default_factory=dict)
    state: Mapping[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "Snapshot":
        named = {"nodes": [node.name for node in self.nodes], "jobs": [job.job_id for job in self.jobs]}
        for field, names in named.items():
            if len(set(names)) < len(names):
                twice = next(name for name, count in Counter(names).items() if count > 1)
                raise ValueError(f"{field}: {twice!r} is there twice; give each one its own name")
        for job in self.jobs:
            if job.max_gpus < job.min_gpus:
                raise ValueError(
                    f"jobs: {job.job_id!r} has max_gpus {job.max_gpus}, below min_gpus {job.min_gpus}; raise "
                    "max_gpus or lower min_gpus"
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobDecision:
    """What one job gets and why, in words that its owner understands.

    ``goodput`` and ``goodput_now`` are predicted useful samples per second with the new and the present
    allocation, None where no fit exists; ``speedup`` is against the fair share. ``restart_factor`` is as how
    much of its goodput a change of its allocation counts, None for a policy that does not price restarts.
    """

    placement: Placement = Field(default_factory=dict)
    reason: str
    goodput: float | None = None
    goodput_now: float | None = None
    speedup: float | None = None
    restart_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Decision:
    """The answer of a policy: an allocation for every job of the snapshot, and what to remember."""

    schema: Literal[1] = 1
    decision: Count
    policy: str
    objective: float
    jobs: Mapping[str, JobDecision]
    state: Mapping[str, Any] = Field(default_factory=dict)

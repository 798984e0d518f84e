"""What a simulation runs on and how: the cluster, what a restart costs there, and the settings of a run."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import TraceError
from pollux.policy import ALWAYS_APART, HEED_FAIRNESS_P, HEED_SEED, POLICIES, STUDIED
from pollux.snapshot import DEFAULT_RESTART_S, Node, PolicySettings
from pollux.traces.application import DEFAULT_TYPE
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, JobKind, decode, from_plain

PRESETS = ("sia", "small")

FIXED_SIZE: Mapping[str, JobKind] = {
    "tiresias": "rigid",
    "fifo": "rigid",
    "fifo-fixed": "rigid",
    "gavel": "rigid",
    "gavel-fairness": "rigid",
    "themis": "rigid",
    "shockwave": "rigid",
    "optimus": "strong_scaling",
}
"""What the baselines make of a job: its request as it is, or its batch size on any number of GPUs."""

BLIND = frozenset({"tiresias", "fifo", "fifo-fixed", "optimus"})
"""Policies that read no fits; their simulations leave the fitting out."""

_FLAGS = {
    "interval_s": "--interval",
    "restart_s": "--restart-s",
    "interference": "--interference",
    "policy.fairness_p": "--p",
    "policy.seed": "--seed",
}

Share = Annotated[float, Field(ge=0, lt=1)]
AboveZero = Annotated[float, Field(gt=0, le=1e6)]
RestartS = Annotated[float, Field(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class NodeGroup:
    """``nodes`` nodes alike. A job spans at most ``max_nodes_per_job`` of them, as far as was measured."""

    nodes: Annotated[int, Field(ge=1, le=100_000, strict=True)]
    gpus: Annotated[int, Field(ge=1, le=9, strict=True)]
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]{0,63}$")] = DEFAULT_TYPE
    max_nodes_per_job: Annotated[int, Field(ge=1, strict=True)] = 16


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class ClusterSetup:
    """The cluster; what a restart costs and by what progress is divided, by application.

    With ``profile_alone`` an adaptive job's steps on one GPU of each type are measured before it waits for
    GPUs (Sia section 3.2).
    """

    schema: Literal[1] = 1
    groups: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]
    restart_s: Mapping[str, RestartS] = Field(default_factory=dict)
    goodput_divisor: Mapping[str, AboveZero] = Field(default_factory=dict)
    profile_alone: bool = False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, one after the other; each has a name of its own."""
        parts = [group for group in self.groups for _ in range(group.nodes)]
        return tuple(
            Node(name=f"n{index}", gpus=group.gpus, gpu_type=group.gpu_type)
            for index, group in enumerate(parts)
        )

    @property
    def gpus_of(self) -> Mapping[str, int]:
        """GPUs by type, in the order of the groups."""
        gpus: dict[str, int] = {}
        for group in self.groups:
            gpus[group.gpu_type] = gpus.get(group.gpu_type, 0) + group.nodes * group.gpus
        return gpus

    @property
    def width_of(self) -> Mapping[str, int]:
        """Most GPUs on one node, by type."""
        width: dict[str, int] = {}
        for group in self.groups:
            width[group.gpu_type] = max(width.get(group.gpu_type, 0), group.gpus)
        return width

    def most_gpus(self, gpu_type: str) -> int:
        """Most GPUs of a type that one job was measured on."""
        of_type = [group for group in self.groups if group.gpu_type == gpu_type]
        return sum(min(group.nodes, group.max_nodes_per_job) * group.gpus for group in of_type)

    def scaled(self, factor: int) -> "ClusterSetup":
        """The same cluster with ``factor`` times the nodes."""
        groups = tuple(
            NodeGroup(
                nodes=group.nodes * factor,
                gpus=group.gpus,
                gpu_type=group.gpu_type,
                max_nodes_per_job=group.max_nodes_per_job,
            )
            for group in self.groups
        )
        return replace(self, groups=groups)


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class RunSettings:
    """How a workload is simulated.

    ``interference`` is the share of its goodput that a job loses on a node with another job that spans
    nodes. With ``earlier_fits`` a job starts from the fits of the last finished job of the same application.
    """

    policy: PolicySettings = Field(default_factory=PolicySettings)
    interval_s: Annotated[float, Field(ge=1, le=86400)] = 60.0
    restart_s: RestartS = DEFAULT_RESTART_S
    interference: Share = 0.0
    earlier_fits: bool = False


def run_settings(
    *, policy: str, avoid_interference: bool | None, fairness_p: float | None, seed: int, **other: object
) -> RunSettings:
    """Settings from a command's options; raises TraceError naming the one that is wrong.

    ``avoid_interference`` None is on for every policy but the baselines that leave jobs at their size.
    """
    if policy not in POLICIES and policy not in STUDIED:
        raise TraceError(f"--policy: {policy!r} is no policy; use one of {', '.join(POLICIES)}")
    avoid = policy not in FIXED_SIZE if avoid_interference is None else avoid_interference
    plain = {"name": policy, "avoid_interference": avoid, "fairness_p": fairness_p, "seed": seed}
    try:
        return from_plain(RunSettings, {"policy": plain, **other})
    except DocumentError as error:
        words = str(error).removeprefix(f"{RunSettings.__name__}: ")
        for field, flag in _FLAGS.items():
            words = words.replace(f"{field}: ", f"{flag} ({field}): ")
        raise TraceError(words) from None


def without_effect(
    settings: RunSettings, cluster: ClusterSetup, applications: Collection[str], asked: Collection[str]
) -> Iterator[str]:
    """Which of the options ``asked``, by their flags, change nothing in this run, in words."""
    policy = settings.policy
    name = policy.name
    apart = f"under {name} no node ever serves two jobs that span nodes"
    causes = {
        "--p": name not in HEED_FAIRNESS_P and f"policy {name} has no fairness knob",
        "--seed": name not in HEED_SEED and f"policy {name} draws nothing at random",
        "--earlier-fits": (name in BLIND and f"policy {name} decides without fits")
        or (name in FIXED_SIZE and f"under {name} no job measures more than its own size"),
        "--no-avoid-interference": name in ALWAYS_APART and apart,
        "--interference": (name in ALWAYS_APART and apart)
        or (policy.avoid_interference and "interference is avoided; --no-avoid-interference lets jobs meet"),
        "--restart-s": cluster.restart_s.keys() >= set(applications)
        and "the cluster says what a restart of each application costs",
    }
    for flag, cause in causes.items():
        if flag in asked and cause:
            yield f"{flag} changes nothing: {cause}"


def unknown_applications(traces: Path, name: str | None, cluster: ClusterSetup) -> Iterator[str]:
    """What a cluster file says of applications that the trace folder does not have, in words."""
    if name is None or name in PRESETS:
        return
    for field in ("restart_s", "goodput_divisor"):
        for application in sorted(getattr(cluster, field)):
            if not (traces / "apps" / application).is_dir():
                yield f"--cluster {name}: {field} of {application!r} changes nothing: nobody has measured it"


def uniform(nodes: int, gpus_per_node: int) -> ClusterSetup:
    """A cluster of equal nodes; raises TraceError through the document's bounds."""
    try:
        return from_plain(ClusterSetup, {"groups": [{"nodes": nodes, "gpus": gpus_per_node}]})
    except DocumentError as error:
        raise TraceError(f"--nodes {nodes}, --gpus-per-node {gpus_per_node}: {error}") from None


def read_setup(name: str) -> ClusterSetup:
    """One of PRESETS by its name, else a cluster file; raises TraceError naming the field."""
    path = Path(name)
    try:
        if name in PRESETS:
            text = (resources.files("pollux.simulate") / "setups" / f"{name}.json").read_text(
                encoding="utf-8"
            )
        else:
            text = path.read_text(encoding="utf-8")
        return decode(ClusterSetup, text)
    except (OSError, UnicodeDecodeError, DocumentError) as error:
        raise TraceError(f"cluster {name}: {error}; give a file, or one of {', '.join(PRESETS)}") from None

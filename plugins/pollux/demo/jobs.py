"""What the demo trains, and when each job is submitted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pollux.demo.sizing import Growth, Timing, epochs_for, seconds_alone
from pollux.errors import ConfigError
from pollux.local.nodes import DEFAULT_NODES, LocalNode, LocalNodes
from pollux.verify import Expectation, Expectations
from pollux_agent.protocol import JobSpec, ScalingRule

TRAIN_DAG, SCHEDULE_DAG, TASK = "pollux_train", "pollux_schedule", "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoJob:
    """One training. ``metric`` is what its script logs last, ``target`` what that has to reach, and
    ``min_epochs`` how many epochs the script needs for it, however slow the machine. ``length`` is how long
    it lasts alone, in terms of the plan's ``seconds_alone``."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    initial_batch_size: int
    max_local_batch_size: int
    scaling_rule: ScalingRule
    metric: str
    target: float
    higher_is_better: bool
    min_epochs: int
    length: float = 1.0

    @property
    def run_id(self) -> str:
        """The id of its DAG run."""
        return f"demo-{self.name}"

    def spec(self, *, epochs: int, max_gpus: int) -> JobSpec:
        return JobSpec(
            name=self.name,
            script=self.script,
            arguments=self.arguments,
            initial_batch_size=self.initial_batch_size,
            max_local_batch_size=self.max_local_batch_size,
            scaling_rule=self.scaling_rule,
            epochs=epochs,
            max_gpus=max_gpus,
        )

    def form(self, *, epochs: int, max_gpus: int) -> dict[str, Any]:
        """What a person would fill into the form of the training DAG."""
        return {
            "name": self.name,
            "script": self.script,
            "arguments": list(self.arguments),
            "initial_batch_size": self.initial_batch_size,
            "max_local_batch_size": self.max_local_batch_size,
            "scaling_rule": self.scaling_rule,
            "epochs": epochs,
            "max_gpus": max_gpus,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One run of the demo.

    Alone on the cluster of ``nodes`` each job would last about ``seconds_alone``. The next job is submitted
    once every slot is in use, so that somebody has to shrink for it, or after ``patience_s`` at the latest.
    ``stall_s`` is how long nothing at all may happen; ``time_limit_s`` is only reported.
    """

    jobs: tuple[DemoJob, ...]
    nodes: LocalNodes = DEFAULT_NODES
    interval_s: float = 60.0
    report_interval_s: float = 30.0
    seconds_alone: float = 195.0
    patience_s: float = 240.0
    slot_cap: float = 0.5
    stall_s: float = 180.0
    time_limit_s: float = 720.0
    memory_limit_bytes: float = 6e9

    def only(self, name: str) -> Self:
        """The same with one of its jobs; raises ConfigError for a name that none has."""
        jobs = tuple(job for job in self.jobs if job.name == name)
        if not jobs:
            raise ConfigError(
                f"--only: no job is named {name!r}; {' or '.join(job.name for job in self.jobs)}"
            )
        return replace(self, jobs=jobs)


DIGITS = DemoJob(
    name="digits",
    script="digits.py",
    initial_batch_size=32,
    max_local_batch_size=256,
    scaling_rule="adascale",
    metric="val_accuracy",
    target=0.97,
    higher_is_better=True,
    min_epochs=10,
)
LANGUAGE_MODEL = DemoJob(
    name="language-model",
    script="language_model.py",
    initial_batch_size=16,
    max_local_batch_size=64,
    scaling_rule="sqrt",
    metric="val_loss",
    target=2.2,
    higher_is_better=False,
    min_epochs=6,
)
DIGITS_AGAIN = replace(DIGITS, name="digits-again", arguments=("--seed", "1"))


def demo_plan() -> DemoPlan:
    """The demo of `make demo`.

    The second job is long enough to be there when it has to shrink for the third: its size is corrected by
    how fast the first one was seen to train.
    """
    return DemoPlan(
        jobs=(
            replace(DIGITS, length=1.1),
            replace(LANGUAGE_MODEL, length=1.4),
            replace(DIGITS_AGAIN, length=0.95),
        )
    )


def quick_plan() -> DemoPlan:
    """The same in small, for tests: two jobs on two nodes of one slot, and a decision every 5 seconds.

    Their network is narrower, so that the epochs that it needs do not outlast ``seconds_alone``; the first
    job is there when it has to shrink, also where Airflow takes half a minute for the second.
    """
    width = ("--width", "16")
    return DemoPlan(
        jobs=(
            replace(DIGITS, arguments=width, length=1.6),
            replace(DIGITS_AGAIN, arguments=(*width, *DIGITS_AGAIN.arguments), length=0.8),
        ),
        nodes=LocalNodes(nodes=(LocalNode(name="node-0", slots=1), LocalNode(name="node-1", slots=1))),
        interval_s=5.0,
        report_interval_s=2.0,
        seconds_alone=80.0,
        patience_s=70.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """How much one job trains: ``epochs``, which end at ``target_progress`` and last ``alone_s``."""

    epochs: int
    target_progress: float
    alone_s: float


def size_jobs(plan: DemoPlan, timings: Mapping[str, Timing], *, faster: float = 1.0) -> Mapping[str, JobSize]:
    """Sizes by job name from timings by script, on a machine that is ``faster`` than it was timed."""
    sizes = {}
    for job in plan.jobs:
        timing = timings[job.script]
        timing = replace(timing, progress_per_s=faster * timing.progress_per_s)
        growth = growth_of(plan, timing)
        epochs = max(job.min_epochs, epochs_for(timing, growth, job.length * plan.seconds_alone))
        sizes[job.name] = JobSize(
            epochs=epochs,
            target_progress=epochs * timing.epoch_progress,
            alone_s=seconds_alone(timing, growth, epochs),
        )
    return sizes


def growth_of(plan: DemoPlan, timing: Timing) -> Growth:
    """How a job of the plan grows alone.

    A decision holds a restart's cost against the job's age (the paper's REALLOC_FACTOR), so with decisions
    in quick succession a job grows only every few start-up times.
    """
    interval_s = max(plan.interval_s, 2.5 * timing.start_s)
    return Growth(interval_s=interval_s, max_slots=plan.nodes.num_slots)


def expectations_of(plan: DemoPlan, cluster: Literal["local", "kubernetes"] = "local") -> Expectations:
    """What `pollux verify` holds the run to."""
    return Expectations(
        cluster=cluster,
        jobs=tuple(
            Expectation(
                name=job.name,
                dag_run_id=job.run_id,
                metric=job.metric,
                target=job.target,
                higher_is_better=job.higher_is_better,
            )
            for job in plan.jobs
        ),
    )

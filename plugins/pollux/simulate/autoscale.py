"""One recorded training that rents nodes as it needs them: what it costs, and how long it takes.

The experiment of Pollux section 5.4.1. The job trains as in any simulation: its agent measures its steps,
fits them and tunes the batch, and each change of its nodes costs a restart. Only who decides differs: an
autoscaler, from the job's own model, with no other job beside it.
"""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import TraceError
from pollux.policy.autoscale import AUTOSCALERS, full_batch
from pollux.simulate.agent import Knowledge, SimulatedAgent
from pollux.simulate.fields import Count, Figure
from pollux.simulate.job import SimulatedJob
from pollux.traces import Application, Request
from pollux_agent.errors import DocumentError
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.protocol import DOCUMENT_CONFIG, from_plain

_LONGEST_S = 60 * 86400.0

_FLAGS = {
    "most_nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "interval_s": "--interval",
    "restart_s": "--restart-s",
}


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class CloudSettings:
    """Nodes on offer and their GPUs, seconds between decisions, and what a restart costs."""

    most_nodes: Annotated[int, Field(ge=1, le=1000)] = 16
    gpus_per_node: Annotated[int, Field(ge=1, le=9)] = 4
    gpu_type: str = "gpu"
    interval_s: Annotated[float, Field(ge=1, le=86400)] = 60.0
    restart_s: Annotated[float, Field(ge=0, le=1e6)] = 30.0


def cloud_settings(**options: object) -> CloudSettings:
    """Settings from a command's options; raises TraceError naming the one that is wrong."""
    try:
        return from_plain(CloudSettings, options)
    except DocumentError as error:
        words = str(error).removeprefix(f"{CloudSettings.__name__}: ")
        for field, flag in _FLAGS.items():
            words = words.replace(f"{field}: ", f"{flag} ({field}): ")
        raise TraceError(words) from None


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Moment:
    """The job at the end of an interval; ``efficiency`` is its statistical efficiency."""

    time_s: Figure
    nodes: Count
    batch_size: Count
    efficiency: Figure
    progress: Figure


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Rental:
    """What a training took: seconds, node seconds paid for, restarts, and its course."""

    policy: str
    application: str
    seconds: Annotated[float, Field(gt=0)]
    node_s: Annotated[float, Field(gt=0)]
    restarts: Count
    course: Annotated[tuple[Moment, ...], Field(min_length=1)]

    @property
    def efficiency(self) -> float:
        """Mean statistical efficiency over the training's time."""
        return sum(moment.efficiency for moment in self.course) / len(self.course)


class _Agent(SimulatedAgent):
    """An agent whose model others may read, and which for an autoscaler by throughput fills every GPU."""

    def __init__(self, limits: BatchLimits, gpu_type: str, *, fill: bool) -> None:
        super().__init__({gpu_type: limits}, Knowledge())
        self._limits_of, self._type, self._fill = limits, gpu_type, fill

    @property
    def model(self) -> GoodputModel:
        return GoodputModel(self.fits.get(self._type), self.noise_scale, self._limits_of)

    def tune(self, gpu_type: str, nodes: int, gpus: int) -> tuple[int, int]:
        if self._fill:
            return int(full_batch(self.model, gpus)), 0
        return super().tune(gpu_type, nodes, gpus)


def rent(
    app: Application,
    policy: str,
    settings: CloudSettings,
    progress: Callable[[float], None] = lambda share: None,
) -> Rental:
    """Train ``app`` to its end under the autoscaler ``policy``; ``progress`` gets the share that is done.

    It starts on one node and grows at most to twice as many as it has had, since nothing is known beyond;
    its batch is tuned anew at every decision. Raises TraceError for an unknown policy or type of GPU, for
    hybrid-parallel applications, and where the training does not end.
    """
    if policy not in AUTOSCALERS:
        raise TraceError(f"--policy is {policy!r}; use {' or '.join(AUTOSCALERS)}")
    if app.is_pipeline:
        raise TraceError(
            f"--application is {app.name!r}, whose replicas span several GPUs; the autoscalers know those of "
            "one GPU alone"
        )
    if settings.gpu_type not in app.times:
        raise TraceError(
            f"--gpu-type is {settings.gpu_type!r}; {app.name} was measured on {', '.join(app.times)}"
        )
    low, high = app.local_bounds(settings.gpu_type)
    limits = BatchLimits(
        initial_batch_size=app.initial_batch_size,
        max_batch_size=app.max_batch_size,
        max_local_batch_size=high,
        min_local_batch_size=low,
    )
    offered = min(settings.most_nodes, app.max_batch_size // (low * settings.gpus_per_node))
    agent = _Agent(limits, settings.gpu_type, fill=policy == "throughput")
    job = SimulatedJob(
        request=Request(name=app.name, submitted_s=0.0, application=app.name, num_gpus=1, batch_size=1),
        app=app,
        kind="adaptive",
        profiled=True,
        agent=agent,
        restart_s=settings.restart_s,
        batch_size=app.initial_batch_size,
    )
    course: list[Moment] = []
    now_s, nodes, most_seen = 0.0, 1, 1
    while job.completed_s is None:
        if nodes != len(job.shape):
            job.place({f"n{node}": settings.gpus_per_node for node in range(nodes)}, settings.gpu_type, now_s)
            most_seen = max(most_seen, nodes)
        job.local_bsz, job.accumulation = agent.tune(settings.gpu_type, nodes, job.gpus)
        job.advance(now_s, settings.interval_s, 0.0)
        now_s += settings.interval_s
        course.append(_moment(job, now_s))
        progress(job.progress / float(app.progress[-1]))
        if now_s > _LONGEST_S:
            raise TraceError(f"application {app.name!r} does not end in 60 days; check its validation files")
        wanted = AUTOSCALERS[policy](agent.model, nodes, settings.gpus_per_node, max(offered, 1))
        nodes = min(wanted, 2 * most_seen)
    return Rental(
        policy=policy,
        application=app.name,
        seconds=job.completed_s,
        node_s=job.attained_gpu_s / settings.gpus_per_node,
        restarts=job.restarts,
        course=tuple(course),
    )


def _moment(job: SimulatedJob, now_s: float) -> Moment:
    return Moment(
        time_s=now_s,
        nodes=len(job.shape),
        batch_size=job.gpus * job.local_bsz * (job.accumulation + 1),
        efficiency=job.efficiency,
        progress=job.progress,
    )

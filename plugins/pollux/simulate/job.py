"""A simulated job: the recorded truth of its training, moved on in time, and what its agent knows of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux.simulate.agent import SimulatedAgent
from pollux.simulate.split import split_batch
from pollux.traces import Application, Request
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.protocol import JobKind, Placement

MAX_GPUS = 64
"""Most GPUs of one adaptive job in the published experiments."""

TUNED: frozenset[JobKind] = frozenset({"adaptive", "hybrid_parallel"})
"""Kinds of job whose batch size their agent tunes."""


def limits_of(app: Application) -> Mapping[str, BatchLimits]:
    """What an adaptive job's batch sizes may be, by type of GPU."""
    bounds = {gpu_type: app.local_bounds(gpu_type) for gpu_type in app.times}
    return {
        gpu_type: BatchLimits(
            initial_batch_size=app.initial_batch_size,
            max_batch_size=app.max_batch_size,
            max_local_batch_size=high,
            min_local_batch_size=low,
        )
        for gpu_type, (low, high) in bounds.items()
    }


@dataclass(slots=True, kw_only=True)
class SimulatedJob:
    """State of one job. Times are seconds since the simulation's start.

    ``shape`` are the GPUs per node in the order in which the nodes were picked. A job of kind adaptive or
    hybrid-parallel has its batch tuned by its agent, any other one trains at ``batch_size``. One that is
    ``profiled`` has its steps measured by its agent. ``divisor`` slows progress down.
    """

    request: Request
    app: Application
    kind: JobKind
    profiled: bool
    agent: SimulatedAgent
    restart_s: float
    batch_size: int
    divisor: float = 1.0
    placement: Placement = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    gpu_type: str = ""
    local_bsz: int = 0
    accumulation: int = 0
    epoch: int = 0
    progress: float = 0.0
    attained_gpu_s: float = 0.0
    restart_left_s: float = 0.0
    trained_s: float = 0.0
    restarting_gpu_s: float = 0.0
    starts: int = 0
    started_s: float | None = None
    completed_s: float | None = None
    efficiency: float = 0.0

    @property
    def gpus(self) -> int:
        return sum(self.shape)

    @property
    def replicas(self) -> int:
        """Data-parallel replicas: GPUs, but for a pipeline."""
        return self.gpus // self.app.gpus_per_replica(self.gpu_type) if self.shape else 0

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return max(self.starts - 1, 0)

    def place(self, placement: Placement, gpu_type: str, now_s: float) -> None:
        """Give the job another allocation: it pays a restart before it makes progress again."""
        self.placement = placement
        self.shape = tuple(placement.values())
        self.gpu_type = gpu_type
        self.restart_left_s = self.trained_s = 0.0
        if placement:
            self.starts += 1
            self.started_s = now_s if self.started_s is None else self.started_s
            self.restart_left_s = self.restart_s
            self._choose_batch()

    def advance(self, start_s: float, seconds: float, interference: float) -> None:
        """Train for ``seconds`` from ``start_s`` on the present allocation, or until the last epoch ends."""
        if not self.placement:
            return
        delay = min(self.restart_left_s, seconds)
        self.restart_left_s -= delay
        self.restarting_gpu_s += delay * self.gpus
        self.attained_gpu_s += delay * self.gpus
        left_s = seconds - delay
        self.trained_s += left_s
        while left_s > 0 and self.completed_s is None:
            rate = self._step() * (1.0 - interference) / self.divisor
            boundary = float(self.app.progress[self.epoch])
            if self.progress + rate * left_s < boundary:
                self.progress += rate * left_s
                self.attained_gpu_s += left_s * self.gpus
                return
            taken_s = round((boundary - self.progress) / rate)
            left_s -= taken_s
            self.attained_gpu_s += taken_s * self.gpus
            self.progress = boundary
            self.epoch += 1
            if self.epoch == self.app.epochs:
                self.completed_s = start_s + seconds - left_s
            else:
                self._choose_batch()

    def _choose_batch(self) -> None:
        if self.kind in TUNED:
            split = self.agent.tune(self.gpu_type, len(self.shape), self.replicas)
        else:
            split = split_batch(self.app, self.gpu_type, self.batch_size, self.gpus)
        self.local_bsz, self.accumulation = split

    def _step(self) -> float:
        """Progress per second of the present configuration, which the agent measures meanwhile."""
        app, steps = self.app, self.accumulation
        step_s, sync_s = app.step_times(self.gpu_type, self.shape, self.local_bsz)
        batch = self.replicas * self.local_bsz * (steps + 1)
        scale = batch / app.initial_batch_size
        square, variance = app.gradients(self.epoch, batch)
        gain = (variance + square) / (variance / scale + square)
        self.efficiency = gain / scale
        if self.profiled:
            self.agent.measure_step(
                self.gpu_type, len(self.shape), self.replicas, self.local_bsz, step_s, sync_s
            )
            self.agent.max_gpus = max(self.agent.max_gpus, self.gpus)
            noise = app.initial_batch_size * variance / square if square > 0 else float("inf")
            self.agent.measure_noise(noise)
        return gain / (step_s + steps * (step_s - sync_s))

"""The tuner: fits the model to what was measured and chooses the batch split of highest goodput."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pollux_agent.model.fit import ThroughputModel, fit_throughput
from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.model.throughput import StepTimes, ThroughputParams
from pollux_agent.torch.ownmodel import OwnModel
from pollux_agent.torch.profile import Profile
from pollux_agent.torch.sampler import BatchPlan
from pollux_agent.torch.watch import ProgressWatch

MIN_GAIN = 0.05
"""Predicted gain in goodput below which a running job keeps its batch size."""
GROWTH = 2
"""Largest step up, as a factor, from the largest batch size tried."""
FIRST_TUNE_STEPS = 20
"""Steps before the first fit; the spacing then doubles until it reaches the report interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says of a configuration: throughput in samples/s, goodput in useful samples/s."""

    throughput: float
    efficiency: float
    goodput: float


class Tuner:
    """Chooses (m, s) for one placement.

    ``params`` is the newest fit of the paper's model, None before the first; ``model`` is what batches are
    chosen by: the same, or the fit of ``throughput`` where the user gave another model.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        adaptive: bool,
        num_nodes: int,
        num_replicas: int,
        prior: ThroughputParams | None = None,
        throughput: ThroughputModel[StepTimes] | None = None,
        watch: ProgressWatch | None = None,
    ) -> None:
        self._limits, self._adaptive = limits, adaptive
        self._num_nodes, self._num_replicas = num_nodes, num_replicas
        self._prior = prior
        self._own = OwnModel(throughput, limits, num_nodes, num_replicas) if throughput is not None else None
        self._watch = watch
        self.params = prior
        self.model: StepTimes | None = prior

    def observe(self, values: Mapping[str, float]) -> None:
        """Figures that the script logged; the one that is watched tells whether larger batches keep up."""
        if self._watch is not None:
            self._watch.logged(values)

    def pass_ended(self, steps_taken: int) -> None:
        """The script is done with a pass, and with what stands behind it; steps are this incarnation's."""
        if self._watch is not None:
            self._watch.pass_ended(steps_taken)

    def learn(self, prior: ThroughputParams) -> None:
        """Take the fit of an earlier run for what this one has not tried; the first one given counts."""
        if self._prior is None:
            self._prior = prior

    def refit(self, profile: Profile) -> None:
        """Fit anew; an impossible fit leaves the last one, and so does an error in the user's model."""
        observations = profile.observations()
        self.params = fit_throughput(observations, prior=self._prior) or self.params
        if self._own is None:
            self.model = self.params
        else:
            self.model = self._own.fit(observations) or self.model

    def choose(
        self, noise_scale: float | None, current: BatchPlan | None, *, largest_batch_size: int
    ) -> BatchPlan:
        """The best plan, or ``current`` unless another is predicted to be at least 5 % better.

        A plan grows to at most twice the ``largest_batch_size`` that this job has trained with: an early
        noise scale is a poor guide far from where it was measured.
        """
        try:
            plan = self._choice(noise_scale, current, largest_batch_size)
        except Exception as error:
            if self._own is None:  # a user's code must not end the training, and ours must not go on
                raise
            self._own.refuse(f"its fit cannot be asked for the best batch: {error!r}")
            self.model = None
            plan = self._choice(noise_scale, current, largest_batch_size)
        if self._watch is not None:
            self._watch.chosen(plan.batch_size)
        return plan

    def _choice(
        self, noise_scale: float | None, current: BatchPlan | None, largest_batch_size: int
    ) -> BatchPlan:
        if not self._adaptive or largest_batch_size == 0:
            return self._first_plan()
        limit = int(min(GROWTH * largest_batch_size, self._watch.limit if self._watch else math.inf))
        if current is not None and current.batch_size > limit:
            current = None
        model = GoodputModel(self.model, noise_scale, self._limits, self._adaptive)
        best = model.best(self._num_nodes, self._num_replicas)
        local, micro_batches = int(best.local_batch_size), int(best.accumulation_steps) + 1
        if local == 0:
            return current or self._first_plan()
        predicted = self.predict(noise_scale, current) if current is not None else None
        if current is not None and (
            predicted is None or float(best.goodput) < (1 + MIN_GAIN) * predicted.goodput
        ):
            return current
        plan = BatchPlan(batch_size=local * micro_batches * self._num_replicas, micro_batches=micro_batches)
        if plan.batch_size <= limit:
            return plan
        most = max(self._plan_of(limit), self._first_plan(), key=lambda plan: plan.batch_size)
        return current if current is not None and current.batch_size >= most.batch_size else most

    def predict(self, noise_scale: float | None, plan: BatchPlan) -> Prediction | None:
        """What the model expects of ``plan`` on this placement, None before the first fit."""
        model = GoodputModel(self.model, noise_scale, self._limits, self._adaptive)
        if self.model is None or not model.is_fitted:
            return None
        local = local_batch_size(plan, self._num_replicas)
        placement = (self._num_nodes, self._num_replicas)
        seconds = float(self.model.step_time(*placement, local, plan.micro_batches - 1))
        throughput = plan.batch_size / seconds
        goodput = float(model.goodput(*placement, local, plan.micro_batches - 1))
        return Prediction(throughput=throughput, efficiency=min(1.0, goodput / throughput), goodput=goodput)

    def _first_plan(self) -> BatchPlan:
        """M0, or the smallest batch above it that divides evenly; M0 as it is where the batch is not ours."""
        if not self._adaptive:
            return BatchPlan(
                batch_size=self._limits.initial_batch_size,
                micro_batches=self._micro_batches(self._limits.initial_batch_size),
            )
        best = GoodputModel.unfitted(self._limits).best(self._num_nodes, self._num_replicas)
        local, micro_batches = int(best.local_batch_size), int(best.accumulation_steps) + 1
        if local == 0:
            return BatchPlan(batch_size=self._limits.initial_batch_size, micro_batches=1)
        return BatchPlan(batch_size=local * micro_batches * self._num_replicas, micro_batches=micro_batches)

    def _plan_of(self, batch_size: int) -> BatchPlan:
        """At most ``batch_size``, in as few micro-batches as memory allows (two on one GPU, to see noise)."""
        micro_batches = self._micro_batches(batch_size)
        if self._num_replicas == 1:
            micro_batches = max(2, micro_batches)
        parts = self._num_replicas * micro_batches
        return BatchPlan(batch_size=max(1, batch_size // parts) * parts, micro_batches=micro_batches)

    def _micro_batches(self, batch_size: int) -> int:
        share = -(-batch_size // self._num_replicas)
        return -(-share // self._limits.max_local_batch_size)


def local_batch_size(plan: BatchPlan, num_replicas: int) -> int:
    """m: samples of the largest micro-batch of one replica."""
    return -(-plan.batch_size // (num_replicas * plan.micro_batches))

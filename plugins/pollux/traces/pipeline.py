"""Steps of a hybrid-parallel application: replicas that are pipelines of stages, one a GPU; Sia 5.3."""

from collections.abc import Mapping

from pollux.traces.steptimes import Shape, StepTimes

MICRO_BATCHES = 48
"""Micro-batches of one sample that a replica takes in a step."""

STAGES: Mapping[tuple[str, str], int] = {("gpt_pmp", "dgx-ext"): 2, ("gpt_pmp", "rtx"): 8}
"""GPUs of one replica, by application and type of GPU: as many as its memory asks for."""

_PASSES = 3
"""A backward pass takes twice as long as a forward one."""


class PipelineTimes:
    """Steps of data-parallel replicas of a pipeline.

    What was measured is the forward pass of one stage for one micro-batch, and the all-reduce on a placement.
    A replica's stages work at the same time on different micro-batches (GPipe), so that p stages need
    p - 1 + 48 turns.
    """

    def __init__(self, measured: StepTimes, stages: int) -> None:
        self.gpus_per_replica = stages
        self.min_local = self.max_local = MICRO_BATCHES
        self._stage = measured

    def at(self, shape: Shape, local_bsz: int) -> tuple[float, float]:
        """(step_s, sync_s) of whole replicas, each with ``local_bsz`` micro-batches of one sample."""
        forward_s, sync_s = self._stage.at(shape, 1)
        return _PASSES * (self.gpus_per_replica - 1 + local_bsz) * forward_s + sync_s, sync_s

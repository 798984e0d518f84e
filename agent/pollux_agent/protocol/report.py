"""The report: what a running job tells the scheduler about itself, as one JSON tag of its MLflow run."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol.codec import DOCUMENT_CONFIG

REPORT_TAG = "pollux.report"
MAX_REPORT_CHARS = 7500
"""MLflow cuts a tag at 8,000 characters without an error, so a longer report is refused."""

NonNegativeInt = Annotated[int, Field(ge=0, le=2**53, strict=True)]
"""Reports are not trusted: a larger count would not even be a number to calculate with."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Report:
    """The state of one job as its rank 0 knows it.

    ``fits`` holds the fitted throughput parameters per GPU type; ``noise_scale`` is the paper's phi in
    samples, None while unknown. ``progress`` and ``target_progress`` count steps of useful progress of
    size M0. ``mean_restart_s`` is the mean time from the stop signal to the first new step, None before
    the first restart; ``first_start_s`` is the time from process start to the first step of the first
    start. ``max_gpus_seen`` is the largest number of GPUs that this job, or an earlier run of its model whose
    fit it took up, was measured on, ``gpus_seen`` the same by GPU type: a fit of a type that is absent there,
    or 1, knows nothing of synchronisation. ``restart_phases_s`` has the last restart's seconds by phase: wait
    (for a step boundary), save, stop, start, load, first_step; a phase that nobody saw both ends of is left
    out.
    """

    schema: Literal[1] = 1
    job_id: str
    incarnation: NonNegativeInt
    sequence: NonNegativeInt
    time_unix_s: float
    fits: Mapping[str, ThroughputParams] = Field(default_factory=dict)
    noise_scale: Annotated[float, Field(ge=0)] | None = None
    initial_batch_size: Annotated[int, Field(ge=1, strict=True)]
    max_batch_size: Annotated[int, Field(ge=1, strict=True)]
    max_local_batch_size: Annotated[int, Field(ge=1, strict=True)]
    max_gpus_seen: NonNegativeInt
    gpus_seen: Mapping[str, NonNegativeInt] = Field(default_factory=dict)
    restart_phases_s: Mapping[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    restarts: NonNegativeInt = 0
    mean_restart_s: Annotated[float, Field(ge=0)] | None = None
    first_start_s: Annotated[float, Field(ge=0)] | None = None
    progress: Annotated[float, Field(ge=0)] = 0.0
    target_progress: Annotated[float, Field(ge=0)] | None = None
    batch_size: NonNegativeInt = 0
    goodput: Annotated[float, Field(ge=0)] | None = None

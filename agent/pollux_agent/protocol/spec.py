"""The job spec: what a user asks for when a training is submitted."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from pollux_agent.model.goodput import BatchLimits, GoodputModel
from pollux_agent.protocol.codec import DOCUMENT_CONFIG

JobKind = Literal["adaptive", "strong_scaling", "rigid", "hybrid_parallel"]
ScalingRule = Literal["adascale", "sqrt", "linear", "legw", "none"]

DEFAULT_MAX_BATCH_FACTOR = 32
"""Max batch size over M0 when the user gives none; Pollux section 3.1: works well in most cases."""

ESTIMATOR_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,99}(:[A-Za-z_][A-Za-z0-9_]{0,99})?$"
"""A name, or the dotted name of a class as module:class."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_MAX_TEXT_BYTES = 100_000
"""Linux takes 128 KiB for one argument, or one variable with its name."""
_RESERVED_ENV = ("POLLUX_", "MLFLOW_", "TORCHELASTIC_")

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobSpec:
    """One training job as its user describes it.

    ``initial_batch_size`` is the paper's M0, the total batch size that the script's learning rate was
    chosen for; ``max_batch_size`` bounds the total batch size (default 32 x M0);
    ``max_local_batch_size`` is the largest per-GPU batch m that fits in memory. ``epochs`` counts
    statistical epochs: one is as much progress as one pass over the data makes at M0; None leaves the
    number to the script. ``model`` names what is trained, so that a later run of the same model can start
    from this one's fit. ``priority`` says how much the job counts against others (1 for all but a few),
    and ``team`` whose quota of GPUs it uses. From ``reserved_from_unix_s`` until
    ``reserved_until_unix_s`` (either may be left out) the job has first claim on its ``min_gpus``.
    ``estimator`` says what its goodput is: of a ``training``, the ``throughput`` of batch inference,
    whether inference of M0 samples keeps ``latency_limit_s`` (``latency``), or what the user-defined
    estimator of that name says. ``checkpoint_url`` is where checkpoints go, each job's into a folder of
    its own: any URL that fsspec knows in the workers; empty: the job's folder.

    Raises DocumentError (through the codec) for a missing or malformed field, for max below min, and for
    what is not supported yet.
    """

    schema: Literal[1] = 1
    name: Annotated[str, Field(min_length=1, max_length=100)]
    script: Annotated[str, Field(min_length=1)]
    arguments: tuple[str, ...] = ()
    kind: JobKind = "adaptive"
    initial_batch_size: PositiveInt
    max_batch_size: PositiveInt | None = None
    max_local_batch_size: PositiveInt
    min_local_batch_size: PositiveInt = 1
    min_gpus: PositiveInt = 1
    max_gpus: PositiveInt
    scaling_rule: ScalingRule = "adascale"
    epochs: PositiveInt | None = None
    model: str = ""
    checkpoint_url: str = ""
    preemptible: bool = True
    gpu_types: tuple[str, ...] = ()
    gpus_per_replica: PositiveInt = 1
    priority: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0
    team: Annotated[str, Field(max_length=100)] = ""
    reserved_from_unix_s: float | None = None
    reserved_until_unix_s: float | None = None
    estimator: Annotated[str, Field(pattern=ESTIMATOR_PATTERN)] = "training"
    latency_limit_s: Annotated[float, Field(gt=0)] | None = None
    env: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "JobSpec":
        if self.max_gpus < self.min_gpus:
            raise ValueError(
                f"max_gpus is {self.max_gpus}, below min_gpus {self.min_gpus}; "
                "raise max_gpus or lower min_gpus"
            )
        if self.max_batch_size is not None and self.max_batch_size < self.initial_batch_size:
            raise ValueError(
                f"max_batch_size is {self.max_batch_size}, below initial_batch_size "
                f"{self.initial_batch_size}; raise it, or leave it out for 32 x initial_batch_size"
            )
        if self.max_local_batch_size < self.min_local_batch_size:
            raise ValueError(
                f"max_local_batch_size is {self.max_local_batch_size}, below min_local_batch_size "
                f"{self.min_local_batch_size}; raise it to what fits in one GPU's memory"
            )
        if not _can_start(self._limits, self.min_gpus):
            raise ValueError(
                f"initial_batch_size {self.initial_batch_size} cannot be split over min_gpus {self.min_gpus} "
                f"with {self.min_local_batch_size} to {self.max_local_batch_size} samples on each GPU and "
                f"{self.batch_size_limit} in all; lower min_gpus or min_local_batch_size, or raise "
                "max_batch_size"
            )
        if self.kind == "rigid" and self.min_gpus != self.max_gpus:
            raise ValueError(
                f"a rigid job has one GPU count, but min_gpus is {self.min_gpus} and max_gpus "
                f"{self.max_gpus}; set both to the count, or kind to strong_scaling"
            )
        if self.kind == "hybrid_parallel" or self.gpus_per_replica != 1:
            raise ValueError(
                "hybrid-parallel jobs (kind hybrid_parallel, gpus_per_replica above 1) are not "
                "supported yet; use kind adaptive, strong_scaling or rigid with gpus_per_replica 1"
            )
        begins, ends = self.reserved_from_unix_s, self.reserved_until_unix_s
        if begins is not None and ends is not None and ends <= begins:
            raise ValueError(
                f"reserved_until_unix_s is {ends}, not after reserved_from_unix_s {begins}; "
                "set it later, or leave one out"
            )
        if self.estimator == "latency" and self.latency_limit_s is None:
            raise ValueError(
                "estimator is latency, but latency_limit_s is not given; set it to the seconds in which a "
                "batch of initial_batch_size has to be done"
            )
        if self.estimator in ("training", "throughput") and self.latency_limit_s is not None:
            raise ValueError(
                f"latency_limit_s is {self.latency_limit_s}, which means nothing to estimator "
                f"{self.estimator}; leave it out, or set estimator to latency"
            )
        if self.checkpoint_url and not _URL.match(self.checkpoint_url):
            raise ValueError(
                f"checkpoint_url is {self.checkpoint_url[:200]!r}, which is no URL; give one such as "
                "s3://bucket/folder, or leave it out for the job's folder"
            )
        for name in self.env:
            if not _ENV_NAME.fullmatch(name) or name.startswith(_RESERVED_ENV):
                raise ValueError(
                    f"env has {name!r}, which is no variable name or one that Pollux sets itself; rename it"
                )
        for text in (self.script, *self.arguments, *self.env.values()):
            if "\0" in text:
                raise ValueError(
                    f"{text[:80]!r} in script, arguments or env holds a NUL character, which no process can "
                    "be given; take it out"
                )
            if len(text.encode()) > _MAX_TEXT_BYTES:
                raise ValueError(
                    f"{text[:80]!r}... in script, arguments or env has {len(text.encode())} bytes, but "
                    f"no process can be given more than {_MAX_TEXT_BYTES}; put it into a file and name that"
                )
        return self

    @property
    def _limits(self) -> BatchLimits:
        return BatchLimits(
            initial_batch_size=self.initial_batch_size,
            max_batch_size=self.batch_size_limit,
            max_local_batch_size=self.max_local_batch_size,
            min_local_batch_size=self.min_local_batch_size,
        )

    def extends(self, done: "JobSpec") -> bool:
        """Whether a job that was done by ``done`` is asked for more: for more epochs, or, where the script
        decides on their number, by another command line. Too little to ask for is found out by the script.
        """
        if self.epochs is not None:
            return done.epochs is not None and self.epochs > done.epochs
        return (self.script, self.arguments, self.epochs) != (done.script, done.arguments, done.epochs)

    @property
    def batch_size_limit(self) -> int:
        """The largest total batch size M this job may use."""
        return self.max_batch_size or DEFAULT_MAX_BATCH_FACTOR * self.initial_batch_size


@lru_cache(maxsize=4096)
def _can_start(limits: BatchLimits, min_gpus: int) -> bool:
    """Whether any batch size is allowed on the least number of GPUs; remembered, since it takes half of the
    time in which a cycle reads a job.
    """
    return bool(GoodputModel.unfitted(limits).best(1, min_gpus).goodput > 0)

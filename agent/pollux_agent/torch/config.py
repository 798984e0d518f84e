"""What a job trains with: the script's own arguments, overruled by the job spec under a driver."""

from dataclasses import dataclass

from pollux_agent.errors import DocumentError
from pollux_agent.model.goodput import BatchLimits
from pollux_agent.protocol import DEFAULT_MAX_BATCH_FACTOR, JobKind, JobSpec, ScalingRule, decode
from pollux_agent.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """``limits`` bounds the batch; ``epochs`` is None where the script decides; ``checkpoint_url`` is empty
    for the job's folder."""

    kind: JobKind
    limits: BatchLimits
    scaling_rule: ScalingRule
    epochs: int | None
    checkpoint_url: str = ""

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is ours to choose."""
        return self.kind == "adaptive"


def job_spec(settings: WorkerSettings | None) -> JobSpec | None:
    """What the driver was given, None without one."""
    return decode(JobSpec, settings.folder.spec.read_bytes()) if settings is not None else None


def job_config(
    spec: JobSpec | None,
    *,
    num_samples: int | None,
    batch_size: int,
    max_batch_size: int | None,
    max_local_batch_size: int | None,
    scaling_rule: ScalingRule,
    min_local_batch_size: int = 1,
) -> JobConfig:
    """The configuration from spec or arguments; no batch is larger than the ``num_samples`` of the data set.

    A stream of unknown length has None. The script's ``min_local_batch_size`` holds besides the spec's.
    Raises DocumentError naming the argument, its value and the fix.
    """
    if spec is not None:
        return JobConfig(
            kind=spec.kind,
            limits=_limits(
                num_samples,
                spec.initial_batch_size,
                spec.batch_size_limit,
                spec.max_local_batch_size,
                max(spec.min_local_batch_size, min(min_local_batch_size, spec.max_local_batch_size)),
            ),
            scaling_rule=spec.scaling_rule,
            epochs=spec.epochs,
            checkpoint_url=spec.checkpoint_url,
        )
    largest = DEFAULT_MAX_BATCH_FACTOR * batch_size if max_batch_size is None else max_batch_size
    local = batch_size if max_local_batch_size is None else max_local_batch_size
    limits = _limits(num_samples, batch_size, largest, local, min_local_batch_size)
    return JobConfig(kind="adaptive", limits=limits, scaling_rule=scaling_rule, epochs=None)


def _limits(num_samples: int | None, initial: int, largest: int, local: int, min_local: int) -> BatchLimits:
    if num_samples is None:
        num_samples = max(initial, largest)
    if not 1 <= initial <= num_samples:
        raise DocumentError(
            f"batch_size is {initial}, but the training set has {num_samples} samples; "
            f"choose a batch size between 1 and {num_samples}"
        )
    try:
        return BatchLimits(
            initial_batch_size=initial,
            max_batch_size=min(largest, num_samples) if largest >= initial else largest,
            max_local_batch_size=local,
            min_local_batch_size=min_local,
        )
    except ValueError as error:
        raise DocumentError(str(error)) from None

"""How a total batch size is split over GPUs and accumulation steps when it is fixed or a candidate."""

from math import ceil

from pollux.traces import Application


def split_batch(app: Application, gpu_type: str, batch_size: int, gpus: int) -> tuple[int, int]:
    """(local batch size m, accumulation steps s) nearest to ``batch_size`` on that many GPUs.

    One GPU takes more than M0 only with s >= 1, so that gradients can be compared within a step.
    """
    share = ceil(batch_size / gpus)
    steps = ceil(share / app.local_bounds(gpu_type)[1]) - 1
    if gpus == 1 and batch_size > app.initial_batch_size:
        steps = max(steps, 1)
    local = ceil(share / (steps + 1))
    return min(local, app.max_batch_size // (gpus * (steps + 1))), steps


def packed(gpus: int, width: int) -> tuple[int, ...]:
    """The placement of ``gpus`` on as few nodes of ``width`` GPUs as can be: full ones, then the rest."""
    full, rest = divmod(gpus, width)
    return (width,) * full + ((rest,) if rest else ())

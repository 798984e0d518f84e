"""Statistical efficiency of Pollux section 3.1: how much one sample of a larger batch still teaches."""

import math

import numpy as np
from numpy.typing import ArrayLike

from pollux_agent.model.throughput import FloatArray


def efficiency(noise_scale: float, initial_batch_size: ArrayLike, batch_size: ArrayLike) -> FloatArray:
    """Progress per sample at total batch size M, relative to M0; Pollux Eq. 7.

    EFFICIENCY(M) = (phi + M0) / (phi + M). ``noise_scale`` is phi in samples: 0 makes every sample beyond
    M0 worthless, and towards infinity every sample counts in full.
    """
    initial = np.asarray(initial_batch_size, dtype=np.float64)
    batch = np.asarray(batch_size, dtype=np.float64)
    if np.isinf(noise_scale):
        return np.ones(np.broadcast_shapes(initial.shape, batch.shape))
    return np.asarray((noise_scale + initial) / (noise_scale + batch), dtype=np.float64)


def gain(noise_scale: float, initial_batch_size: ArrayLike, batch_size: ArrayLike) -> FloatArray:
    """Progress of one step at M, counted in steps at M0; the gain ratio of AdaScale (arXiv:2007.05105).

    gain = M / M0 EFFICIENCY(M), between 1 and M / M0 for M >= M0.
    """
    ratio = np.asarray(batch_size, dtype=np.float64) / np.asarray(initial_batch_size, dtype=np.float64)
    return np.asarray(ratio * efficiency(noise_scale, initial_batch_size, batch_size), dtype=np.float64)


def step_gain(noise_scale: float, initial_batch_size: float, batch_size: float) -> float:
    """:func:`gain` of plain numbers, for every step of a training: numpy takes longer to begin than this."""
    ratio = batch_size / initial_batch_size
    if math.isinf(noise_scale):
        return ratio
    return ratio * ((noise_scale + initial_batch_size) / (noise_scale + batch_size))

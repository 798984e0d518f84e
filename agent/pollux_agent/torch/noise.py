"""The pre-conditioned gradient noise scale (PGNS) phi, estimated from the gradients of training itself.

Let x_1..x_n be pre-conditioned gradients of micro-batches of b_1..b_n samples, x_i = P g_i, so that with G
the true pre-conditioned gradient and S = P Sigma P^T the covariance of one sample's

    E[x_i] = G,    E|x_i|^2 = |G|^2 + tr(S) / b_i.

Their sample-weighted mean x = sum_i b_i x_i / B over B = sum_i b_i samples is the step's gradient, and
E|x|^2 = |G|^2 + tr(S) / B. Hence

    E[ sum_i b_i |x_i|^2 - B |x|^2 ] = (B |G|^2 + n tr(S)) - (B |G|^2 + tr(S)) = (n - 1) tr(S),

which gives, unbiased for micro-batches of any sizes,

    tr(S) ~ (sum_i b_i |x_i|^2 - B |x|^2) / (n - 1)        |G|^2 ~ |x|^2 - tr(S) / B.

For equal b_i this is McCandlish et al. 2018, appendix A.1. Only the sum over i and |x|^2 enter, so where a
micro-batch ran (replica or accumulation) makes no difference. On one GPU without accumulation the
gradients of two consecutive steps stand for x_1 and x_2 (differenced estimator, Wang and Yu 2017): the
same formula, under one P from before both, with a bias that vanishes with the movement of the weights.

phi = tr(S) / |G|^2 (Pollux section 3.1) is a ratio of noisy numbers, so numerator and denominator are
averaged first, each by an exponential moving average over estimates divided by 1 - theta^count.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_SMOOTHING = 0.98
SPREAD = 10.0
"""sqrt of the number of directions over which noise is taken to spread, for the bound on phi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSample:
    """What one step tells: sum_i b_i |x_i|^2 over ``num_estimates`` = n micro-batches, and |x|^2."""

    num_estimates: int
    num_samples: float
    weighted_sqr_sum: float
    mean_sqr: float

    def grad_var(self) -> float:
        """Unbiased tr(S) of one sample; needs n >= 2."""
        return (self.weighted_sqr_sum - self.num_samples * self.mean_sqr) / (self.num_estimates - 1)

    def grad_sqr(self) -> float:
        """Unbiased |G|^2; a single one can be negative."""
        return self.mean_sqr - self.grad_var() / self.num_samples


class NoiseScale:
    """Smoothed PGNS, each figure None while unknown.

    ``noise_scale`` is phi in samples, finite and >= 0; ``grad_sqr`` is |G|^2, the squared norm of the true
    pre-conditioned gradient; ``grad_var`` is tr(S), the variance of one sample's pre-conditioned gradient.
    ``smoothing`` is theta, the weight that an estimate keeps when the next one arrives: 0.98 averages over
    the last 50 or so.
    """

    def __init__(self, smoothing: float = DEFAULT_SMOOTHING) -> None:
        self._smoothing = smoothing
        self.count = 0
        self._sqr = 0.0
        self._var = 0.0
        self._samples = 0.0
        self.noise_scale: float | None = None
        self.grad_sqr: float | None = None
        self.grad_var: float | None = None

    def update(self, sample: NoiseSample) -> bool:
        """Take in one step's figures; False where they hold no estimate (n < 2, or not finite)."""
        if sample.num_estimates < 2 or sample.num_samples <= 0:
            return False
        sqr, var = sample.grad_sqr(), sample.grad_var()
        if not (math.isfinite(sqr) and math.isfinite(var)):
            return False
        keep = self._smoothing
        self.count += 1
        self._sqr = keep * self._sqr + (1 - keep) * sqr
        self._var = keep * self._var + (1 - keep) * var
        self._samples = keep * self._samples + (1 - keep) * sample.num_samples
        self._settle()
        return True

    def _settle(self) -> None:
        """Divide by the averages' weight, and bound phi.

        W samples in the averaging window, with noise spread over D directions, cannot tell |G|^2 from 0
        below tr(S) / (W sqrt(D)), so phi is at most W sqrt(D), D = 100.
        """
        self.noise_scale = self.grad_sqr = self.grad_var = None
        if not self.count:
            return
        weight = 1.0 - self._smoothing**self.count
        sqr, var = max(self._sqr / weight, 0.0), max(self._var / weight, 0.0)
        self.grad_sqr, self.grad_var = sqr, var
        if sqr or var:
            bound = SPREAD * self._samples / (1 - self._smoothing)
            self.noise_scale = var / sqr if sqr * bound > var else bound

    def state_dict(self) -> dict[str, float]:
        """Plain numbers, for a checkpoint."""
        return {"count": self.count, "sqr": self._sqr, "var": self._var, "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up what :meth:`state_dict` gave."""
        self.count = int(state["count"])
        self._sqr, self._var = float(state["sqr"]), float(state["var"])
        self._samples = float(state["samples"])
        self._settle()

"""Why throughput alone misleads: a quadratic loss where larger batches are faster and take longer.

Loss w^2 / 2 from w = 1 at learning rate eta; each gradient is w plus independent noise of variance sigma^2,
averaged over a batch of B, so that E[w^2] becomes (1 - eta)^2 E[w^2] + eta^2 sigma^2 / B with each update.
Time is modelled: 0.01 s an update and 0.1 ms an example.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LEARNING_RATE = 0.25
TARGET_LOSS = 1e-4
UPDATE_S, EXAMPLE_S = 0.01, 1e-4
BATCHES = (16, 32, 64, 128, 256, 512, 1024, 2048)
SIGMAS = (0.0, 0.2, 0.8)
_MOST_UPDATES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One batch size at one noise level; ``updates`` is None where the loss never gets to the target."""

    batch_size: int
    sigma: float
    updates: int | None

    @property
    def examples(self) -> int | None:
        return None if self.updates is None else self.updates * self.batch_size

    @property
    def seconds(self) -> float | None:
        """Modelled time to the target."""
        return None if self.updates is None else self.updates * update_seconds(self.batch_size)

    @property
    def examples_per_s(self) -> float:
        return self.batch_size / update_seconds(self.batch_size)


def update_seconds(batch_size: int) -> float:
    """Modelled seconds of one update."""
    return UPDATE_S + EXAMPLE_S * batch_size


def loss_floor(batch_size: int, sigma: float) -> float:
    """The expected loss that updates without end come down to: eta sigma^2 / (2 B (2 - eta))."""
    return LEARNING_RATE * sigma**2 / (2 * batch_size * (2 - LEARNING_RATE))


def train(batch_size: int, sigma: float) -> Outcome:
    """Count the updates until the expected loss is at most the target."""
    if loss_floor(batch_size, sigma) >= TARGET_LOSS:
        return Outcome(batch_size=batch_size, sigma=sigma, updates=None)
    square, updates = 1.0, 0
    while square / 2 > TARGET_LOSS and updates < _MOST_UPDATES:
        square = (1 - LEARNING_RATE) ** 2 * square + LEARNING_RATE**2 * sigma**2 / batch_size
        updates += 1
    return Outcome(batch_size=batch_size, sigma=sigma, updates=updates)


def table() -> list[Outcome]:
    """Every batch size at every noise level."""
    return [train(batch, sigma) for sigma in SIGMAS for batch in BATCHES]


def fastest(outcomes: Sequence[Outcome], sigma: float) -> Outcome:
    """The one that is at the target first."""
    reached = [outcome for outcome in outcomes if outcome.sigma == sigma and outcome.seconds is not None]
    return min(reached, key=lambda outcome: outcome.seconds or 0.0)

"""Repeated races: ratios against a baseline on a machine whose speed drifts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

NOISE = 0.01
"""A baseline whose median ratio to itself is farther from 1 than this says that the machine is too noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Median ratio of each variant to the baseline's two runs beside it, and of one of these to the other."""

    medians: Mapping[str, float]
    baseline: float
    num_pairs: int

    @property
    def too_noisy(self) -> bool:
        return abs(self.baseline - 1) > NOISE


def compare(
    race: Callable[[Sequence[str]], Sequence[float]],
    baseline: str,
    variants: Sequence[str],
    *,
    pairs: int,
    most_pairs: int,
    told: Callable[[str], None],
) -> Ratios:
    """Race the variants between two runs of the baseline, ``pairs`` times, and on while it is too noisy.

    ``race`` gives the seconds of each of the runs that it is told; it is told them in turned order every
    other time.
    """
    order = [baseline, *variants, baseline]
    rounds: list[list[float]] = []
    for number in range(most_pairs):
        seconds = race(order) if number % 2 == 0 else race(order[::-1])[::-1]
        rounds.append(list(seconds))
        plain = [(first + last) / 2 for first, *_, last in rounds]
        columns = list(zip(*rounds, strict=True))[1:-1]
        of_variants = {
            variant: [value / base for value, base in zip(column, plain, strict=True)]
            for variant, column in zip(variants, columns, strict=True)
        }
        of_baseline = [last / first for first, *_, last in rounds]
        told(
            f"pair {number + 1}: {baseline} {of_baseline[-1]:.3f}, "
            + ", ".join(f"{name} {values[-1]:.3f}" for name, values in of_variants.items())
        )
        ratios = Ratios(
            medians={name: statistics.median(values) for name, values in of_variants.items()},
            baseline=statistics.median(of_baseline),
            num_pairs=number + 1,
        )
        if number + 1 >= pairs and not ratios.too_noisy:
            break
    return ratios

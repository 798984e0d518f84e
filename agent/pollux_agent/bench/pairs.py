"""Alternating runs: ratios against a baseline on a machine whose speed drifts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

NOISE = 0.01
"""A baseline whose median ratio to itself is farther from 1 than this says that the machine is too noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Median ratio of each variant to the baseline runs beside it, and that of the baseline to itself."""

    medians: Mapping[str, float]
    baseline: float
    num_pairs: int
    baseline_s: float

    @property
    def too_noisy(self) -> bool:
        return abs(self.baseline - 1) > NOISE


def alternate(
    run: Callable[[str], float],
    baseline: str,
    variants: Sequence[str],
    *,
    pairs: int,
    most_pairs: int,
    told: Callable[[str], None],
) -> Ratios:
    """Run baseline and variants in turn, ``pairs`` times, and on to ``most_pairs`` while it is too noisy.

    ``run`` gives the seconds of one run. Each variant is held against the mean of the baseline runs right
    before and behind it, in which a steady drift of the machine cancels; for the baseline against itself the
    order turns round with every round.
    """
    order = [baseline]
    for variant in variants:
        order += [variant, baseline]
    seconds: dict[str, list[float]] = {variant: [] for variant in (baseline, *variants)}
    baselines: list[float] = []
    for number in range(most_pairs):
        turn = order if number % 2 == 0 else order[::-1]
        took = [run(name) for name in turn]
        if number % 2:
            took.reverse()
        for place, variant in enumerate(variants):
            before_s, variant_s, after_s = took[2 * place : 2 * place + 3]
            seconds[variant].append(2 * variant_s / (before_s + after_s))
        seconds[baseline].append(took[2] / took[0])
        baselines += took[::2]
        ratios = Ratios(
            medians={variant: statistics.median(seconds[variant]) for variant in variants},
            baseline=statistics.median(seconds[baseline]),
            num_pairs=number + 1,
            baseline_s=statistics.median(baselines),
        )
        told(
            f"pair {number + 1}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in seconds.items())
        )
        if number + 1 >= pairs and not ratios.too_noisy:
            break
    return ratios

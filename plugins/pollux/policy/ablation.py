"""Our policy with one ingredient taken away or told wrong, to see what each one brings. Not for use.

What is taken away is what the policy would see of a job; the policy itself is the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from pollux.policy import ours
from pollux.snapshot import Decision, Job, Snapshot

MISTAKE = 2.0
"""By how much a job is wrong about what it still has to do: every other one up, the rest down."""

EVERY_SAMPLE_COUNTS = 1e18
"""A noise scale at which efficiency is 1 at any batch size, so that goodput is throughput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant; ``words`` say what it lacks, ``see`` what its policy sees of a job, whose noise scale it
    takes to grow by a factor.
    """

    name: str
    words: str
    see: Callable[[Job, float], Job]

    def decide(self, snapshot: Snapshot) -> Decision:
        """What our policy answers to what it sees."""
        growth = ours.noise_growth(snapshot).tolist()
        seen = tuple(self.see(job, factor) for job, factor in zip(snapshot.jobs, growth, strict=True))
        return replace(ours.decide(replace(snapshot, jobs=seen)), policy=self.name)


def _misled(job: Job, _: float) -> Job:
    if job.target_progress is None:
        return job
    left = max(job.target_progress - job.progress, 0.0)
    wrong = left * (MISTAKE if crc32(job.job_id.encode()) % 2 else 1 / MISTAKE)
    return replace(job, target_progress=job.progress + wrong)


ABLATION: tuple[Variant, ...] = (
    Variant(
        name="ours-without-remaining",
        words="remaining epochs not known",
        see=lambda job, _: replace(job, target_progress=None),
    ),
    Variant(name="ours-misled", words="remaining epochs wrong by 2 x", see=_misled),
    Variant(
        name="ours-without-restart-cost",
        words="own restart cost not known",
        see=lambda job, _: replace(job, restart_s=None),
    ),
    Variant(
        name="ours-free-restarts",
        words="restarts taken for free",
        see=lambda job, _: replace(job, restart_s=0.0),
    ),
    Variant(
        name="ours-shortsighted",
        words="noise as it is now",
        see=lambda job, growth: (
            job if job.noise_scale is None else replace(job, noise_scale=job.noise_scale / growth)
        ),
    ),
    Variant(
        name="ours-by-throughput",
        words="throughput instead of goodput",
        see=lambda job, _: job if job.noise_scale is None else replace(job, noise_scale=EVERY_SAMPLE_COUNTS),
    ),
)

VARIANTS: Mapping[str, Callable[[Snapshot], Decision]] = {each.name: each.decide for each in ABLATION}

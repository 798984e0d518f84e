"""What a job held and when, recomputed from its workers' events; the driver's events add the reasons."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from pollux.policy.reasons import in_gpus
from pollux.verify.record import JobRecord, WorkerLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One incarnation. ``placement`` counts the slots that its workers name; ``decision`` is what the
    driver says it acted on, None where the driver does not know of this incarnation."""

    incarnation: int
    placement: Mapping[str, int]
    start_unix_s: float
    end_unix_s: float
    decision: int | None

    @property
    def gpus(self) -> int:
        return sum(self.placement.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The workers were started on another placement than before; the job never held nothing in between."""

    job_id: str
    name: str
    t_unix_s: float
    before: Mapping[str, int]
    after: Mapping[str, int]
    decision_before: int | None
    decision: int | None

    @property
    def gpus_before(self) -> int:
        return sum(self.before.values())

    @property
    def gpus_after(self) -> int:
        return sum(self.after.values())

    @property
    def is_resize(self) -> bool:
        """The number of GPUs changed; otherwise the job only moved."""
        return self.gpus_before != self.gpus_after

    def __str__(self) -> str:
        return f"{self.name} {self.gpus_before} -> {in_gpus(self.gpus_after)} (decision {self.decision})"


def spans(job: JobRecord) -> tuple[Span, ...]:
    """The job's incarnations in order.

    A gang that was stopped before its first step may lack events of some ranks; then the driver's word
    for its placement is taken, if it agrees with the ranks that did write.
    """
    started = {event.incarnation: event for event in job.driver if event.event == "start"}
    found = []
    for incarnation, ranks in job.incarnations().items():
        placement: Mapping[str, int] = Counter(
            node for node, _ in {(rank.node, slot) for rank in ranks for slot in rank.slots}
        )
        start = started.get(incarnation)
        if start and not _trained(ranks) and Counter(placement) <= Counter(start.placement):
            placement = start.placement
        found.append(
            Span(
                incarnation=incarnation,
                placement=placement,
                start_unix_s=min(rank.start_unix_s for rank in ranks),
                end_unix_s=max(rank.end_unix_s for rank in ranks),
                decision=start.decision if start else None,
            )
        )
    return tuple(found)


def changes(job: JobRecord) -> tuple[Change, ...]:
    """Changes between two allocations that are not empty."""
    incarnations = spans(job)
    return tuple(
        Change(
            job_id=job.job.job_id,
            name=job.name,
            t_unix_s=after.start_unix_s,
            before=before.placement,
            after=after.placement,
            decision_before=before.decision,
            decision=after.decision,
        )
        for before, after in pairwise(incarnations)
        if before.placement != after.placement and not _emptied(job, before, after)
    )


def levels(job: JobRecord) -> tuple[tuple[float, int], ...]:
    """(t_unix_s, GPUs) whenever the number of GPUs changed, from 0 at submission to 0 at the end.

    The short gap of a restart is no change: the job's allocation goes on.
    """
    incarnations = spans(job)
    points = [(job.job.submitted_unix_s, 0)]
    for i, span in enumerate(incarnations):
        points.append((span.start_unix_s, span.gpus))
        if i + 1 == len(incarnations) or _emptied(job, span, incarnations[i + 1]):
            points.append((span.end_unix_s, 0))
    return tuple(point for i, point in enumerate(points) if i == 0 or point[1] != points[i - 1][1])


def restart_seconds(job: JobRecord) -> float:
    """Seconds from each stop to the first new step, over all restarts.

    A restart counts from the driver's signal, or from the last event of workers that died without one.
    Time in which the job was given nothing is waiting and does not count.
    """
    total = 0.0
    incarnations = spans(job)
    signals = {event.incarnation: event.t_unix_s for event in job.driver if event.event == "signal"}
    ranks_of = job.incarnations()
    for before, after in pairwise(incarnations):
        steps = [
            event.t_unix_s
            for rank in ranks_of[after.incarnation]
            for event in rank.events
            if event.event == "step"
        ]
        first = min(steps, default=after.end_unix_s)
        stopped = signals.get(before.incarnation, before.end_unix_s)
        total += max(0.0, first - stopped - _waited(job, before, after))
    return total


def _trained(ranks: tuple[WorkerLog, ...]) -> bool:
    return any(event.event == "step" for rank in ranks for event in rank.events)


def _emptied(job: JobRecord, before: Span, after: Span) -> bool:
    """Whether the job was given nothing, or had failed, between two incarnations."""
    return any(
        event.event == "end" or (event.event == "allocate" and not event.placement)
        for event in job.driver
        if before.start_unix_s < event.t_unix_s <= after.start_unix_s
    )


def _waited(job: JobRecord, before: Span, after: Span) -> float:
    """Seconds without an allocation between two incarnations, counted from the end of the first."""
    if not _emptied(job, before, after):
        return 0.0
    given = [
        event.t_unix_s
        for event in job.driver
        if event.event == "allocate" and event.placement and before.end_unix_s < event.t_unix_s
    ]
    return max(0.0, min(given, default=before.end_unix_s) - before.end_unix_s)

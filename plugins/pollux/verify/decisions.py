"""Rules over the saved decisions: each can be replayed, and what ran is what was decided."""

from collections.abc import Callable, Mapping

from pollux.errors import PolluxError
from pollux.snapshot import Decision, Snapshot
from pollux.verify.export import AirflowExport, DagRun
from pollux.verify.record import DecisionRecord, JobRecord
from pollux.verify.timeline import Change, spans
from pollux_agent.protocol import Placement, encode

Decide = Callable[[Snapshot], Decision]


def altered(decisions: Mapping[int, DecisionRecord], decide: Decide) -> tuple[str, ...]:
    """Decisions that the policy does not give again for their saved snapshot, byte for byte."""
    breaches = []
    for number, saved in decisions.items():
        try:
            again = decide(saved.snapshot)
        except (PolluxError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            breaches.append(f"decision {number}: the snapshot cannot be decided again: {error}")
            continue
        if encode(again) != encode(saved.decision):
            breaches.append(f"decision {number}: {_difference(saved.decision, again)}")
    return tuple(breaches)


def undecided(job: JobRecord, decisions: Mapping[int, DecisionRecord]) -> tuple[str, ...]:
    """Incarnations that ran where no decision put them, or elsewhere than their driver says."""
    said = {event.incarnation: event for event in job.driver if event.event == "start"}
    breaches = []
    for span in spans(job):
        where = f"{job.job.job_id}: incarnation {span.incarnation} on {_words(span.placement)}"
        start = said.get(span.incarnation)
        if start is None or span.decision is None:
            breaches.append(f"{where} was not started by the driver")
        elif dict(start.placement) != dict(span.placement):
            breaches.append(f"{where}, but the driver started {_words(start.placement)}")
        elif span.decision not in decisions:
            breaches.append(f"{where} names decision {span.decision}, which was not saved")
        elif (given := _given(decisions[span.decision], job.job.job_id)) != dict(span.placement):
            breaches.append(f"{where}, but decision {span.decision} gave {_words(given)}")
    return tuple(breaches)


def is_by_policy(change: Change, decisions: Mapping[int, DecisionRecord]) -> bool:
    """Whether the decision saw the job on the GPUs that it had, and gave it the placement after.

    A driver that is still restarting may skip an allocation; then the decision saw the skipped one.
    """
    if change.decision is None or change.decision not in decisions:
        return False
    saved = decisions[change.decision]
    seen = next((job for job in saved.snapshot.jobs if job.job_id == change.job_id), None)
    if seen is None or _given(saved, change.job_id) != dict(change.after):
        return False
    skipped = [
        _given(decisions[number], change.job_id)
        for number in decisions
        if change.decision_before is not None and change.decision_before < number < change.decision
    ]
    return seen.num_gpus in {change.gpus_before, *(sum(placement.values()) for placement in skipped)}


def outside_schedule(decisions: Mapping[int, DecisionRecord], export: AirflowExport) -> tuple[str, ...]:
    """Decisions, up to the export, that were not made inside a run of the scheduling DAG."""
    runs = [run for run in export.dag_runs if run.dag_id == export.schedule_dag_id]
    return tuple(
        f"decision {number}"
        for number, saved in decisions.items()
        if saved.snapshot.now_unix_s <= export.exported_unix_s
        and not any(_covers(run, saved.snapshot.now_unix_s) for run in runs)
    )


def _covers(run: DagRun, now_unix_s: float) -> bool:
    if run.start_date is None or now_unix_s < run.start_date.timestamp():
        return False
    return run.end_date is None or now_unix_s <= run.end_date.timestamp()


def _given(saved: DecisionRecord, job_id: str) -> dict[str, int]:
    job = saved.decision.jobs.get(job_id)
    return dict(job.placement) if job else {}


def _difference(saved: Decision, again: Decision) -> str:
    for job_id in sorted({*saved.jobs, *again.jobs}):
        before, after = saved.jobs.get(job_id), again.jobs.get(job_id)
        if before is None or after is None:
            return f"{job_id} is only in the {'replayed' if before is None else 'saved'} one"
        if before.placement != after.placement:
            return f"{job_id} got {_words(before.placement)}, replayed it gets {_words(after.placement)}"
        if before != after:
            return f"{job_id}'s reason or figures differ from the replayed ones"
    return "the same placements, but another objective or state"


def _words(placement: Placement) -> str:
    return ", ".join(f"{node}: {gpus}" for node, gpus in sorted(placement.items())) or "nothing"

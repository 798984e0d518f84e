"""Rules over the workers' events: no slot twice, and training goes on from the last checkpoint."""

from collections.abc import Iterator, Mapping, Sequence

from pollux.verify.record import JobRecord, RunRecord, WorkerLog

_CLOSE = 1e-6
"""Relative tolerance for progress, which is a float that went through JSON."""


def given_twice(record: RunRecord) -> tuple[str, ...]:
    """GPUs that two workers held at once: by their numbers or, on Kubernetes, where these are each job's own,
    within a job by number and over all jobs by count.
    """
    if record.expectations is None or record.expectations.cluster == "local":
        return double_bookings(record.jobs)
    within = [breach for job in record.jobs for breach in double_bookings([job])]
    return (*within, *overfull(record.jobs, _sizes(record)))


def overfull(jobs: Sequence[JobRecord], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Nodes whose workers held more slots at once than ``sizes`` gives them; at the first moment of each."""
    moments: dict[str, list[tuple[float, int, str]]] = {}
    for job in jobs:
        for worker in job.workers:
            moments.setdefault(worker.node, []).extend(
                (t, change * len(worker.slots), job.job.job_id)
                for t, change in ((worker.start_unix_s, 1), (worker.end_unix_s, -1))
            )
    breaches = []
    for node, changes in sorted(moments.items()):
        held, size = 0, sizes.get(node, 0)
        for _, change, job_id in sorted(changes):
            held += change
            if held > size:
                breaches.append(
                    f"{held} slots of {node} are held at once, {job_id} among them; it has {size}"
                )
                break
    return tuple(breaches)


def _sizes(record: RunRecord) -> Mapping[str, int]:
    """The most GPUs that each node had in any snapshot."""
    sizes: dict[str, int] = {}
    for saved in record.decisions.values():
        for node in saved.snapshot.nodes:
            sizes[node.name] = max(node.gpus, sizes.get(node.name, 0))
    return sizes


def double_bookings(jobs: Sequence[JobRecord]) -> tuple[str, ...]:
    """Slots that two workers occupied at the same time.

    A worker occupies its slots from its first event to its last one.
    """
    held: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for job in jobs:
        for worker in job.workers:
            who = f"{job.job.job_id} (incarnation {worker.incarnation}, rank {worker.rank})"
            for slot in worker.slots:
                interval = (worker.start_unix_s, worker.end_unix_s, who)
                held.setdefault((worker.node, slot), []).append(interval)
    breaches = []
    for (node, slot), intervals in sorted(held.items()):
        _, until, holder = min(intervals)
        for start, end, who in sorted(intervals)[1:]:
            if start < until:
                seconds = min(end, until) - start
                breaches.append(f"slot {slot} of {node}: {holder} and {who}, {seconds:.2f} s at once")
            if end > until:
                until, holder = end, who
    return tuple(breaches)


def lost_training(job: JobRecord) -> tuple[str, ...]:
    """Places where step or progress went back by more than to the last checkpoint."""
    breaches = [breach for worker in job.workers for breach in _falls(worker)]
    done: list[WorkerLog] = []
    for ranks in job.incarnations().values():
        if done:
            breaches += [breach for rank in ranks for breach in _bad_resume(rank, done)]
        done += ranks
    return tuple(f"{job.job.job_id}: {breach}" for breach in breaches)


def lost_events(job: JobRecord) -> tuple[str, ...]:
    """Ranks whose outcome tells of steps, or of the training's end, of which their events tell nothing."""
    written = {(log.incarnation, log.rank): log.events for log in job.workers}
    said = {(outcome.incarnation, outcome.rank): outcome for outcome in job.outcomes}
    marker = job.completion
    if marker is not None and marker.job_id == job.job.job_id:
        said.setdefault((marker.incarnation, marker.rank), marker)
    breaches = []
    for outcome in said.values():
        who = f"{job.job.job_id}: rank {outcome.rank} of incarnation {outcome.incarnation}"
        events = written.get((outcome.incarnation, outcome.rank), ())
        ends = {event.step for event in events if event.event == "done"}
        if outcome.kind == "done" and outcome.step not in ends:
            breaches.append(f"{who} was done at step {outcome.step}, which its events do not say")
        elif outcome.steps_taken and not any(event.event == "step" for event in events):
            breaches.append(f"{who} took {outcome.steps_taken} steps, and its events tell of none")
    return tuple(breaches)


def _falls(worker: WorkerLog) -> Iterator[str]:
    """Within one incarnation neither number ever falls, once the checkpoint is loaded."""
    step, progress = 0, 0.0
    for event in worker.events:
        if event.event != "resume" and (event.step < step or event.progress < progress * (1 - _CLOSE)):
            yield (
                f"incarnation {worker.incarnation}, rank {worker.rank}: step {step} (progress "
                f"{progress:.1f}) is followed by step {event.step} (progress {event.progress:.1f})"
            )
        step, progress = event.step, event.progress


def _bad_resume(rank: WorkerLog, done: Sequence[WorkerLog]) -> Iterator[str]:
    where = f"incarnation {rank.incarnation}, rank {rank.rank}"
    checkpoints = {
        event.step: event.progress for log in done for event in log.events if event.event == "checkpoint"
    }
    resume = next((event for event in rank.events if event.event == "resume"), None)
    if resume is None:
        worked = any(event.event in ("step", "done") for event in rank.events)
        if worked and checkpoints:
            yield f"{where}: trained without loading the checkpoint of step {max(checkpoints)}"
        return
    if resume.step not in checkpoints:
        yield f"{where}: resumed at step {resume.step}, where no checkpoint was written"
        return
    if resume.step < max(checkpoints):
        yield (
            f"{where}: resumed at step {resume.step}, before the last checkpoint (step {max(checkpoints)})"
        )
    saved = checkpoints[resume.step]
    if abs(resume.progress - saved) > _CLOSE * max(1.0, saved):
        yield f"{where}: resumed with progress {resume.progress:.1f}, but {saved:.1f} was saved"

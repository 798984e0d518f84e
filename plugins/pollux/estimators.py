"""Goodput estimators of one's own, for jobs that are no training or know better; Sia section 3.4.

A job's spec names one: an entry point of the group ``pollux.goodput_estimators``, or ``module:class`` where
the scheduler's settings list the module. It is asked before a decision, and its answers go into the snapshot,
so that policies stay pure and a saved snapshot replays without it. Nothing that it does is trusted: where it
raises, takes long, or says what is no goodput, the job counts as not fitted and its reason says why.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from queue import Empty, Queue
from threading import Thread
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pollux.snapshot import BUILT_IN_ESTIMATORS, MAX_GOODPUT, GoodputCurve, Job, Snapshot

GROUP = "pollux.goodput_estimators"

PATIENCE_S = 5.0
"""An estimator that answers no sooner is given up, for all jobs of this cycle that name it."""

SHARE = 0.25
"""Of the interval between decisions, so much time all estimators together may take."""

MOST_GPUS = 1024
"""Up to so many GPUs of one job an estimator is asked."""

Counts = NDArray[np.int64]
Curves = Mapping[str, GoodputCurve]


class GoodputEstimator(Protocol):
    """What an estimator's class has to have; it is made without arguments, anew for each job and cycle."""

    def goodput(self, job: Job, gpu_type: str, num_nodes: Counts, num_replicas: Counts) -> ArrayLike:
        """Useful work a second of ``num_replicas[i]`` replicas on ``num_nodes[i]`` nodes; 0 where it is none.

        In any unit: a job is only compared with itself. A replica is a GPU, but for hybrid-parallel jobs.
        """
        ...


class _NoEstimate(Exception):
    """Why there is none, in words for the job's owner."""


@dataclass(frozen=True, slots=True)
class _Question:
    """The placements that a job could have on one type: the first ``alone`` on a node, the others on more."""

    gpu_type: str
    alone: int
    nodes: Counts
    replicas: Counts


def with_estimates(snapshot: Snapshot, modules: Sequence[str]) -> Snapshot:
    """The snapshot with the answers of the jobs' own estimators, or a remark on why a job has none.

    ``modules`` are those whose classes may be named by a dotted name.
    """
    if all(job.estimator in BUILT_IN_ESTIMATORS for job in snapshot.jobs):
        return snapshot
    hung: set[str] = set()
    until_s = time.monotonic() + max(SHARE * snapshot.interval_s, PATIENCE_S)
    return replace(
        snapshot, jobs=tuple(_estimated(job, snapshot, modules, hung, until_s) for job in snapshot.jobs)
    )


def _estimated(job: Job, snapshot: Snapshot, modules: Sequence[str], hung: set[str], until_s: float) -> Job:
    if job.estimator in BUILT_IN_ESTIMATORS:
        return job
    patience_s = min(PATIENCE_S, until_s - time.monotonic())
    try:
        if job.estimator in hung:
            raise _NoEstimate(f"took longer than {PATIENCE_S:g} s for another job")
        if patience_s <= 0:
            raise _NoEstimate("was not asked: those of other jobs took a quarter of the cycle")
        return replace(job, estimates=_in_time(job, snapshot, modules, patience_s))
    except TimeoutError:
        hung.add(job.estimator)
        why = f"took longer than {patience_s:.3g} s"
    except _NoEstimate as error:
        why = str(error)
    return replace(job, remarks=(*job.remarks, f"not fitted yet: its estimator {job.estimator!r} {why}"))


def _in_time(job: Job, snapshot: Snapshot, modules: Sequence[str], patience_s: float) -> Curves:
    """The answers, from a thread that is left behind where it takes too long; raises TimeoutError."""
    answers: Queue[Curves | _NoEstimate] = Queue()

    def run() -> None:
        try:
            answers.put(_ask(job, snapshot, modules))
        except _NoEstimate as error:
            answers.put(error)
        except BaseException as error:  # noqa: BLE001 - a user's code: nothing that it raises ends a cycle
            answers.put(_NoEstimate(f"raised {_short(error)}"))

    Thread(target=run, daemon=True, name="goodput-estimator").start()
    try:
        answer = answers.get(timeout=patience_s)
    except Empty:
        raise TimeoutError from None
    if isinstance(answer, _NoEstimate):
        raise answer
    return answer


def _ask(job: Job, snapshot: Snapshot, modules: Sequence[str]) -> Curves:
    estimator = _made(_class_of(job.estimator, modules))
    curves = {}
    for question in _questions(job, snapshot):
        answer = estimator.goodput(job, question.gpu_type, question.nodes, question.replicas)
        values = np.array(answer, dtype=np.float64)
        if values.shape != question.replicas.shape:
            raise _NoEstimate(f"answered shape {values.shape} to a question of {question.replicas.shape}")
        wrong = ~((values >= 0) & (values <= MAX_GOODPUT))
        if np.any(wrong):
            first = int(np.argmax(wrong))
            raise _NoEstimate(
                f"says {values[first]:g} for {question.replicas[first]} replicas on {question.nodes[first]} "
                f"nodes of type {question.gpu_type}, which is no goodput"
            )
        plain = tuple(values.tolist())
        curves[question.gpu_type] = GoodputCurve(
            one_node=plain[: question.alone], several_nodes=plain[question.alone :]
        )
    return curves


def _questions(job: Job, snapshot: Snapshot) -> list[_Question]:
    widths: dict[str, list[int]] = {}
    for node in snapshot.nodes:
        if node.gpus and (not job.gpu_types or node.gpu_type in job.gpu_types):
            widths.setdefault(node.gpu_type, []).append(node.gpus)
    found = []
    for kind, sizes in sorted(widths.items()):
        unit = job.gpus_per_replica_of.get(kind, job.gpus_per_replica)
        unit = unit if job.kind == "hybrid_parallel" else 1
        widest, most = max(sizes), min(job.max_gpus, sum(sizes), MOST_GPUS) // unit
        alone = np.arange(1, min(widest // unit, most) + 1)
        across = np.arange(2, (most if len(sizes) > 1 else 0) + 1)
        nodes = np.concatenate([np.ones_like(alone), np.maximum(-(-across * unit // widest), 2)])
        found.append(_Question(kind, len(alone), nodes, np.concatenate([alone, across])))
    return found


def _class_of(name: str, modules: Sequence[str]) -> object:
    module, _, attribute = name.partition(":")
    if attribute and module not in modules:
        raise _NoEstimate(f"is in module {module}, which POLLUX_ESTIMATORS does not list")
    if attribute:
        return getattr(import_module(module), attribute)
    for known in entry_points(group=GROUP, name=name):
        return known.load()
    raise _NoEstimate(f"is no entry point of {GROUP} here; install the package that has it")


def _made(found: object) -> GoodputEstimator:
    """Only a class that has the method is called: a name could be that of anything."""
    if not isinstance(found, type) or not callable(getattr(found, "goodput", None)):
        raise _NoEstimate("is no class with a method goodput")
    made: GoodputEstimator = found()
    return made


def _short(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else text[:197] + "..."

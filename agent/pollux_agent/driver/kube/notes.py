"""What a driver pod's annotations and labels say: read and judged here, for driver, operator and scheduler.

Anyone with the right to patch pods can write anything there. Each reader takes the annotations and either
gives a document that is sound by itself, or raises DocumentError that names the annotation.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeVar, get_args

from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.state import DriverState, StopReason
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobIdentity, JobSpec, decode, read_decision

Json = Mapping[str, Any]
Notes = Mapping[str, str]
T = TypeVar("T")

_STOPS: Mapping[str, StopReason] = {reason: reason for reason in get_args(StopReason)}
_RUN_ID = re.compile(r"([A-Za-z0-9][\w-]{0,255})?", re.ASCII)
"""What MLflow takes for a run's id, or nothing."""

_MOST_STARTS = 2**31
"""One a second for 68 years; a driver that believed more would have no numbers left."""


def identity_of(notes: Notes) -> JobIdentity:
    return _document(JobIdentity, notes, doc.IDENTITY)


def spec_of(notes: Notes) -> JobSpec:
    return _document(JobSpec, notes, doc.SPEC)


def settings_of(notes: Notes) -> doc.KubeDriverSettings:
    return _document(doc.KubeDriverSettings, notes, doc.SETTINGS)


def allocation_of(notes: Notes) -> Allocation:
    """The two annotations of a decision, which are written together, agree on its number."""
    allocation = _document(Allocation, notes, doc.ALLOCATION)
    text = _text(notes, doc.DECISION)
    if read_decision(text) != allocation.decision:
        raise _wrong(doc.DECISION, f"{text[:40]!r} is not {allocation.decision}, as in {doc.ALLOCATION}")
    return allocation


def state_of(notes: Notes) -> DriverState:
    """That of a job that waits, before its driver has told any."""
    state = _document(DriverState, notes, doc.STATE) if notes.get(doc.STATE) else DriverState()
    if state.incarnation > _MOST_STARTS:
        raise _wrong(doc.STATE, f"no job was started {state.incarnation} times")
    return state


def stop_of(notes: Notes) -> StopReason | None:
    text = notes.get(doc.STOP, "")
    if text and text not in _STOPS:
        raise _wrong(doc.STOP, f"{text[:40]!r} is none of {', '.join(_STOPS)}")
    return _STOPS.get(text)


def run_of(notes: Notes) -> str:
    """The id of the job's MLflow run, empty if it has none yet."""
    text = notes.get(doc.RUN, "")
    if not _RUN_ID.fullmatch(text):
        raise _wrong(doc.RUN, f"{text[:40]!r} is no id of an MLflow run")
    return text


def try_of(notes: Notes) -> int:
    number = read_decision(_text(notes, doc.TRY))
    if number is None:
        raise _wrong(doc.TRY, f"{notes[doc.TRY][:40]!r} is no number")
    return number


def submitted_of(notes: Notes) -> float:
    """Unix seconds."""
    text = _text(notes, doc.SUBMITTED)
    try:
        submitted_unix_s = float(text)
    except ValueError:
        submitted_unix_s = math.nan
    if not 0 <= submitted_unix_s < datetime.max.timestamp():
        raise _wrong(doc.SUBMITTED, f"{text[:40]!r} is no time in Unix seconds")
    return submitted_unix_s


def lost_of(notes: Notes) -> frozenset[str]:
    """The nodes that the scheduler found lost."""
    found = _json(notes, doc.LOST) if notes.get(doc.LOST) else []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise _wrong(doc.LOST, "no list of names")
    return frozenset(found)


def template_of(notes: Notes) -> dict[str, Any]:
    """The user's pod, from which workers are made; whether one can be is found out by making one."""
    found = _json(notes, doc.WORKER)
    if not isinstance(found, dict):
        raise _wrong(doc.WORKER, "no pod")
    return found


READERS: Mapping[str, Callable[[Notes], object]] = {
    doc.IDENTITY: identity_of,
    doc.SPEC: spec_of,
    doc.SETTINGS: settings_of,
    doc.DECISION: allocation_of,
    doc.ALLOCATION: allocation_of,
    doc.STATE: state_of,
    doc.STOP: stop_of,
    doc.RUN: run_of,
    doc.TRY: try_of,
    doc.SUBMITTED: submitted_of,
    doc.LOST: lost_of,
    doc.WORKER: template_of,
}
"""Every annotation of ours that can be wrong, and who reads it."""


def or_else(reader: Callable[[Notes], T], notes: Notes, instead: T) -> T:
    """What the reader finds, or ``instead`` where that is nothing sound."""
    try:
        return reader(notes)
    except DocumentError:
        return instead


def fault_of(notes: Notes, name: str) -> str:
    """What is wrong with an annotation, empty if nothing is."""
    try:
        READERS[name](notes)
    except DocumentError as error:
        return str(error)
    return ""


def driver_labels(job_id: str, deployment: str) -> dict[str, str]:
    """By which all find a job's driver pod."""
    return {doc.ROLE: doc.DRIVER_ROLE, doc.JOB: job_id, doc.DEPLOYMENT: deployment}


def is_driver(pod: Json) -> bool:
    """Whether it is labelled as a job's driver. Such a pod has the job's name; one with another is none."""
    found = doc.labels(pod)
    return found.get(doc.ROLE) == doc.DRIVER_ROLE and found.get(doc.JOB) == pod["metadata"]["name"]


def _text(notes: Notes, name: str) -> str:
    if name not in notes:
        raise _wrong(name, "missing")
    return notes[name]


def _document(kind: type[T], notes: Notes, name: str) -> T:
    text = _text(notes, name)
    try:
        return decode(kind, text)
    except DocumentError as error:
        raise _wrong(name, str(error)) from None


def _json(notes: Notes, name: str) -> object:
    try:
        found: object = json.loads(_text(notes, name))
    except (ValueError, RecursionError):
        raise _wrong(name, "no JSON") from None
    return found


def _wrong(name: str, what: str) -> DocumentError:
    return DocumentError(f"annotation {name}: {what}")

"""Events: what each rank did and when, one JSON line each, for anyone who wants to check a run afterwards."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol.codec import DOCUMENT_CONFIG

EventName = Literal["start", "step", "checkpoint", "resume", "stop", "done"]
DriverEventName = Literal["submit", "allocate", "start", "signal", "exit", "end"]

NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Event:
    """Something one rank did. ``step``, ``progress`` and ``batch_size`` are the job's after it.

    start: the worker process began; resume: a checkpoint was loaded; step: an optimizer step (the first
    of an incarnation, then at most one a second); checkpoint: one was written; stop: ended on request;
    done: the training is complete. ``slots`` are the slot numbers on ``node`` that this rank occupies.
    """

    t_unix_s: float
    event: EventName
    node: str
    slots: tuple[NonNegativeInt, ...]
    step: NonNegativeInt
    progress: Annotated[float, Field(ge=0)]
    batch_size: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class DriverEvent:
    """Something a job's driver did.

    submit: the job arrived; allocate: an allocation with number ``decision`` was accepted; start: the
    workers of ``incarnation`` were started on ``placement``; signal: they were asked to stop; exit: all
    of them are gone; end: the job is over (``message`` says how).
    """

    t_unix_s: float
    event: DriverEventName
    incarnation: NonNegativeInt
    decision: NonNegativeInt
    placement: dict[str, int] = Field(default_factory=dict)
    message: str = ""

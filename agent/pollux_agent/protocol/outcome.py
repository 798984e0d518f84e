"""The outcome: how one rank of one incarnation ended, written to a file by the rank itself.

A worker's exit code does not survive torch's launcher, so nothing is read from it.
"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol.codec import DOCUMENT_CONFIG

OutcomeKind = Literal["done", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Outcome:
    """How one rank ended.

    done: the last epoch is finished and the completion marker is written. interrupted: stopped on
    request, to be resumed from its checkpoint. failed: the script raised; ``error`` is the exception in
    one line and ``traceback`` the whole text. Where no checkpoint could be written at the end, ``error`` says
    why, and which one stands. ``step`` counts optimizer steps over the whole job, and
    ``steps_taken`` those of this incarnation (0: it raised before its first step).
    """

    schema: Literal[1] = 1
    kind: OutcomeKind
    job_id: str
    incarnation: Annotated[int, Field(ge=0, strict=True)]
    rank: Annotated[int, Field(ge=0, strict=True)]
    time_unix_s: float
    step: Annotated[int, Field(ge=0, strict=True)] = 0
    steps_taken: Annotated[int, Field(ge=0, strict=True)] = 0
    progress: Annotated[float, Field(ge=0)] = 0.0
    error: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Unsaved:
    """Why checkpoints cannot be written, and which one stands, for as long as that is so."""

    schema: Literal[1] = 1
    incarnation: Annotated[int, Field(ge=0, strict=True)]
    time_unix_s: float
    message: str

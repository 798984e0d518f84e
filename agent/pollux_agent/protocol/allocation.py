"""The allocation: where a job's replicas run, as one scheduling decision set it."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol.codec import DOCUMENT_CONFIG

Placement = Mapping[str, Annotated[int, Field(ge=1, le=2**16, strict=True)]]
"""GPUs per node name; nodes without a GPU are left out, and the empty mapping holds none."""

MAX_DECISION = 2**53
"""Every JSON reader keeps whole numbers up to here."""

DecisionNumber = Annotated[int, Field(ge=0, le=MAX_DECISION, strict=True)]

_PLAIN_NUMBER = re.compile("0|[1-9][0-9]{0,15}")


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Allocation:
    """The GPUs that one decision gives to one job.

    ``decision`` is the number of that decision; a driver ignores a number below the one it acted on last.
    """

    schema: Literal[1] = 1
    decision: DecisionNumber
    placement: Placement = Field(default_factory=dict)
    gpu_type: str = ""
    reason: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs over all nodes."""
        return sum(self.placement.values())


def read_decision(text: str) -> int | None:
    """The number of a decision that ``text`` is, in plain digits; None if it is none."""
    number = int(text) if _PLAIN_NUMBER.fullmatch(text) else MAX_DECISION + 1
    return number if number <= MAX_DECISION else None

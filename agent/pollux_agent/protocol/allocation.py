"""The allocation: where a job's replicas run, as one scheduling decision set it."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol.codec import DOCUMENT_CONFIG

Placement = Mapping[str, Annotated[int, Field(ge=1, strict=True)]]
"""GPUs per node name; nodes without a GPU are left out, and the empty mapping holds none."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class Allocation:
    """The GPUs that one decision gives to one job.

    ``decision`` is the number of that decision; a driver ignores a number below the one it acted on last.
    """

    schema: Literal[1] = 1
    decision: Annotated[int, Field(ge=0, strict=True)]
    placement: Placement = Field(default_factory=dict)
    gpu_type: str = ""
    reason: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs over all nodes."""
        return sum(self.placement.values())

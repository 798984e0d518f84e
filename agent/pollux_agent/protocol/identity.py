"""Which task a job belongs to."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.protocol.codec import DOCUMENT_CONFIG

AirflowId = Annotated[str, Field(min_length=1, max_length=250)]
"""Airflow's own bound on the ids of DAGs, runs and tasks."""


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class JobIdentity:
    """Which task instance a job belongs to, whatever the try. ``map_index`` is -1 for an unmapped task."""

    deployment: str
    dag_id: AirflowId
    run_id: AirflowId
    task_id: AirflowId
    map_index: Annotated[int, Field(ge=-1, le=2**31 - 1, strict=True)] = -1

"""One real stack for all end-to-end tests of this folder: Airflow, MLflow and the local cluster."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pollux.airflow_api import AirflowApi
from pollux.stack.control import running_stack
from pollux.stack.record import StackPlan, StackRecord

INTERVAL_S = 5.0
REPORT_INTERVAL_S = 2.0
CHECKPOINT_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStack:
    """The stack that the tests share; ``api`` is logged in as its admin."""

    record: StackRecord
    api: AirflowApi

    @property
    def state(self) -> Path:
        return self.record.plan.state

    @property
    def airflow_url(self) -> str:
        return self.record.airflow_url

    @property
    def mlflow_url(self) -> str:
        return self.record.mlflow_url


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A ready stack that schedules every 5 s and whose jobs report and write checkpoints every 2 s."""
    plan = StackPlan(
        state=tmp_path_factory.mktemp("stack"),
        interval_s=INTERVAL_S,
        report_interval_s=REPORT_INTERVAL_S,
        checkpoint_interval_s=CHECKPOINT_INTERVAL_S,
        slot_cap=0.5,
    )
    with running_stack(plan) as record:
        with AirflowApi.from_login(record.airflow_url, record.login) as api:
            yield RunningStack(record=record, api=api)

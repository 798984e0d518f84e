"""What tests of the Airflow rim share: a cluster in memory, and an API server in this process."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus
from pollux.cluster.memory import MemoryCluster
from pollux.errors import ClusterUnavailable, Refused
from pollux.snapshot import Node
from pollux_agent.protocol import JobSpec, Outcome
from pollux_agent.protocol.outcome import OutcomeKind

if TYPE_CHECKING:
    from fastapi.testclient import TestClient


class EndingCluster(MemoryCluster):
    """``ends`` is what becomes of each submission; one that is not told goes on running."""

    def __init__(self) -> None:
        super().__init__((Node(name="node-0", gpus=2),))
        self.ends: list[JobStatus] = []
        self.submissions: list[dict[str, Any]] = []
        self.stops: list[str] = []
        self.refuses: str | None = None
        self.away = False
        self.before = self._check

    def _check(self, method: str) -> None:
        if self.away:
            raise ClusterUnavailable("no service listens on local.sock")

    def submit(
        self, job_id: str, *, identity: JobIdentity, spec: JobSpec, run_id: str | None, fresh: bool = False
    ) -> ClusterJob:
        if self.refuses:
            raise Refused(self.refuses)
        job = super().submit(job_id, identity=identity, spec=spec, run_id=run_id, fresh=fresh)
        self.submissions.append(
            {"job_id": job_id, "identity": identity, "spec": spec, "run_id": run_id, "fresh": fresh}
        )
        return job

    def stop(self, job_id: str, reason: Any) -> ClusterJob:
        self.stops.append(reason)
        return super().stop(job_id, reason)

    def job(self, job_id: str) -> ClusterJob:
        job = super().job(job_id)
        if self.ends and job.status.phase == "waiting" and job.status.stop is None:
            self.settle(job_id, self.ends.pop(0))
            job = super().job(job_id)
        return job

    def settle(self, job_id: str, status: JobStatus) -> None:
        self._jobs[job_id] = replace(self._jobs[job_id], status=status)


def ending(kind: OutcomeKind, *, final: bool = False, error: str = "", traceback: str = "") -> JobStatus:
    outcome = Outcome(
        kind=kind,
        job_id="j",
        incarnation=1,
        rank=0,
        time_unix_s=1.0,
        error=error,
        traceback=traceback,
        step=7,
    )
    return JobStatus(phase="done" if kind == "done" else "failed", outcome=outcome, final=final)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLLUX_STATE", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


@pytest.fixture
def cluster(state: Path, monkeypatch: pytest.MonkeyPatch) -> EndingCluster:
    """The operator and the trigger reach this cluster; all else of them is real."""
    cluster = EndingCluster()
    for module in ("pollux.operators.training", "pollux.triggers.training"):
        monkeypatch.setattr(f"{module}.connect", lambda config, kind=None: cluster)
    return cluster


@pytest.fixture
def context() -> Callable[..., dict[str, Any]]:
    """What Airflow hands to ``execute``: the first try of an unmapped task unless told otherwise."""

    def make(*, try_number: int = 1, map_index: int = -1, max_tries: int = 3, **conf: Any) -> dict[str, Any]:
        ti = SimpleNamespace(
            dag_id="dag",
            run_id="run-1",
            task_id="train",
            map_index=map_index,
            try_number=try_number,
            max_tries=max_tries,
        )
        return {"ti": ti, "dag_run": SimpleNamespace(conf=conf), "params": {}}

    return make


@pytest.fixture(scope="session")
def airflow_app(airflow_db: None) -> "Iterator[TestClient]":
    """Airflow's API server in this process, with its real log-in, the plugin included."""
    from airflow.api_fastapi.app import create_app, purge_cached_app
    from fastapi.testclient import TestClient

    purge_cached_app()
    yield TestClient(create_app(apps="core"), base_url="http://testserver", follow_redirects=False)
    purge_cached_app()


@pytest.fixture(scope="session")
def airflow_login() -> Path:
    """The log-in file of :func:`airflow_app`."""
    return Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"])

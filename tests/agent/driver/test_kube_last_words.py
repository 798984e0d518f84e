"""Why workers died before their script began: what their pods printed reaches the job's outcome."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import urllib3
from fake_kube import FakeKube

from pollux_agent.driver import Driver, DriverState, Start, Timing
from pollux_agent.driver.kube.api import KubeError, pod_path
from pollux_agent.driver.kube.documents import JOB, KubeDriverSettings
from pollux_agent.driver.kube.manifest import Gang
from pollux_agent.driver.kube.workers import KubeWorkers
from pollux_agent.protocol import Allocation, JobFolder

CAUSE = "pollux-agent launch: [Errno 2] No usable temporary directory found"
DRIVER = {"metadata": {"name": "job", "namespace": "team", "uid": "u-1", "labels": {JOB: "job"}}}


class Kubelet(FakeKube):
    """Pods fail as soon as they are started. Their output can be had once they ended, unless refused.

    ``mesh``: something puts a container of its own before theirs, which runs on.
    """

    def __init__(self, *, refuses: int = 0, message: str = "", mesh: bool = False) -> None:
        super().__init__()
        self.refuses, self.message, self.mesh = refuses, message, mesh

    def run_pods(self) -> None:
        for path, pod in self.objects.items():
            if "/pods/" in path and "status" not in pod:
                end = {"exitCode": 2, "reason": "Error", "message": self.message}
                statuses = [{"name": "base", "state": {"terminated": end}}]
                if self.mesh:
                    statuses.insert(0, {"name": "mesh", "state": {"running": {}}})
                phase = "Running" if self.mesh else "Failed"
                pod["status"] = {"phase": phase, "containerStatuses": statuses}

    def stream(self, path: str, *, read_s: float, **query: Any) -> urllib3.BaseHTTPResponse:
        pod = self.objects.get(path.removesuffix("/log"), {})
        if self.refuses:
            raise KubeError(f"GET {path}: refused", self.refuses)
        if self.mesh and query.get("container") != "base":
            raise KubeError(f"GET {path}: a container name must be specified", 400, "BadRequest")
        if "status" not in pod:
            raise KubeError(f"GET {path}: container base is waiting to start", 400, "BadRequest")
        printed = f"2026-01-01T00:00:00.000000001Z {CAUSE}\n".encode()
        return urllib3.HTTPResponse(body=io.BytesIO(printed), preload_content=False)

    # the cache of pods, which is up to date

    def pods(self) -> Mapping[str, Mapping[str, Any]]:
        return {path.rpartition("/")[2]: pod for path, pod in self.objects.items() if "/pods/" in path}

    def is_gone(self, name: str, uid: str, created_s: float) -> bool:
        return pod_path("team", name) not in self.objects


def fail_to_start(kubelet: Kubelet, folder: JobFolder) -> DriverState:
    """Start a job whose workers end before their script begins, as often as a driver does."""

    def make_gang(start: Start) -> Gang:
        return Gang(
            job_id="job",
            driver=DRIVER,
            template={"spec": {"containers": [{"name": "base", "image": "i"}]}},
            start=start,
            settings=KubeDriverSettings(),
            gpu_type="gpu",
            env={},
            mlflow_run_id="",
        )

    workers = KubeWorkers(
        job_id="job",
        namespace="team",
        driver_uid="u-1",
        api=kubelet,
        cache=kubelet,  # type: ignore[arg-type]
        folder=folder,
        make_gang=make_gang,
    )
    timing = Timing(max_fruitless_starts=2)
    driver = Driver(
        folder=folder, workers=workers, state=DriverState(), save=lambda state: None, timing=timing
    )
    allocation = Allocation(decision=1, placement={"node-0": 1})
    for second in range(0, 100, 20):
        driver.tick(now_unix_s=1_700_000_000.0 + second, allocation=allocation, stop=None)
        kubelet.run_pods()
        workers.tend()
    return driver.state


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path)


@pytest.mark.parametrize(
    "kubelet",
    [
        pytest.param(Kubelet(), id="its output comes a moment later"),
        pytest.param(Kubelet(mesh=True), id="another container runs on"),
        pytest.param(Kubelet(refuses=404, message=CAUSE), id="its output is gone, its last words are kept"),
        pytest.param(Kubelet(refuses=500, message=CAUSE), id="its node does not answer"),
    ],
)
def test_the_cause_is_in_the_outcome(kubelet: Kubelet, folder: JobFolder) -> None:
    state = fail_to_start(kubelet, folder)
    assert (state.phase, state.final, state.incarnation) == ("failed", True, 2)
    assert state.outcome is not None
    assert CAUSE in state.outcome.traceback
    assert CAUSE in (state.outcome.error or "")


def test_workers_that_leave_no_word_are_not_said_to(folder: JobFolder) -> None:
    state = fail_to_start(Kubelet(refuses=404), folder)
    assert state.outcome is not None
    assert not state.outcome.traceback
    assert "printed nothing" in (state.outcome.error or "")

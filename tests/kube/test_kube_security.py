"""What user code may not do, tried by a training on a real node."""

import json
from pathlib import Path
from urllib.parse import urlparse

import pytest
from kube_jobs import SteadyJob
from kube_nodes import TestKube, awaited
from open_image import USER, guarded_pod, image

from pollux.cluster.k8s import KubeCluster
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import pod_path

pytestmark = [pytest.mark.needs("kube"), pytest.mark.timeout(600)]

__all__ = ["image"]

PRYING = Path(__file__).with_name("prying_training.py")
MADE = "made-by-a-shell"
GIVEN = "$(touch {0}) `touch {0}`; touch {0} & touch {0} | $HOME ${{HOME}} $(HOME) $$(HOME) $$ %s '\" \\ *"
"""Makes a file wherever a shell sees it, and changes where the kubelet does."""


def test_a_training_without_root_trains_and_comes_at_nothing_that_is_not_its_own(
    kube: TestKube, image: str, tmp_path: Path
) -> None:
    space = kube.namespace("pollux-test-security")
    (jobs := tmp_path / "jobs").mkdir()
    jobs.chmod(0o777)
    cluster = KubeCluster(kube.api, kube.settings(space, jobs), namespace=space, user_pod=guarded_pod)
    other = SteadyJob(cluster, space)
    (secret := awaited(lambda: jobs / other.id, Path.is_dir, 60) / "secret").touch()
    server = urlparse(kube.api.client.configuration.host)
    address = f"https://{server.hostname}:{server.port}"
    wanted = {
        "urls": [
            ("GET", f"{address}{pod_path(space)}"),
            ("GET", f"{address}{pod_path(space, other.id)}"),
            ("GET", f"{address}{pod_path(space, other.id, 'log')}"),
            ("PATCH", f"{address}{pod_path(space, other.id)}"),
            ("DELETE", f"{address}{pod_path(space, other.id)}"),
            ("GET", f"{address}/api/v1/namespaces/{space}/secrets"),
        ],
        "folders": [str(secret), f"{doc.JOB_DIR}/../{other.id}", f"{doc.JOB_DIR}/{other.id}"],
        "files": ["/written", "/usr/written", "/etc/passwd", f"{doc.JOB_DIR}/../written", "/tmp/written"],
    }
    given = GIVEN.format(f"{doc.JOB_DIR}/{MADE}")
    job = SteadyJob(
        cluster,
        space,
        script=str(PRYING),
        arguments=["--steps", "5", given],
        env={"PRY": json.dumps(wanted), "GIVEN": given},
    )
    try:
        job.give({"node-0": 1})
        done = awaited(lambda: job.now.status, lambda status: status.phase in ("done", "failed"), 120)
        assert done.phase == "done", done
        pried = json.loads((jobs / job.id / "pried.json").read_text())
        assert pried["user"] == USER
        assert (pried["argument"], pried["variable"]) == (given, given)
        assert not (jobs / job.id / MADE).exists()
        assert set(pried["statuses"]) <= {401, 403}, pried["statuses"]
        assert (pried["secrets"], pried["folders"]) == ([], [])
        assert pried["written"] == ["/tmp/written"], "the one place where it may"
        assert {path.stat().st_uid for path in (jobs / job.id).iterdir()} == {USER}
        assert "pried" not in doc.labels(kube.api.get(pod_path(space, other.id)))
    finally:
        job.ask_to_end()
        other.ask_to_end()
        job.end()
        other.end()

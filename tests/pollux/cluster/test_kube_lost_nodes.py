"""A driver hears that a node of its workers is lost, also where no decision changes what it has."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from fake_kube import NOW_UNIX_S, FakeKube

from pollux.cluster.base import JobIdentity
from pollux.cluster.k8s import KubeCluster
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.settings import KubeSettings
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import Allocation, JobSpec, encode

SETTINGS = KubeSettings(
    namespaces=("team",), jobs_volume={"persistentVolumeClaim": {"claimName": "jobs"}}, lost_after_s=30.0
)
JOB = "job-1"


def stamp(ago_s: float) -> str:
    return datetime.fromtimestamp(NOW_UNIX_S - ago_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def node(name: str, *, silent_s: float | None = None) -> dict[str, Any]:
    ready = {
        "type": "Ready",
        "status": "True" if silent_s is None else "Unknown",
        "lastTransitionTime": stamp(silent_s or 0.0),
    }
    status = {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [ready]}
    return {"metadata": {"name": name, "creationTimestamp": stamp(9000)}, "spec": {}, "status": status}


def driver() -> dict[str, Any]:
    """Of a job that was moved to node-1 when node-0 had just fallen silent."""
    notes = first_notes(
        identity=JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t"),
        spec=JobSpec(name="j", script="s.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=4),
        run_id="run",
        submitted_unix_s=NOW_UNIX_S - 600,
        decision=1,
        try_number=1,
        fresh=False,
        state=DriverState(phase="stopping", incarnation=1, acted_decision=1, placement={"node-0": 1}),
        settings=SETTINGS,
        mlflow_tracking_uri="",
    )
    notes[doc.ALLOCATION] = encode(Allocation(decision=1, placement={"node-1": 1}))
    user = {"spec": {"containers": [{"name": "base", "image": "train:1"}]}}
    pod = driver_pod(user, job_id=JOB, namespace="team", notes=notes, deployment="airflow", settings=SETTINGS)
    pod["metadata"] |= {"uid": "driver", "resourceVersion": "1", "creationTimestamp": stamp(600)}
    pod["status"] = {"phase": "Running"}
    return pod


def worker() -> dict[str, Any]:
    labels = {doc.ROLE: doc.WORKER_ROLE, doc.JOB: JOB}
    meta = {"name": f"{JOB}-1-0", "namespace": "team", "uid": "w", "labels": labels}
    container = {"name": "base", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    spec = {"nodeName": "node-0", "containers": [container]}
    return {"metadata": meta, "spec": spec, "status": {"phase": "Running"}}


def told_after_a_cycle(silent_s: float | None) -> list[str]:
    api = FakeKube(
        ("/api/v1/nodes", node("node-0", silent_s=silent_s)),
        ("/api/v1/nodes", node("node-1")),
        ("/api/v1/pods", driver()),
        ("/api/v1/pods", worker()),
    )
    cluster = KubeCluster(api, SETTINGS, namespace="team")
    with cluster.lease("cycle", timedelta(minutes=1)):
        cluster.next_decision()
    pod = api.objects[f"/api/v1/namespaces/team/pods/{JOB}"]
    lost: list[str] = json.loads(pod["metadata"]["annotations"][doc.LOST])
    return lost


def test_a_driver_hears_of_a_node_once_it_is_lost_whatever_was_decided_before() -> None:
    assert told_after_a_cycle(silent_s=5.0) == [], "it may come back yet"
    assert told_after_a_cycle(silent_s=45.0) == ["node-0"]
    assert told_after_a_cycle(silent_s=None) == []

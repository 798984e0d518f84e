"""Worker pods and what becomes of a gang that cannot start: the pure parts of the driver on Kubernetes."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from pollux_agent.driver import Start
from pollux_agent.driver.kube.documents import (
    INCARNATION,
    JOB,
    NODE,
    ROLE,
    KubeDriverSettings,
    node_and_resource,
    node_key,
)
from pollux_agent.driver.kube.manifest import RENDEZVOUS_PORT, Gang, worker_pod
from pollux_agent.driver.kube.narrow import EMPTY_PAUSE_S, FIRST_PAUSE_S, Narrowed, narrow
from pollux_agent.driver.kube.trouble import end_note, is_starting, makes_room, pod_trouble
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobSpec
from pollux_agent.settings import worker_settings

RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-1g.5gb")
DRIVER = {"metadata": {"name": "job", "namespace": "team", "uid": "u-1", "labels": {}}}
TEXT = "$(POLLUX_POD_IP) $x $$(POLLUX_POD_IP) pa$$word $"
SPEC = JobSpec(name="j", script="s.py", initial_batch_size=8, max_local_batch_size=8, min_gpus=2, max_gpus=8)


def gang(template: dict[str, Any] | None = None, **fields: Any) -> Gang:
    plain: dict[str, Any] = {
        "job_id": "job",
        "driver": DRIVER,
        "template": template or {"spec": {"containers": [{"name": "base", "image": "i"}]}},
        "start": Start(incarnation=3, placement={"a": 2, "b": 1}, signal_unix_s=None),
        "settings": KubeDriverSettings(gpu_resources=RESOURCES, mlflow_tracking_uri="http://m"),
        "gpu_type": "A100",
        "env": {"TEXT": TEXT},
        "mlflow_run_id": "run",
    }
    return Gang(**plain | fields)


def literal(pod: dict[str, Any]) -> dict[str, str]:
    """The container's variables as the kubelet gives them, those of fields left out.

    ``$(NAME)`` is an earlier one's value, ``$$`` a dollar (Kubernetes: dependent environment variables).
    """
    known = {"POLLUX_POD_IP": "10.0.0.7"}
    for item in pod["spec"]["containers"][0]["env"]:
        if "value" in item:
            known[item["name"]] = re.sub(
                r"\$(\$|\((\w+)\))",
                lambda found: "$" if found[1] == "$" else known.get(found[2], found[0]),
                item["value"],
            )
    return known


def test_a_workers_environment_is_what_the_agent_reads() -> None:
    settings = worker_settings(literal(worker_pod(gang(), 1, "10.0.0.7")))
    assert settings is not None
    assert (settings.node, settings.node_rank, settings.slots) == ("b", 1, (0,))
    assert (settings.incarnation, settings.placement) == (3, {"a": 2, "b": 1})
    assert settings.rendezvous == f"10.0.0.7:{RENDEZVOUS_PORT}"
    assert (settings.mlflow_run_id, settings.gpu_type) == ("run", "A100")
    first = worker_settings(literal(worker_pod(gang(), 0, "")))
    assert first is not None
    assert first.rendezvous == f"10.0.0.7:{RENDEZVOUS_PORT}"


def test_users_texts_are_not_expanded() -> None:
    assert literal(worker_pod(gang(), 0, ""))["TEXT"] == TEXT


def test_credentials_of_the_users_pod_reach_the_worker() -> None:
    """Of MLflow's variables the address and the run alone are ours."""
    secret = {"secretKeyRef": {"name": "mlflow", "key": "password"}}
    given = [
        {"name": "MLFLOW_TRACKING_URI", "value": "http://other"},
        {"name": "MLFLOW_TRACKING_PASSWORD", "valueFrom": secret},
        {"name": "MLFLOW_TRACKING_SERVER_CERT_PATH", "value": "/tls/ca.pem"},
    ]
    base = {"name": "base", "env": given, "envFrom": [{"secretRef": {"name": "more"}}]}
    (container,) = worker_pod(gang({"spec": {"containers": [base]}}), 0, "")["spec"]["containers"]
    assert [item for item in container["env"] if item["name"].startswith("MLFLOW_")] == [
        *given[1:],
        {"name": "MLFLOW_TRACKING_URI", "value": "http://m"},
        {"name": "MLFLOW_RUN_ID", "value": "run"},
    ]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]


def test_a_worker_is_owned_labelled_and_bound_by_affinity_alone() -> None:
    pod = worker_pod(gang({"spec": {"nodeName": "c", "containers": [{"name": "base"}]}}), 0, "")
    meta, spec = pod["metadata"], pod["spec"]
    assert meta["name"] == "job-3-0"
    assert (meta["ownerReferences"][0]["uid"], meta["ownerReferences"][0]["controller"]) == ("u-1", True)
    assert (meta["labels"][ROLE], meta["labels"][JOB], meta["labels"][INCARNATION]) == ("worker", "job", "3")
    assert meta["annotations"][NODE] == "a"
    assert "nodeName" not in spec
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"] == [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}
    ]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert spec["automountServiceAccountToken"] is False


def test_the_users_own_node_terms_are_narrowed_not_replaced() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["z"]}]}
    affinity = {
        "podAffinity": {"x": 1},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]}},
    }
    pod = worker_pod(gang({"spec": {"containers": [{"name": "base"}], "affinity": affinity}}), 0, "")
    found = pod["spec"]["affinity"]
    (term,) = found["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == zone["matchExpressions"]
    assert found["podAffinity"] == {"x": 1}


def test_gpus_are_of_the_nodes_resource_and_others_are_taken_out() -> None:
    resources = {"limits": {"nvidia.com/gpu": "8", "memory": "1Gi"}, "requests": {"nvidia.com/gpu": "8"}}
    template = {"spec": {"containers": [{"name": "base", "resources": resources}]}}
    start = Start(incarnation=1, placement={"a:mig-1g.5gb": 3}, signal_unix_s=None)
    pod = worker_pod(gang(template, start=start), 0, "")
    assert pod["spec"]["containers"][0]["resources"] == {
        "limits": {"memory": "1Gi", "nvidia.com/mig-1g.5gb": "3"},
        "requests": {},
    }


def test_jobs_on_the_hosts_network_have_ports_of_their_own() -> None:
    template = {"spec": {"hostNetwork": True, "containers": [{"name": "base"}]}}
    ports = {gang(template, job_id=f"job-{number}").port for number in range(50)}
    assert len(ports) > 45
    assert RENDEZVOUS_PORT not in ports
    assert gang().port == RENDEZVOUS_PORT


def test_shared_memory_is_memory_unless_the_user_mounts_some() -> None:
    pod = worker_pod(gang(), 0, "")
    assert {"name": "pollux-shm", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
    own = {"name": "base", "volumeMounts": [{"name": "x", "mountPath": "/dev/shm"}]}
    pod = worker_pod(gang({"spec": {"containers": [own]}}), 0, "")
    assert pod["spec"].get("volumes") is None


def test_node_names_tell_the_resource() -> None:
    for resource in RESOURCES:
        assert node_and_resource(node_key("n", resource, RESOURCES), RESOURCES) == ("n", resource)
    with pytest.raises(DocumentError, match="mig-7g"):
        node_and_resource("n:mig-7g.40gb", RESOURCES)


def a_pod(
    phase: str = "Pending", *, waiting: str = "", unschedulable: str = "", **status: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {"phase": phase, **status}
    if waiting:
        state = {"waiting": {"reason": waiting, "message": "why"}}
        found["containerStatuses"] = [{"name": "base", "image": "i:1", "state": state}]
    if unschedulable:
        found["conditions"] = [{"type": "PodScheduled", "status": "False", "message": unschedulable}]
    return {"metadata": {"name": "job-3-0"}, "status": found}


@pytest.mark.parametrize(
    ("pod", "waited_s", "want"),
    [
        pytest.param(a_pod(unschedulable="0/2 nodes"), 19, None, id="in good time"),
        pytest.param(a_pod(unschedulable="0/2 nodes"), 20, ("0/2 nodes", False), id="no node in time"),
        pytest.param(a_pod(waiting="ImagePullBackOff"), 20, ("i:1", True), id="no image in time"),
        pytest.param(a_pod(waiting="ContainerCreating"), 50, None, id="a long pull"),
        pytest.param(a_pod(waiting="ContainerCreating"), 100, ("100 s", False), id="too long a pull"),
        pytest.param(a_pod("Running"), 500, None, id="it runs"),
    ],
)
def test_what_keeps_a_pod_from_running(
    pod: dict[str, Any], waited_s: float, want: tuple[str, bool] | None
) -> None:
    trouble = pod_trouble(pod, 20.0, waited_s, pull_wait_s=100.0)
    if want is None:
        assert trouble is None
    else:
        assert trouble is not None
        assert (want[0] in trouble.reason, trouble.fatal) == (True, want[1])


@pytest.mark.parametrize(
    ("phase", "node", "ends", "starting"),
    [
        pytest.param("Pending", "", False, False, id="it finds no node"),
        pytest.param("Pending", "node-0", False, True, id="a kubelet has it"),
        pytest.param("Pending", "node-0", True, False, id="it was told to end"),
        pytest.param("Running", "node-0", False, False, id="it runs"),
    ],
)
def test_a_pod_starts_between_its_node_and_its_containers(
    phase: str, node: str, ends: bool, starting: bool
) -> None:
    pod = a_pod(phase) | {"spec": {"nodeName": node} if node else {}}
    if ends:
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert is_starting(pod) is starting


def test_only_a_pod_without_a_node_may_wait_for_others_to_end() -> None:
    homeless = pod_trouble(a_pod(unschedulable="0/2 nodes"), 20.0, 20.0)
    imageless = pod_trouble(a_pod(waiting="ErrImagePull"), 20.0, 20.0)
    assert homeless is not None
    assert imageless is not None
    assert (homeless.homeless, imageless.homeless) == (True, False)


@pytest.mark.parametrize(
    ("due", "resource", "waits"),
    [
        pytest.param(None, "nvidia.com/gpu", False, id="it stays"),
        pytest.param("2026-01-01T00:00:30Z", "nvidia.com/gpu", True, id="it ends"),
        pytest.param("2025-12-31T23:59:00Z", "nvidia.com/mig-1g.5gb", True, id="a kubelet that is late"),
        pytest.param("2025-12-31T23:50:00Z", "nvidia.com/gpu", False, id="it ends for ever"),
        pytest.param("2026-01-01T00:00:30Z", "memory", False, id="it has no GPUs"),
    ],
)
def test_gpus_that_are_about_to_be_free(due: str | None, resource: str, waits: bool) -> None:
    pod = {
        "metadata": {"name": "tenant", **({"deletionTimestamp": due} if due else {})},
        "spec": {"containers": [{"name": "base", "resources": {"limits": {resource: "1"}}}]},
    }
    now_unix_s = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert makes_room([pod], RESOURCES, now_unix_s) == ("tenant" if waits else "")


def test_ends_that_the_output_does_not_tell_are_told() -> None:
    killed = {"name": "base", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    assert "out of memory" in end_note(a_pod("Failed", containerStatuses=[killed]))
    assert "Evicted" in end_note(a_pod("Failed", reason="Evicted", message="disk"))
    fine = {"name": "base", "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    assert end_note(a_pod("Succeeded", containerStatuses=[fine])) == ""


def fall_back(placement: dict[str, int], worked: dict[str, int], before: Narrowed | None = None) -> Narrowed:
    allocation = Allocation(decision=7, placement=placement)
    return narrow(allocation, worked, spec=SPEC, reason="why", before=before, now_unix_s=100.0)


@pytest.mark.parametrize(
    ("placement", "worked", "want"),
    [
        pytest.param({"a": 2, "b": 2}, {"a": 2}, {"a": 2}, id="a grow goes back"),
        pytest.param({"a": 4}, {"a": 2}, {"a": 2}, id="on one node too"),
        pytest.param({"b": 2}, {"a": 2}, {}, id="after a move its old GPUs may be another job's"),
        pytest.param({"a": 1, "b": 3}, {"a": 2}, {}, id="below the job's minimum"),
        pytest.param({"a": 2}, {}, {}, id="a first start"),
        pytest.param({"a": 2}, {"a": 4}, {}, id="a shrink that fails where it worked"),
    ],
)
def test_a_gang_that_cannot_start_falls_back_within_its_allocation(
    placement: dict[str, int], worked: dict[str, int], want: dict[str, int]
) -> None:
    found = fall_back(placement, worked)
    assert found.placement == want
    assert all(gpus <= placement[node] for node, gpus in found.placement.items())
    assert found.until_unix_s == 100.0 + (FIRST_PAUSE_S if want else EMPTY_PAUSE_S)


def test_what_it_fell_back_to_is_given_up_too_if_it_fails_and_pauses_grow() -> None:
    first = fall_back({"a": 2, "b": 2}, {"a": 2})
    again = fall_back({"a": 2, "b": 2}, {"a": 2}, first)
    assert (again.placement, again.pause_s) == ({}, 2 * FIRST_PAUSE_S)


def test_a_new_decision_or_time_ends_the_fallback() -> None:
    found = fall_back({"a": 2, "b": 2}, {"a": 2})
    same, newer = Allocation(decision=7, placement={"a": 2}), Allocation(decision=8, placement={"a": 2})
    assert found.holds(same, 101.0)
    assert not found.holds(newer, 101.0)
    assert not found.holds(same, 100.0 + FIRST_PAUSE_S)
    assert not found.holds(same, 99.0), "a clock that is set back makes nothing wait longer"

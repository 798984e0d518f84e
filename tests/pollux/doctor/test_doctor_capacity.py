"""What the doctor says about nodes and quotas."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from pollux.cluster.k8s import KubeSettings
from pollux.doctor.capacity import check_nodes, check_quotas
from pollux.doctor.finding import Finding

SETTINGS = KubeSettings(namespace="team")
TYPE = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"


def node(
    name: str, allocatable: Mapping[str, str], *, gpu_type: str = "", ready: str = "True", **spec: Any
) -> dict[str, Any]:
    typed = {TYPE: gpu_type} if gpu_type else {}
    conditions = [{"type": "Ready", "status": ready}]
    status = {"allocatable": dict(allocatable), "conditions": conditions}
    return {"metadata": {"name": name, "labels": typed}, "spec": spec, "status": status}


def quota(hard: str, used: str, *, namespace: str = "team") -> dict[str, Any]:
    key = f"requests.{GPU}"
    return {
        "metadata": {"name": "gpus", "namespace": namespace},
        "status": {"hard": {key: hard}, "used": {key: used}},
    }


def told(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_gpus_are_counted_and_their_types_known() -> None:
    nodes = [
        node("a", {GPU: "4"}, gpu_type="A100"),
        node("b", {GPU: "8"}, gpu_type="H100"),
        node("c", {"cpu": "4", GPU: "0"}),
    ]
    found = told(check_nodes(nodes, SETTINGS))
    assert found["GPUs"].detail == "12 of nvidia.com/gpu on 2 of 3 nodes"
    assert {finding.status for finding in found.values()} == {"ok"}


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        pytest.param({"unschedulable": True}, "b: it is cordoned", id="cordoned"),
        pytest.param(
            {
                "unschedulable": True,
                "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
            },
            "b: it is cordoned",
            id="cordoned, as kubectl does",
        ),
        pytest.param(
            {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]},
            "b: taint team=x:NoSchedule is not tolerated",
            id="tainted",
        ),
        pytest.param(
            {"taints": [{"key": "team", "effect": "NoExecute"}]},
            "b: taint team:NoExecute is not tolerated",
            id="tainted against pods that run",
        ),
        pytest.param({"ready": "Unknown"}, "b: it is not ready", id="silent"),
    ],
)
def test_gpus_that_no_job_can_have_are_told_apart_with_the_cause(kept: dict[str, Any], said: str) -> None:
    nodes = [node("a", {GPU: "4"}, gpu_type="A100"), node("b", {GPU: "8"}, gpu_type="A100", **kept)]
    some = told(check_nodes(nodes, SETTINGS))["GPUs"]
    total = f"12 of {GPU} on 2 of 2 nodes, of which 4 can be given to jobs"
    assert (some.status, some.detail) == ("warning", f"{total}; {said}")
    none = told(check_nodes(nodes[1:], SETTINGS))["GPUs"]
    assert (none.status, "0 can be given" in none.detail) == ("failed", True)
    assert "uncordon" in none.fix


def test_what_does_not_keep_a_job_off_is_not_told() -> None:
    taints = [
        {"key": GPU, "effect": "NoSchedule"},
        {"key": "dedicated", "value": "ml", "effect": "NoSchedule"},
        {"key": "slow", "effect": "PreferNoSchedule"},
    ]
    tolerating = KubeSettings(tolerations=({"key": "dedicated", "operator": "Exists"},))
    found = told(check_nodes([node("a", {GPU: "4"}, gpu_type="A100", taints=taints)], tolerating))
    assert found["GPUs"].status == "ok"


def test_a_missing_label_is_named_with_the_command_that_sets_it() -> None:
    nodes = [node("a", {GPU: "4"}, gpu_type="A100"), node("b", {GPU: "8"})]
    found = told(check_nodes(nodes, SETTINGS))["GPU types"]
    assert found.status == "warning"
    assert found.fix.startswith(f"kubectl label node b {TYPE}=")


def test_another_resource_than_the_one_set_is_named() -> None:
    found = told(check_nodes([node("a", {"amd.com/gpu": "4", "cpu": "8"})], SETTINGS))["GPUs"]
    assert found.status == "failed"
    assert "amd.com/gpu" in found.detail
    assert "POLLUX_KUBE_GPU_RESOURCES" in found.fix


def test_no_device_plugin_at_all_is_said() -> None:
    found = told(check_nodes([node("a", {"cpu": "8"})], SETTINGS))["GPUs"]
    assert "no node has an extended resource" in found.detail
    assert "device plugin" in found.fix


def test_quotas_are_told_for_the_namespaces_of_jobs_alone() -> None:
    (found,) = check_quotas([quota("4", "1"), quota("0", "0", namespace="others")], ["team"], SETTINGS)
    assert (found.status, found.detail) == ("ok", "team: quota gpus allows 4 of nvidia.com/gpu, 1 are in use")
    (none,) = check_quotas([], ["team"], SETTINGS)
    assert (none.status, none.detail) == ("ok", "team: no quota on nvidia.com/gpu")


def test_a_quota_of_nothing_fails_with_the_value_to_raise() -> None:
    (found,) = check_quotas([quota("0", "0")], ["team"], SETTINGS)
    assert found.status == "failed"
    assert found.fix == f"raise requests.{GPU} of ResourceQuota gpus in team"

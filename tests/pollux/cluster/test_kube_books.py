"""What nodes, pods and quotas leave to give on Kubernetes, case by case."""

from typing import Any

import pytest

from pollux.cluster.k8s.nodes import Books, read_books
from pollux.cluster.k8s.settings import KubeSettings
from pollux_agent.driver.kube.documents import JOB, NODE, ROLE, WORKER_ROLE

NOW = 1_700_000_000.0
GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.5gb"
RECENT, LONG_AGO = "2023-11-14T22:13:00Z", "2023-11-14T22:00:00Z"


def node(
    name: str = "a", gpus: int | str = 8, *, ready: str = "True", since: str = LONG_AGO, **spec: Any
) -> dict[str, Any]:
    labels = spec.pop("labels", {})
    meta = {"name": name, "labels": labels, "creationTimestamp": LONG_AGO} | spec.pop("meta", {})
    sizes = {GPU: str(gpus), **spec.pop("more", {})}
    ready_condition = {"type": "Ready", "status": ready, "lastTransitionTime": since}
    status = {"allocatable": sizes, "capacity": {GPU: "64"}, "conditions": [ready_condition]}
    return {"metadata": meta, "spec": spec, "status": status}


def pod(
    gpus: int, on: str | None = "a", *, phase: str = "Running", resource: str = GPU, **meta: Any
) -> dict[str, Any]:
    container = {"name": "base", "resources": {"limits": {resource: str(gpus), "memory": "1Gi"}}}
    spec: dict[str, Any] = {"containers": [container]}
    if on:
        spec["nodeName"] = on
    return {"metadata": {"name": "p", "namespace": "team", **meta}, "spec": spec, "status": {"phase": phase}}


def worker(job: str, gpus: int, key: str = "a", *, bound: bool = True, **fields: Any) -> dict[str, Any]:
    return pod(
        gpus,
        key.partition(":")[0] if bound else None,
        labels={ROLE: WORKER_ROLE, JOB: job},
        annotations={NODE: key},
        **fields,
    )


def books(
    nodes: list[dict[str, Any]],
    pods: list[dict[str, Any]] | None = None,
    quotas: list[dict[str, Any]] | None = None,
    *,
    jobs: tuple[str, ...] = ("job",),
    **settings: Any,
) -> Books:
    return read_books(
        nodes,
        pods or [],
        quotas or [],
        jobs=dict.fromkeys(jobs, "team"),
        settings=KubeSettings(**settings),
        now_unix_s=NOW,
    )


def gpus(found: Books) -> dict[str, int]:
    return {item.name: item.gpus for item in found.nodes}


def quota(hard: int, used: int, namespace: str = "team", **spec: Any) -> dict[str, Any]:
    name = f"requests.{GPU}"
    return {
        "metadata": {"name": "q", "namespace": namespace},
        "spec": spec,
        "status": {"hard": {name: str(hard)}, "used": {name: str(used)}},
    }


@pytest.mark.parametrize(
    ("pods", "want"),
    [
        pytest.param([], 5, id="allocatable counts, not capacity"),
        pytest.param([pod(4)], 1, id="a foreign pod takes its GPUs"),
        pytest.param([pod(4, phase="Succeeded"), pod(3, phase="Failed")], 5, id="ended pods hold nothing"),
        pytest.param([pod(2, deletionTimestamp=RECENT)], 3, id="a pod that is being deleted still holds"),
        pytest.param([pod(3, on=None)], 5, id="a foreign pod without a node holds nothing yet"),
        pytest.param([worker("job", 4)], 5, id="a job in view keeps what it holds"),
        pytest.param([worker("gone", 4)], 1, id="workers without a driver are foreign"),
        pytest.param([pod(9)], 0, id="never below zero"),
    ],
)
def test_a_nodes_gpus_are_what_others_leave(pods: list[dict[str, Any]], want: int) -> None:
    assert gpus(books([node(gpus=5)], pods)) == {"a": want}


@pytest.mark.parametrize(
    ("init", "asks"),
    [
        pytest.param([(3, False)], 3, id="an init container asks for more"),
        pytest.param([(1, False)], 2, id="one that asks for less"),
        pytest.param([(1, True)], 3, id="a sidecar stays beside the container"),
        pytest.param([(1, True), (4, False)], 5, id="a sidecar runs beside a later init container"),
        pytest.param([(4, False), (1, True)], 4, id="but not beside an earlier one"),
        pytest.param([(1, True), (1, True), (2, False)], 4, id="two sidecars"),
    ],
)
def test_init_containers_and_sidecars_count_as_they_run(init: list[tuple[int, bool]], asks: int) -> None:
    """A pod whose container asks for two; right values: the resource rules of KEP 753."""
    asked = pod(2)
    asked["spec"]["initContainers"] = [
        {"name": "i", "resources": {"limits": {GPU: str(gpus)}}}
        | ({"restartPolicy": "Always"} if always else {})
        for gpus, always in init
    ]
    assert gpus(books([node(gpus=8)], [asked])) == {"a": 8 - asks}


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({"unschedulable": True}, {"a": 2}, id="cordoned: what the job holds"),
        pytest.param({"meta": {"deletionTimestamp": RECENT}}, {"a": 2}, id="being deleted: the same"),
        pytest.param({"taints": [{"key": "k", "effect": "NoSchedule"}]}, {"a": 2}, id="tainted: the same"),
        pytest.param({"taints": [{"key": "k", "effect": "NoExecute"}]}, {}, id="evicts us: nothing"),
        pytest.param({"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}, {"a": 8}, id="a wish: all"),
        pytest.param({"taints": [{"key": GPU, "effect": "NoSchedule"}]}, {"a": 8}, id="for GPU pods: all"),
        pytest.param({"ready": "False"}, {}, id="not ready: nothing"),
        pytest.param({"ready": "Unknown"}, {}, id="silent: nothing"),
        pytest.param({"gpus": 0}, {}, id="without GPUs: no node of ours"),
    ],
)
def test_a_node_that_takes_no_new_pods(changes: dict[str, Any], want: dict[str, int]) -> None:
    assert gpus(books([node(**changes)], [worker("job", 2)])) == want


@pytest.mark.parametrize(
    ("toleration", "want"),
    [
        ({"key": "k", "operator": "Exists"}, 8),
        ({"key": "k", "value": "v", "effect": "NoSchedule"}, 8),
        ({"operator": "Exists"}, 8),
        ({"key": "k", "value": "other"}, 0),
        ({"key": "k", "operator": "Exists", "effect": "NoExecute"}, 0),
    ],
)
def test_tolerations_of_the_settings_open_tainted_nodes(toleration: dict[str, str], want: int) -> None:
    tainted = node(taints=[{"key": "k", "value": "v", "effect": "NoSchedule"}])
    assert gpus(books([tainted], tolerations=(toleration,))) == {"a": want}


def test_types_come_from_a_label_and_other_resources_are_types_of_their_own() -> None:
    both = node(gpus=2, labels={"nvidia.com/gpu.product": "A100"}, more={MIG: "7"})
    found = books([both], [pod(3, resource=MIG)], gpu_resources=(GPU, MIG))
    seen = {item.name: (item.gpus, item.gpu_type) for item in found.nodes}
    assert seen == {"a": (2, "A100"), "a:mig-1g.5gb": (4, "mig-1g.5gb")}


def test_jobs_hold_what_their_pods_on_nodes_ask_for() -> None:
    pods = [worker("job", 2), worker("job", 1, "b", bound=False), worker("job", 4, "c", phase="Failed")]
    assert books([node()], pods).held == {"job": {"a": 2}}


def test_nodes_are_lost_some_time_after_they_fell_silent_or_once_they_are_deleted() -> None:
    nodes = [node("new", ready="Unknown", since=RECENT), node("old", ready="Unknown", since=LONG_AGO)]
    found = books(nodes, [worker("job", 1, "deleted")], lost_after_s=60)
    assert found.lost == {"old", "deleted"}


@pytest.mark.parametrize(
    ("quotas", "pods", "want"),
    [
        pytest.param([quota(6, 0)], [], {"a": 4, "b": 2}, id="no more than the quota in all"),
        pytest.param([quota(6, 3)], [pod(3, "b")], {"a": 3, "b": 0}, id="others' use counts"),
        pytest.param(
            [quota(4, 2)], [worker("job", 2, "b")], {"a": 2, "b": 2}, id="what jobs hold stays theirs"
        ),
        pytest.param([quota(1, 2)], [worker("job", 2, "b")], {"a": 0, "b": 1}, id="a quota that was lowered"),
        pytest.param(
            [quota(6, 0), quota(2, 2, scopeSelector={"matchExpressions": [{"scopeName": "PriorityClass"}]})],
            [],
            {"a": 4, "b": 2},
            id="one for a priority class is not one for all",
        ),
        pytest.param([quota(2, 2, scopes=["BestEffort"])], [], {"a": 4, "b": 4}, id="nor is a scoped one"),
        pytest.param([quota(1, 0, "else")], [], {"a": 4, "b": 4}, id="another namespace's is none of ours"),
    ],
)
def test_quotas_cap_what_all_jobs_may_have(
    quotas: list[dict[str, Any]], pods: list[dict[str, Any]], want: dict[str, int]
) -> None:
    assert gpus(books([node("a", 4), node("b", 4)], pods, quotas)) == want


@pytest.mark.parametrize("written", [None, "", "elsewhere", "a:mig-1g.5gb", "{garbage"])
def test_what_a_worker_holds_is_where_it_is_whatever_is_written_on_it(written: str | None) -> None:
    there = worker("job", 3)
    there["metadata"]["annotations"] = {} if written is None else {NODE: written}
    found = books([node(gpus=8)], [there])
    assert (gpus(found), found.held, found.lost) == ({"a": 8}, {"job": {"a": 3}}, frozenset())


def test_a_pod_of_another_namespace_that_calls_itself_a_jobs_worker_is_somebody_elses() -> None:
    forged = worker("job", 3)
    forged["metadata"]["namespace"] = "other"
    found = books([node(gpus=8)], [worker("job", 2), forged])
    assert (gpus(found), found.held) == ({"a": 5}, {"job": {"a": 2}})

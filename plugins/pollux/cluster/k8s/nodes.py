"""What nodes, pods and quotas leave to give: pure, over the API's own JSON.

A node's GPUs are its allocatable ones minus the requests of every pod that has not ended, whoever owns it,
but for the worker pods of the jobs in view: what those hold is the jobs' own. A node that is not ready or
evicts our pods is left out; one that is cordoned, or tainted against us, keeps what jobs hold there.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from pollux.cluster.k8s.settings import KubeSettings
from pollux.snapshot import Node
from pollux_agent.driver.kube.documents import (
    JOB,
    ROLE,
    WORKER_ROLE,
    is_terminal,
    labels,
    node_key,
)
from pollux_agent.protocol import Placement

Json = Mapping[str, Any]

_CORDONED = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """``held`` is what each job's worker pods occupy, by node; ``lost`` are nodes that are gone for good."""

    nodes: tuple[Node, ...]
    held: Mapping[str, Placement]
    lost: frozenset[str]


def read_books(
    nodes: Sequence[Json],
    pods: Sequence[Json],
    quotas: Sequence[Json],
    *,
    jobs: Mapping[str, str],
    settings: KubeSettings,
    now_unix_s: float,
) -> Books:
    """``jobs`` are the jobs in view and their namespaces; ``now_unix_s`` is the API server's time."""
    resources = settings.gpu_resources
    workers = [pod for pod in pods if _is_worker(pod, jobs)]
    held = held_by_jobs(workers, resources)
    foreign = _foreign(pods, jobs, resources)
    ours: dict[str, int] = defaultdict(int)
    for job_id in jobs:
        for key, gpus in held.get(job_id, {}).items():
            ours[key] += gpus
    found: dict[str, dict[str, Node]] = {resource: {} for resource in resources}
    lost = set()
    for node in nodes:
        name = node["metadata"]["name"]
        if not _is_ready(node):
            if now_unix_s - _not_ready_since(node) >= settings.lost_after_s:
                lost.add(name)
            continue
        openness = _openness(node, settings)
        if openness == "closed":
            continue
        for resource in resources:
            total = quantity((node.get("status", {}).get("allocatable") or {}).get(resource))
            if not total:
                continue
            key = node_key(name, resource, resources)
            gpus = max(0, total - foreign[name, resource])
            if openness == "keeps":
                gpus = min(gpus, ours[key])
            found[resource][key] = Node(name=key, gpus=gpus, gpu_type=_gpu_type(node, resource, settings))
    names = {node["metadata"]["name"] for node in nodes}
    lost |= {key.partition(":")[0] for placement in held.values() for key in placement} - names
    given: list[Node] = []
    for resource in resources:
        cap = _quota(resource, quotas, pods, jobs)
        given += _capped(sorted(found[resource].values(), key=lambda node: node.name), ours, cap)
    return Books(nodes=tuple(given), held=held, lost=frozenset(lost))


def held_by_jobs(pods: Iterable[Json], resources: Sequence[str]) -> dict[str, Placement]:
    """Job id -> GPUs by node of its worker pods that are on their node and have not ended."""
    held: dict[str, dict[str, int]] = {}
    for pod in pods:
        node, job_id = (pod.get("spec") or {}).get("nodeName"), labels(pod).get(JOB)
        if labels(pod).get(ROLE) != WORKER_ROLE or is_terminal(pod) or not node or not job_id:
            continue
        asked = _requests(pod)
        for resource in resources:
            if gpus := asked.get(resource, 0):
                placement = held.setdefault(job_id, {})
                key = node_key(node, resource, tuple(resources))
                placement[key] = placement.get(key, 0) + gpus
    return dict(held)


def quantity(text: object) -> int:
    """A whole number of devices; what is none counts as 0."""
    try:
        return int(parse_quantity(text)) if text is not None else 0
    except (ValueError, ArithmeticError):
        return 0


def unix_s(text: str | None) -> float:
    """A time of the API; 0 if there is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0


def _requests(pod: Json) -> dict[str, int]:
    """What a pod asks for of every extended resource: all containers together, sidecars included, or where
    that is more its largest init container with the sidecars that started before it (KEP 753).
    """
    spec = pod.get("spec") or {}
    together: dict[str, int] = defaultdict(int)
    sidecars: dict[str, int] = defaultdict(int)
    largest: dict[str, int] = defaultdict(int)
    for container in spec.get("initContainers") or ():
        always = container.get("restartPolicy") == "Always"
        for resource, gpus in _of_container(container).items():
            largest[resource] = max(largest[resource], sidecars[resource] + gpus)
            sidecars[resource] += gpus if always else 0
    for container in spec.get("containers") or ():
        for resource, gpus in _of_container(container).items():
            together[resource] += gpus
    names = {*together, *sidecars, *largest}
    return {name: max(together[name] + sidecars[name], largest[name]) for name in names}


def _of_container(container: Json) -> dict[str, int]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity(value) for name, value in asked.items() if "/" in name and "hugepages" not in name}


def _foreign(
    pods: Iterable[Json], jobs: Mapping[str, str], resources: Sequence[str]
) -> Mapping[tuple[str, str], int]:
    """GPUs by node and resource that pods hold which are no workers of a job in view."""
    used: dict[tuple[str, str], int] = defaultdict(int)
    for pod in pods:
        node = (pod.get("spec") or {}).get("nodeName")
        if not node or is_terminal(pod):
            continue
        if _is_worker(pod, jobs):
            continue
        asked = _requests(pod)
        for resource in resources:
            used[node, resource] += asked.get(resource, 0)
    return used


def _is_worker(pod: Json, jobs: Mapping[str, str]) -> bool:
    """Whether it is a worker of a job in view: labelled so, and in the job's own namespace."""
    namespace = jobs.get(labels(pod).get(JOB, ""))
    return labels(pod).get(ROLE) == WORKER_ROLE and pod["metadata"].get("namespace") == namespace


def _gpu_type(node: Json, resource: str, settings: KubeSettings) -> str:
    if resource == settings.gpu_resources[0]:
        return labels(node).get(settings.gpu_type_label) or "gpu"
    return resource.rpartition("/")[2]


def _condition(node: Json) -> Json:
    for condition in node.get("status", {}).get("conditions") or ():
        if condition.get("type") == "Ready":
            return condition  # type: ignore[no-any-return]
    return {}


def _is_ready(node: Json) -> bool:
    return _condition(node).get("status") == "True"


def _not_ready_since(node: Json) -> float:
    return unix_s(_condition(node).get("lastTransitionTime")) or unix_s(
        node["metadata"].get("creationTimestamp")
    )


def obstacles(node: Json, settings: KubeSettings) -> list[str]:
    """Why a node gives no new GPUs, in words; empty where it does."""
    found = [] if _is_ready(node) else ["it is not ready"]
    if node["metadata"].get("deletionTimestamp"):
        found.append("it is being deleted")
    if (node.get("spec") or {}).get("unschedulable"):
        found.append("it is cordoned")
    for taint in _against_us(node, settings):
        value = f"={taint['value']}" if taint.get("value") else ""
        found.append(f"taint {taint.get('key')}{value}:{taint['effect']} is not tolerated")
    return found


def _openness(node: Json, settings: KubeSettings) -> str:
    """open: gives all; keeps: gives nothing new; closed: would evict our pods."""
    spec = node.get("spec") or {}
    effects = {taint["effect"] for taint in _against_us(node, settings)}
    if "NoExecute" in effects:
        return "closed"
    stays = spec.get("unschedulable") or node["metadata"].get("deletionTimestamp") or effects
    return "keeps" if stays else "open"


def _against_us(node: Json, settings: KubeSettings) -> list[Json]:
    """The taints that keep our pods off, or drive them away. The kubelet's own for a node that is cordoned
    says no more than that.
    """
    spec = node.get("spec") or {}
    return [
        taint
        for taint in spec.get("taints") or ()
        if taint.get("effect") in ("NoExecute", "NoSchedule")
        and not (taint.get("key") == _CORDONED and spec.get("unschedulable"))
        and taint.get("key") not in settings.gpu_resources
        and not _tolerated(taint, settings.tolerations)
    ]


def _tolerated(taint: Json, tolerations: Iterable[Json]) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") not in (None, "", taint.get("effect")):
            continue
        if toleration.get("operator") == "Exists":
            if toleration.get("key") in (None, "", taint.get("key")):
                return True
        elif (toleration.get("key"), toleration.get("value") or "") == (
            taint.get("key"),
            taint.get("value") or "",
        ):
            return True
    return False


def _quota(
    resource: str, quotas: Iterable[Json], pods: Iterable[Json], jobs: Mapping[str, str]
) -> int | None:
    """GPUs that all jobs together may have by the quotas of their namespaces; None: as many as there are.

    A quota for some pods alone (by priority class, say) is left to the API server.
    """
    left: dict[str, int] = {}
    name = f"requests.{resource}"
    for quota in quotas:
        status, spec = quota.get("status") or {}, quota.get("spec") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        if name in (status.get("hard") or {}):
            namespace = quota["metadata"]["namespace"]
            free = quantity(status["hard"][name]) - quantity((status.get("used") or {}).get(name))
            left[namespace] = min(left.get(namespace, free), free)
    namespaces = set(jobs.values())
    if not namespaces or not namespaces <= left.keys():
        return None
    own = sum(
        _requests(pod).get(resource, 0) for pod in pods if _is_worker(pod, jobs) and not is_terminal(pod)
    )
    return max(0, own + sum(left[namespace] for namespace in namespaces))


def _capped(nodes: Sequence[Node], ours: Mapping[str, int], cap: int | None) -> list[Node]:
    """Nodes with fewer GPUs, so that all together have ``cap``; free GPUs go first, the last node's first."""
    excess = sum(node.gpus for node in nodes) - cap if cap is not None else 0
    gpus = {node.name: node.gpus for node in nodes}
    for keeps in (True, False):
        for node in reversed(nodes):
            least = min(ours[node.name], gpus[node.name]) if keeps else 0
            cut = min(max(0, excess), gpus[node.name] - least)
            gpus[node.name] -= cut
            excess -= cut
    return [Node(name=node.name, gpus=gpus[node.name], gpu_type=node.gpu_type) for node in nodes]

"""Nodes, their GPUs and labels, and quotas: what there is to give; pure, over the API's own JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pollux.cluster.k8s.nodes import obstacles, quantity
from pollux.cluster.k8s.settings import KubeSettings
from pollux.doctor.finding import Finding, failed, ok, warning

Json = Mapping[str, Any]

_MOST_NAMED = 5


def check_nodes(nodes: Sequence[Json], settings: KubeSettings) -> Iterator[Finding]:
    """GPU resources of the nodes, and the label that says which type they are."""
    wanted = ", ".join(settings.gpu_resources)
    having: dict[str, int] = {}
    unlabelled = []
    for node in nodes:
        allocatable = node.get("status", {}).get("allocatable") or {}
        gpus = sum(quantity(allocatable.get(resource)) for resource in settings.gpu_resources)
        if gpus:
            having[node["metadata"]["name"]] = gpus
            if settings.gpu_type_label not in (node["metadata"].get("labels") or {}):
                unlabelled.append(node["metadata"]["name"])
    if not having:
        others = {
            name for node in nodes for name in node.get("status", {}).get("allocatable") or {} if "/" in name
        }
        there = f"; there are {', '.join(sorted(others))}" if others else "; no node has an extended resource"
        yield failed(
            "GPUs",
            f"none of {len(nodes)} nodes has {wanted}{there}",
            "install the GPU vendor's device plugin, or name the resource in gpus.resources "
            "(POLLUX_KUBE_GPU_RESOURCES)",
        )
        return
    yield _usable(having, nodes, settings)
    if unlabelled:
        yield warning(
            "GPU types",
            f"{len(unlabelled)} of {len(having)} nodes with GPUs have no label {settings.gpu_type_label}, so "
            "their GPUs count as one type: " + ", ".join(sorted(unlabelled)[:5]),
            f"kubectl label node {unlabelled[0]} {settings.gpu_type_label}=TYPE, or name the label that your "
            "nodes have in gpus.typeLabel (POLLUX_KUBE_GPU_TYPE_LABEL)",
        )
    else:
        yield ok("GPU types", f"label {settings.gpu_type_label} is on all of them")


def _usable(having: Mapping[str, int], nodes: Sequence[Json], settings: KubeSettings) -> Finding:
    """How many of the GPUs can be given to jobs, and what keeps the others."""
    why = {node["metadata"]["name"]: obstacles(node, settings) for node in nodes}
    kept = {name: reasons for name, reasons in why.items() if reasons and name in having}
    resources = ", ".join(settings.gpu_resources)
    total = f"{sum(having.values())} of {resources} on {len(having)} of {len(nodes)} nodes"
    if not kept:
        return ok("GPUs", total)
    usable = sum(gpus for name, gpus in having.items() if name not in kept)
    told = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in sorted(kept.items())[:_MOST_NAMED])
    more = f"; and {len(kept) - _MOST_NAMED} more" if len(kept) > _MOST_NAMED else ""
    return (warning if usable else failed)(
        "GPUs",
        f"{total}, of which {usable} can be given to jobs; {told}{more}",
        "kubectl uncordon NODE, or tolerate the taint in tolerations (POLLUX_KUBE_TOLERATIONS)",
    )


def check_quotas(
    quotas: Sequence[Json], namespaces: Sequence[str], settings: KubeSettings
) -> Iterator[Finding]:
    """How many GPUs the quotas of the jobs' namespaces leave."""
    for namespace in namespaces:
        told = False
        for quota in quotas:
            status = quota.get("status") or {}
            hard = status.get("hard") or {}
            for resource in settings.gpu_resources:
                key = f"requests.{resource}"
                if quota["metadata"]["namespace"] != namespace or key not in hard:
                    continue
                told = True
                name, most = quota["metadata"]["name"], quantity(hard[key])
                used = quantity((status.get("used") or {}).get(key))
                text = f"{namespace}: quota {name} allows {most} of {resource}, {used} are in use"
                if most:
                    yield ok("quota", text)
                else:
                    yield failed("quota", text, f"raise {key} of ResourceQuota {name} in {namespace}")
        if not told:
            yield ok("quota", f"{namespace}: no quota on {', '.join(settings.gpu_resources)}")

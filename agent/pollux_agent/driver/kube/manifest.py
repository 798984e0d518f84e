"""The worker pod of one node: the user's pod with our affinity, GPUs, environment and owner; pure."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux_agent.driver.kube.documents import (
    DEPLOYMENT,
    INCARNATION,
    JOB,
    JOB_DIR,
    NODE,
    ROLE,
    WORKER,
    WORKER_ROLE,
    KubeDriverSettings,
    labels,
    node_and_resource,
)
from pollux_agent.driver.machine import Start
from pollux_agent.errors import DocumentError
from pollux_agent.settings import WorkerSettings, environment

Json = Mapping[str, Any]

RENDEZVOUS_PORT = 29_400
_HOST_PORTS = range(10_000, 20_000)
_EXTRA_GRACE_S = 5.0
_POD_IP = "POLLUX_POD_IP"
_SHM = "/dev/shm"  # noqa: S108 - a mount point


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """What all worker pods of one incarnation share. ``template`` is the user's pod, ``driver`` ours."""

    job_id: str
    driver: Json
    template: Json
    start: Start
    settings: KubeDriverSettings
    gpu_type: str
    env: Mapping[str, str]
    mlflow_run_id: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Node names as the scheduler gives them, in rank order."""
        return tuple(self.start.placement)

    @property
    def port(self) -> int:
        """The rendezvous port; on the host's network each incarnation of each job has one of its own."""
        if not self.template.get("spec", {}).get("hostNetwork"):
            return RENDEZVOUS_PORT
        text = f"{self.job_id} {self.start.incarnation}".encode()
        return _HOST_PORTS[int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % len(_HOST_PORTS)]

    def pod_name(self, rank: int) -> str:
        return f"{self.job_id}-{self.start.incarnation}-{rank}"


def worker_pod(gang: Gang, rank: int, address: str) -> dict[str, Any]:
    """The pod of node rank ``rank``; ``address`` is rank 0's, unused for rank 0 itself, which knows its own.

    Raises DocumentError if the node's name asks for a GPU resource that is none of the settings', or if the
    template is no pod.
    """
    try:
        return _made(gang, rank, address)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, DocumentError):
            raise
        raise DocumentError(f"annotation {WORKER}: no pod can be made of it ({error!r})") from None


def _made(gang: Gang, rank: int, address: str) -> dict[str, Any]:
    key = gang.keys[rank]
    node, resource = node_and_resource(key, gang.settings.gpu_resources)
    pod = copy.deepcopy(dict(gang.template))
    spec = dict(pod.get("spec") or {})
    main, *others = spec.get("containers") or [{}]
    main = dict(main)
    main["command"] = [gang.settings.python, "-m", "pollux_agent.cli", "launch"]
    main["args"] = []
    main["env"] = _env(main.get("env") or [], gang, rank, address)
    main["resources"] = _resources(main.get("resources") or {}, gang, resource, gang.start.placement[key])
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    _with_memory_volume(spec, main)
    spec |= {
        "containers": [main, *others],
        "affinity": _on_node(spec.get("affinity") or {}, node),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": round(gang.settings.grace_s + _EXTRA_GRACE_S),
    }
    spec.pop("nodeName", None)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(pod.get("metadata") or {}, gang, rank, key),
        "spec": spec,
    }


def _metadata(user: Json, gang: Gang, rank: int, key: str) -> dict[str, Any]:
    driver = gang.driver["metadata"]
    return {
        "name": gang.pod_name(rank),
        "namespace": driver["namespace"],
        "annotations": {**(user.get("annotations") or {}), NODE: key},
        "labels": {
            **(user.get("labels") or {}),
            ROLE: WORKER_ROLE,
            JOB: gang.job_id,
            DEPLOYMENT: labels(gang.driver).get(DEPLOYMENT, ""),
            INCARNATION: str(gang.start.incarnation),
        },
        "ownerReferences": [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": driver["name"],
                "uid": driver["uid"],
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def _env(user: list[Json], gang: Gang, rank: int, address: str) -> list[dict[str, Any]]:
    """The user's variables first; ours, which come last, win. The kubelet makes one dollar of two."""
    settings = WorkerSettings(
        job_id=gang.job_id,
        job_dir=Path(JOB_DIR),
        incarnation=gang.start.incarnation,
        node=gang.keys[rank],
        slots=tuple(range(gang.start.placement[gang.keys[rank]])),
        placement=gang.start.placement,
        node_rank=rank,
        rendezvous=f"{f'$({_POD_IP})' if rank == 0 else address}:{gang.port}",
        gpu_type=gang.gpu_type or "gpu",
        signal_unix_s=gang.start.signal_unix_s,
        grace_s=gang.settings.grace_s,
        report_interval_s=gang.settings.report_interval_s,
        checkpoint_interval_s=gang.settings.checkpoint_interval_s,
        mlflow_tracking_uri=gang.settings.mlflow_tracking_uri if gang.mlflow_run_id else "",
        mlflow_run_id=gang.mlflow_run_id,
    )
    ours = {"PYTHONUNBUFFERED": "1", **gang.env, **environment(settings)}
    kept = [dict(variable) for variable in user if variable.get("name") not in ours]
    own_address = {"name": _POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    literal = [
        {"name": name, "value": value if name == "POLLUX_RENDEZVOUS" else value.replace("$", "$$")}
        for name, value in ours.items()
    ]
    return [*kept, own_address, *literal]


def _resources(user: Json, gang: Gang, resource: str, gpus: int) -> dict[str, Any]:
    """The user's requests and limits with as many GPUs as the allocation says, and of that kind alone."""
    kept = {
        name: {item: value for item, value in part.items() if item not in gang.settings.gpu_resources}
        for name, part in user.items()
        if isinstance(part, Mapping)
    }
    return {**kept, "limits": {**kept.get("limits", {}), resource: str(gpus)}}


def _on_node(affinity: Json, node: str) -> dict[str, Any]:
    """``affinity`` with every node term narrowed down to ``node``; a field, so that the scheduler decides."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or []), field]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": node_affinity}


def _with_memory_volume(spec: dict[str, Any], container: dict[str, Any]) -> None:
    """Shared memory for data loaders and NCCL, unless the user mounts some."""
    mounts = list(container.get("volumeMounts") or [])
    if any(mount.get("mountPath") == _SHM for mount in mounts):
        return
    container["volumeMounts"] = [*mounts, {"name": "pollux-shm", "mountPath": _SHM}]
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": "pollux-shm", "emptyDir": {"medium": "Memory"}},
    ]

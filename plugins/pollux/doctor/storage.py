"""Whether pods share the jobs' volume: one writes and renames, another one, elsewhere if it can, reads."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pollux.cluster.k8s.settings import KubeSettings
from pollux.doctor.finding import Finding, failed, ok, warning
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path

Json = Mapping[str, Any]

WAIT_S = 120.0
MAX_SKEW_S = 5.0
_LABEL = "pollux.dev/doctor"
_MOUNT = "/pollux/jobs"

_WRITE = """
import os, sys, time
path = sys.argv[1]
part = path + ".part"
with open(part, "w") as file:
    file.write(sys.argv[2])
    file.flush()
    os.fsync(file.fileno())
os.replace(part, path)
folder = os.open(os.path.dirname(path), os.O_RDONLY)
os.fsync(folder)
print(time.time())
"""
_READ = """
import os, sys, time
path = sys.argv[1]
for _ in range(50):
    if os.path.exists(path):
        break
    time.sleep(0.2)
with open(path) as file:
    assert file.read() == sys.argv[2], "another content"
os.remove(path)
print(time.time())
"""


def check_storage(
    api: KubeApi, settings: KubeSettings, namespace: str, template: Json | None
) -> Iterator[Finding]:
    """Run the two pods in ``namespace``, made from ``template`` (a pod with an image that has Python).

    Their clocks are compared with the API server's on the way. Raises KubeError where no pod can be made.
    """
    if settings.jobs_volume is None:
        yield failed(
            "shared storage",
            "POLLUX_KUBE_JOBS_VOLUME is not set: jobs have no place for checkpoints",
            "set checkpoints.pvc or checkpoints.volume",
        )
        return
    if template is None:
        yield warning(
            "shared storage",
            "not tried",
            "name an image with Python: pollux doctor --image pollux-training:0.1.0",
        )
        return
    name, text, node = f"pollux-doctor-{secrets.token_hex(4)}", secrets.token_hex(16), ""
    for verb, script in (("write", _WRITE), ("read", _READ)):
        command = [settings.python, "-c", script, f"{_MOUNT}/.{name}", text]
        pod = _pod(template, f"{name}-{verb}", command, settings, avoid=node)
        before_s = _server_s(api)
        try:
            trouble, output, node = _run(api, namespace, pod)
        finally:
            with contextlib.suppress(KubeError):
                api.delete(pod_path(namespace, f"{name}-{verb}"), grace_s=0)
        if trouble:
            yield failed(
                "shared storage",
                f"a pod in {namespace} could not {verb}: {trouble}",
                "the volume has to be one that all nodes mount read-write (ReadWriteMany) and that user "
                f"{(pod['spec'].get('securityContext') or {}).get('runAsUser', 'of the image')} may write",
            )
            return
        yield ok("shared storage", f"a pod on {node} could {verb}")
        yield from _check_clock(output, before_s, _server_s(api), node)


def _check_clock(output: str, before_s: float, after_s: float, node: str) -> Iterator[Finding]:
    try:
        told_s = float(output.split()[-1])
    except (ValueError, IndexError):
        return
    off_s = max(before_s - told_s, told_s - after_s, 0.0)
    if off_s > MAX_SKEW_S:
        yield warning(
            "clocks", f"{node} is {off_s:.0f} s off the API server's clock", f"run NTP (chrony) on {node}"
        )


def _server_s(api: KubeApi) -> float:
    """The API server's time now."""
    api.get("/version")
    return api.server_unix_s


def _pod(
    template: Json, name: str, command: list[str], settings: KubeSettings, *, avoid: str
) -> dict[str, Any]:
    """``avoid`` is the node on which another pod would show more."""
    spec = dict(template.get("spec") or {})
    container = dict((spec.get("containers") or [{}])[0])
    mounts = [*(container.get("volumeMounts") or ()), {"name": "pollux-jobs", "mountPath": _MOUNT}]
    container |= {"name": "doctor", "command": command, "args": [], "volumeMounts": mounts}
    container.pop("resources", None)
    elsewhere = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [avoid]}]}
    affinity = {
        "nodeAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": elsewhere}]
        }
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {_LABEL: "storage"}},
        "spec": {
            **spec,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            **({"affinity": affinity} if avoid else {}),
            "tolerations": [*(spec.get("tolerations") or ()), *settings.tolerations],
            "containers": [container],
            "volumes": [
                *(spec.get("volumes") or ()),
                {"name": "pollux-jobs", **(settings.jobs_volume or {})},
            ],
        },
    }


def _run(api: KubeApi, namespace: str, pod: Json) -> tuple[str, str, str]:
    """(what went wrong, what it printed, its node) of a pod, run to its end."""
    name = pod["metadata"]["name"]
    api.create(pod_path(namespace), pod)
    until_s = time.monotonic() + WAIT_S
    while True:
        seen = api.get(pod_path(namespace, name))
        status, node = seen.get("status") or {}, (seen.get("spec") or {}).get("nodeName") or "no node"
        if status.get("phase") in ("Succeeded", "Failed"):
            output = api.text(pod_path(namespace, name, "log")).decode(errors="replace").strip()
            good = status["phase"] == "Succeeded"
            return ("" if good else output[-500:] or "it ended with an error", output, node)
        if time.monotonic() > until_s:
            return f"not within {WAIT_S:.0f} s: {_waits_for(status)}", "", node
        time.sleep(0.5)


def _waits_for(status: Json) -> str:
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting:
            return f"{waiting.get('reason')} {waiting.get('message') or ''}".strip()
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])
    return str(status.get("phase"))

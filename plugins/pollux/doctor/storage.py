"""Whether pods share the jobs' volume as those of a job do.

One, confined as a driver, writes and renames in a folder that the kubelet makes for it; another one reads,
on another node if it can.
"""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pollux.cluster.k8s.manifest import DRIVER_SECURITY
from pollux.cluster.k8s.settings import KubeSettings
from pollux.doctor.finding import Finding, failed, ok, warning
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.documents import JOB_DIR
from pollux_agent.driver.kube.trouble import end_note

Json = Mapping[str, Any]

WAIT_S = 120.0
MAX_SKEW_S = 5.0
_LABEL = "pollux.dev/doctor"
_VOLUME = "pollux-jobs"
_WHOLE = "/pollux/volume"
_VOLUME_FIX = (
    "the volume has to be one that all nodes mount read-write (ReadWriteMany): kubectl get events shows what "
    "keeps a pod from it"
)
_PERMISSION_FIX = (
    "a job's folder is made by the kubelet: it is root's, whoever owns the volume's top folder, with that "
    "one's mode, and its group if it has the setgid bit; chmod 0777 the top folder, or chgrp it to the pods' "
    "group (50000 with training.image) and chmod 2775 it"
)
_FOLDER_FIX = "let root make folders in the volume: the kubelet makes one for each job (NFS: no_root_squash)"
_AGAIN = "see why its node ended it, and run the doctor again"
_PLACE_FIX = "a pod without GPUs has to find a node: give one to --pod with the tolerations that it needs"

_WRITE = """
import os, sys, time
path, volume, text = sys.argv[1:]
def leave():
    try:
        os.rmdir(volume)
    except OSError:
        pass
try:
    with open(path + ".part", "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
except OSError:
    leave()
    raise
print(time.time())
"""
_READ = """
import os, sys, time
path, volume, text = sys.argv[1:]
for _ in range(50):
    if os.path.exists(path):
        break
    time.sleep(0.2)
with open(path) as file:
    assert file.read() == text, "another content"
os.remove(path)
try:
    os.rmdir(volume)
except OSError as error:
    print("left:", error)
print(time.time())
"""


def check_storage(
    api: KubeApi, settings: KubeSettings, namespace: str, template: Json | None
) -> Iterator[Finding]:
    """Run the two pods in ``namespace``, made from ``template`` (a pod with an image that has Python).

    Nothing stays in the volume but the empty folder, where they may not remove that. Their clocks are
    compared with the API server's on the way. Raises KubeError where no pod can be made.
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
        command = [settings.python, "-c", script, f"{JOB_DIR}/doctor", f"{_WHOLE}/{name}", text]
        pod = _pod(template, f"{name}-{verb}", name, command, settings, avoid=node, driver=verb == "write")
        before_s = _server_s(api)
        try:
            end = _run(api, namespace, pod, settings)
        finally:
            with contextlib.suppress(KubeError):
                api.delete(pod_path(namespace, f"{name}-{verb}"), grace_s=0)
        node = end.node
        if end.trouble:
            left = f"; folder {name} stays in the volume" if verb == "read" else ""
            told = f"a pod in {namespace} could not {verb}: {end.trouble}{left}"
            yield failed("shared storage", told, end.fix)
            return
        left = f"; the empty folder {name} stays in the volume" if "left:" in end.output else ""
        yield ok("shared storage", f"a pod of {namespace} on {node} could {verb} in a job's folder{left}")
        yield from _check_clock(end.output, before_s, _server_s(api), node)


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
    template: Json,
    name: str,
    folder: str,
    command: list[str],
    settings: KubeSettings,
    *,
    avoid: str,
    driver: bool,
) -> dict[str, Any]:
    """A pod with a job's mount: ``folder`` of the volume alone, made by the kubelet where it is not there,
    and besides the whole volume, to remove it again. As confined as a driver, or as the template has it;
    ``avoid`` is the node on which another pod would show more.
    """
    spec = dict(template.get("spec") or {})
    container = dict((spec.get("containers") or [{}])[0])
    mounts = [
        *(container.get("volumeMounts") or ()),
        {"name": _VOLUME, "mountPath": JOB_DIR, "subPath": folder},
        {"name": _VOLUME, "mountPath": _WHOLE},
    ]
    container |= {"name": "doctor", "command": command, "args": [], "volumeMounts": mounts}
    container.pop("resources", None)
    if driver:
        container["securityContext"] = DRIVER_SECURITY
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
            "volumes": [*(spec.get("volumes") or ()), {"name": _VOLUME, **(settings.jobs_volume or {})}],
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a pod ended; ``trouble`` is empty where it did what it should."""

    node: str
    output: str = ""
    trouble: str = ""
    fix: str = ""


def _run(api: KubeApi, namespace: str, pod: Json, settings: KubeSettings) -> _End:
    """Run a pod to its end, or for so long."""
    name = pod["metadata"]["name"]
    api.create(pod_path(namespace), pod)
    until_s = time.monotonic() + WAIT_S
    while True:
        seen = api.get(pod_path(namespace, name))
        status, node = seen.get("status") or {}, (seen.get("spec") or {}).get("nodeName") or "no node"
        if status.get("phase") == "Succeeded":
            return _End(node=node, output=_output(api, namespace, name))
        if status.get("phase") == "Failed":
            return _failed(seen, node, _output(api, namespace, name), settings)
        if time.monotonic() > until_s:
            waits, fix = _waits_for(status, settings)
            return _End(node=node, trouble=f"not within {WAIT_S:.0f} s: {waits}", fix=fix)
        time.sleep(0.5)


def _output(api: KubeApi, namespace: str, name: str) -> str:
    """What it printed; nothing where it never ran."""
    try:
        return api.text(pod_path(namespace, name, "log")).decode(errors="replace").strip()
    except KubeError as error:
        if error.status != 400:
            raise
        return ""


def _failed(pod: Json, node: str, output: str, settings: KubeSettings) -> _End:
    """Why: what the kubelet says of a pod that could not run, else the last line that it printed."""
    said = output.splitlines()[-1][-500:] if output else ""
    if note := end_note(pod):
        return _End(node=node, trouble=note, fix=_python_fix(settings) if "could not run" in note else _AGAIN)
    if "PermissionError" in said:
        return _End(node=node, trouble=said, fix=_PERMISSION_FIX)
    if said and "Error" not in said:
        return _End(node=node, trouble=said, fix=_python_fix(settings))
    return _End(node=node, trouble=said or "it ended with an error", fix=_VOLUME_FIX)


def _python_fix(settings: KubeSettings) -> str:
    return (
        f"name an image in which {settings.python} runs, such as pollux-training:0.1.0, or the Python that "
        "it has in POLLUX_KUBE_PYTHON"
    )


def _waits_for(status: Json, settings: KubeSettings) -> tuple[str, str]:
    """What a pod waits for, and what to do about it."""
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if waiting:
            said = f"{reason} {waiting.get('message') or ''}".strip()
            if "subPath" in said:
                return said, _FOLDER_FIX
            if "Image" in reason:
                return said, "name an image that the nodes can pull; --pod takes one with imagePullSecrets"
            if reason == "CreateContainerConfigError":
                return said, "correct that in the pod: --pod takes a whole one"
            return said, _VOLUME_FIX if reason == "ContainerCreating" else _python_fix(settings)
    for condition in status.get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"]), _PLACE_FIX
    return str(status.get("phase")), _VOLUME_FIX

"""Why a worker pod does not come to work, or how it ended, in words for the job's owner; pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any

Json = Mapping[str, Any]

_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_OVERDUE_S = 120.0
"""The kubelet of Kubernetes 1.20 takes up to a minute and a half to end a pod deleted while it started."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """``fatal``: it lies with the job itself, so that no other node would help. ``homeless``: a pod finds no
    node, be it that the one it is meant for has not enough left.
    """

    reason: str
    fatal: bool = False
    homeless: bool = False


def pod_trouble(
    pod: Json, place_wait_s: float, waited_s: float, *, pull_wait_s: float = inf
) -> Trouble | None:
    """What keeps a pod from running after ``waited_s``.

    A node or image that cannot be had counts after ``place_wait_s``, a start without any known trouble after
    ``pull_wait_s``.
    """
    status = pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending" or waited_s < place_wait_s:
        return None
    name = pod["metadata"]["name"]
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in _IMAGE_REASONS | _CONFIG_REASONS:
            why = f"{container.get('image') or container.get('name')}: {waiting.get('message') or ''}"
            return Trouble(f"{name}: {reason}: {why}".rstrip(": "), fatal=True)
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            why = condition.get("message") or condition.get("reason") or "no node was found"
            return Trouble(f"{name} finds no node: {why}", homeless=True)
    if waited_s >= pull_wait_s:
        return Trouble(f"{name} has not started within {pull_wait_s:.0f} s")
    return None


def is_starting(pod: Json) -> bool:
    """Whether a kubelet has it, and is about to start its containers; nobody else has asked it to end."""
    bound = bool((pod.get("spec") or {}).get("nodeName")) and not pod["metadata"].get("deletionTimestamp")
    return bound and (pod.get("status") or {}).get("phase", "Pending") == "Pending"


def makes_room(pods: Iterable[Json], resources: Iterable[str], now_unix_s: float) -> str:
    """The name of one of a node's pods that is about to give GPUs back, empty if there is none.

    A pod that is to be gone for longer than a kubelet may take is not waited for.
    """
    wanted = frozenset(resources)
    for pod in pods:
        due = pod["metadata"].get("deletionTimestamp")
        containers = (pod.get("spec") or {}).get("containers") or ()
        asked = {name for item in containers for name in (item.get("resources") or {}).get("limits") or ()}
        if due and asked & wanted and now_unix_s < datetime.fromisoformat(due).timestamp() + _OVERDUE_S:
            return str(pod["metadata"]["name"])
    return ""


def was_taken(pod: Json) -> bool:
    """Whether its node ended a pod or would not have it (evicted, no device left), or somebody deletes it."""
    status = pod.get("status") or {}
    return bool(pod["metadata"].get("deletionTimestamp")) or (
        status.get("phase") == "Failed" and bool(status.get("reason"))
    )


def end_note(pod: Json) -> str:
    """How a pod ended where its own output does not tell: evicted, out of memory, killed; else empty."""
    status = pod.get("status") or {}
    notes = []
    if status.get("phase") == "Failed" and status.get("reason"):
        notes.append(f"the pod was ended: {status['reason']}: {status.get('message') or ''}".rstrip(": "))
    for container in _containers(pod):
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            notes.append(f"{container.get('name')} was killed: out of memory (OOMKilled), raise its limit")
        elif ended.get("reason") in _CONFIG_REASONS | {"ContainerCannotRun", "StartError"}:
            notes.append(f"{container.get('name')} could not run: {ended.get('message') or ended['reason']}")
    return "; ".join(notes)


def last_words(pod: Json) -> str:
    """What the kubelet kept of the output of containers that failed; empty if nothing."""
    ends = ((part.get("state") or {}).get("terminated") or {} for part in _containers(pod))
    return "\n".join(
        text for end in ends if end.get("exitCode") and (text := (end.get("message") or "").strip())
    )


def _containers(pod: Json) -> Iterator[Json]:
    status = pod.get("status") or {}
    for part in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(part) or ()

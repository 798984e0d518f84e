"""What crosses between operator, scheduler and driver as a pod's labels and annotations.

The driver pod of a job has the job's name and carries, as annotations: ``identity``, ``spec``,
``submitted``, ``run``, ``try`` and ``fresh`` (set when it is made), ``decision`` and ``allocation`` (the
scheduler's), ``lost`` (nodes that the scheduler found lost), ``stop`` (anyone's request), ``state`` (the
driver's DriverState), ``settings`` and ``worker`` (how workers are made).
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG

PREFIX = "pollux.dev/"

ROLE = f"{PREFIX}role"
JOB = f"{PREFIX}job"
DEPLOYMENT = f"{PREFIX}deployment"
NODE = f"{PREFIX}node"
INCARNATION = f"{PREFIX}incarnation"
FINISH = f"{PREFIX}finish"
"""What becomes of a driver's pod once job and task are over: the operator's ``on_finish_action``."""

IDENTITY = f"{PREFIX}identity"
SPEC = f"{PREFIX}spec"
SUBMITTED = f"{PREFIX}submitted"
RUN = f"{PREFIX}run"
TRY = f"{PREFIX}try"
FRESH = f"{PREFIX}fresh"
DECISION = f"{PREFIX}decision"
ALLOCATION = f"{PREFIX}allocation"
LOST = f"{PREFIX}lost"
STOP = f"{PREFIX}stop"
STATE = f"{PREFIX}state"
SETTINGS = f"{PREFIX}settings"
WORKER = f"{PREFIX}worker"

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""The one of a pod that ``kubectl logs`` shows."""

DRIVER_ROLE = "driver"
WORKER_ROLE = "worker"
JOB_DIR = "/pollux/job"
"""Where driver and workers find the job's folder."""

POD_VARIABLE = "POLLUX_DRIVER_POD"
NAMESPACE_VARIABLE = "POLLUX_DRIVER_NAMESPACE"
"""By which the driver knows its own pod."""

Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class KubeDriverSettings:
    """How one job's driver works.

    ``python`` runs the launcher in the workers' image. ``gpu_resources`` are the extended resources that
    count as GPUs, the first one without a suffix in node names. ``place_wait_s`` is how long worker pods may
    find no node or image, ``pull_wait_s`` how long they may take to start where nothing is known to be
    wrong, or where GPUs are about to be given back by pods of the namespace that end; after that the job goes
    back to what it worked on before.
    """

    schema: int = 1
    python: str = "python"
    gpu_resources: tuple[str, ...] = ("nvidia.com/gpu",)
    mlflow_tracking_uri: str = ""
    grace_s: Seconds = 30.0
    report_interval_s: Seconds = 30.0
    checkpoint_interval_s: Seconds = 30.0
    place_wait_s: Seconds = 60.0
    pull_wait_s: Seconds = 600.0


def node_key(node: str, resource: str, resources: tuple[str, ...]) -> str:
    """The name under which GPUs of one resource on one node are scheduled: the node's own for the first
    resource, with the resource's last part behind a colon for any other.
    """
    return node if resource == resources[0] else f"{node}:{resource.rpartition('/')[2]}"


def node_and_resource(key: str, resources: tuple[str, ...]) -> tuple[str, str]:
    """The inverse of :func:`node_key`; raises DocumentError for a resource that is none of ``resources``."""
    node, colon, suffix = key.partition(":")
    if not colon:
        return node, resources[0]
    for resource in resources:
        if resource.rpartition("/")[2] == suffix:
            return node, resource
    raise DocumentError(f"node {key!r}: no GPU resource ends in {suffix!r}; there are {', '.join(resources)}")


def annotations(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod.get("metadata", {}).get("annotations") or {}


def labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod.get("metadata", {}).get("labels") or {}


def has_ended(pod: Mapping[str, Any], container: str) -> bool:
    """Whether a container of a pod that restarts none has ended; another one may run on beside it."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(
        each.get("name") == container and (each.get("state") or {}).get("terminated") for each in statuses
    )


def is_terminal(pod: Mapping[str, Any]) -> bool:
    """Whether all its containers have ended for good, so that it holds nothing any more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

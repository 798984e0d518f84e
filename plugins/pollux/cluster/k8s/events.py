"""Events on a job's pod, so that ``kubectl describe`` tells the story of its allocations."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pollux_agent.driver.kube.api import KubeApi, KubeError
from pollux_agent.protocol import Allocation, Placement

logger = logging.getLogger(__name__)

_MAX_MESSAGE = 1_000


def tell(api: KubeApi, pod: Mapping[str, Any], before: Placement, after: Allocation) -> None:
    """Placed, Grown, Shrunk, Moved or Waiting, with the reason; what cannot be told is left out."""
    reason, message = story(before, after)
    meta = pod["metadata"]
    now = datetime.fromtimestamp(api.server_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "reason": reason,
        "message": message[:_MAX_MESSAGE],
        "type": "Normal",
        "source": {"component": "pollux"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    try:
        api.create(f"/api/v1/namespaces/{meta['namespace']}/events", event)
    except KubeError as error:
        logger.info("No event %s for %s: %s", reason, meta["name"], error)


def story(before: Placement, after: Allocation) -> tuple[str, str]:
    """An event's reason and message."""
    old, new = sum(before.values()), after.num_gpus
    where = ", ".join(f"{node} x {gpus}" for node, gpus in after.placement.items())
    if not new:
        reason, what = "Waiting", f"{old} -> 0 GPUs" if old else "no GPUs"
    elif not old:
        reason, what = "Placed", f"{new} GPUs on {where}"
    elif new == old:
        reason, what = "Moved", f"{new} GPUs, now on {where}"
    else:
        reason, what = ("Grown" if new > old else "Shrunk"), f"{old} -> {new} GPUs, now on {where}"
    because = f": {after.reason}" if after.reason else ""
    return reason, f"{what} (decision {after.decision}){because}"

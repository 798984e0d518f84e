"""A driver pod's output, which holds its workers' too, line by line from a cursor."""

from collections.abc import Mapping
from typing import Any

from pollux.cluster.base import LogChunk
from pollux.errors import Refused
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path

_MAX_BYTES = 256 * 1024


def read(api: KubeApi, pod: Mapping[str, Any], cursor: str) -> LogChunk:
    """Whole lines after ``cursor``, which is the pod's uid and the time of the last line.

    A cursor of another pod (the driver was lost and made again) starts from the beginning. Raises Refused
    for one that is none, KubeError.
    """
    meta = pod["metadata"]
    uid, slash, last = cursor.partition("/")
    if cursor and not slash:
        raise Refused(f"cursor: {cursor[:80]!r} is none of this cluster's; start with an empty one")
    if uid != meta["uid"]:
        last = ""
    try:
        body = api.text(
            pod_path(meta["namespace"], meta["name"], "log"),
            timestamps="true",
            sinceTime=last,
            limitBytes=_MAX_BYTES,
        )
    except KubeError as error:
        if error.status in (400, 404):  # not started yet, or gone with its node
            return LogChunk(lines=(), cursor=cursor)
        raise
    lines = []
    whole = body[: body.rfind(b"\n") + 1] or body
    for line in whole.decode(errors="replace").splitlines():
        when, _, text = line.partition(" ")
        if when > last and when[:1].isdigit():  # the kubelet's own complaints carry no time
            lines.append(text)
            last = when
    return LogChunk(lines=tuple(lines), cursor=f"{meta['uid']}/{last}")

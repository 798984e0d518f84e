"""A driver pod's output, which holds its workers' too, line by line from a cursor."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pollux.cluster.base import LogChunk
from pollux.errors import Refused
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.documents import DEFAULT_CONTAINER, annotations

_MAX_BYTES, _MOST_BYTES = 256 * 1024, 4 * 1024 * 1024
"""Of one answer; more only where less brings nothing new, since the kubelet begins at a whole second."""


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
    limit, lines, newest = _MAX_BYTES, list[str](), last
    while not lines and limit <= _MOST_BYTES:
        try:
            body = api.text(
                pod_path(meta["namespace"], meta["name"], "log"),
                timestamps="true",
                sinceTime=last,
                limitBytes=limit,
                container=_container(pod),
            )
        except KubeError as error:
            if error.status in (400, 404):  # not started yet, or gone with its node
                return LogChunk(lines=(), cursor=cursor)
            raise
        lines, newest = _new_lines(body, last)
        if len(body) < limit:
            break
        limit *= 4
    else:
        if not lines:
            newest = _next_second(last)
            lines = [f"[pollux] more was printed in the second of {last} than is shown"]
    return LogChunk(lines=tuple(lines), cursor=f"{meta['uid']}/{newest}")


def _container(pod: Mapping[str, Any]) -> str:
    """The one that runs the driver, where a service mesh, say, has added others; empty where it is alone."""
    names = [str(each.get("name", "")) for each in (pod.get("spec") or {}).get("containers") or ()]
    if len(names) < 2:
        return ""
    return annotations(pod).get(DEFAULT_CONTAINER) or ("base" if "base" in names else names[0])


def _new_lines(body: bytes, last: str) -> tuple[list[str], str]:
    """Those after ``last``, and the time of the latest."""
    lines = []
    whole = body[: body.rfind(b"\n") + 1] or body
    for line in whole.decode(errors="replace").splitlines():
        when, _, text = line.partition(" ")
        if when > last and when[:1].isdigit():  # the kubelet's own complaints carry no time
            lines.append(text)
            last = when
    return lines, last


def _next_second(when: str) -> str:
    """Before all times of the next second, as texts; nothing where it is no time of ours."""
    try:
        second = datetime.strptime(when[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC) + timedelta(seconds=1)
    except ValueError:
        return when
    return second.strftime("%Y-%m-%dT%H:%M:%S.000000000Z")

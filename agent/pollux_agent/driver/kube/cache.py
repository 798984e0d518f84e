"""What is known of a job's pods: listed once, then kept up to date by a watch in a thread of its own."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path

logger = logging.getLogger(__name__)

_WATCH_S = 60.0
_PAUSE_S = 1.0
_MAX_PAUSE_S = 15.0


class PodCache:
    """Pods of one namespace that match a label selector. ``changed`` is set after every change.

    A watch that ends goes on from where it was; one that is too old (410) starts with a new list.
    """

    def __init__(self, api: KubeApi, namespace: str, selector: str) -> None:
        self.changed = threading.Event()
        self._api = api
        self._path = pod_path(namespace)
        self._selector = selector
        self._lock = threading.Lock()
        self._pods: dict[str, dict[str, Any]] = {}
        self._seen: set[str] = set()
        self._listed_s = 0.0
        self._version = ""

    def start(self) -> None:
        """List now, then watch for good; raises KubeError if the first list fails."""
        self._list()
        threading.Thread(target=self._follow, name="pods", daemon=True).start()

    def pods(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> pod, as last heard."""
        with self._lock:
            return dict(self._pods)

    def is_gone(self, name: str, uid: str, created_s: float) -> bool:
        """Whether a pod that was created at ``created_s`` (monotonic) is there no more, so that its absence
        is not only the watch being late.
        """
        with self._lock:
            present = self._pods.get(name, {}).get("metadata", {}).get("uid") == uid
            return not present and (uid in self._seen or self._listed_s > created_s)

    def _list(self) -> None:
        began_s = time.monotonic()
        items, version = self._api.list_with_version(self._path, labelSelector=self._selector)
        with self._lock:
            self._pods = {pod["metadata"]["name"]: pod for pod in items}
            self._seen |= {pod["metadata"]["uid"] for pod in items}
            self._listed_s = began_s
            self._version = version
        self.changed.set()

    def _follow(self) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                if not self._version:
                    self._list()
                self._watch()
                pause_s = _PAUSE_S
            except (KubeError, ValueError, LookupError) as error:  # an answer that is none of the API's, too
                logger.warning("The job's pods cannot be watched: %s", error)
                self._version = ""
                if not (isinstance(error, KubeError) and error.status == 410):
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _watch(self) -> None:
        began_s = time.monotonic()
        events = self._api.watch(
            self._path,
            version=self._version,
            timeout_s=_WATCH_S,
            labelSelector=self._selector,
            allowWatchBookmarks="true",
        )
        for event in events:
            self._take(event)
        if time.monotonic() - began_s < _PAUSE_S:
            time.sleep(_PAUSE_S)

    def _take(self, event: Mapping[str, Any]) -> None:
        pod = event["object"]
        meta = pod["metadata"]
        with self._lock:
            self._version = str(meta["resourceVersion"])
            if event["type"] == "BOOKMARK":
                return
            self._seen.add(meta["uid"])
            if event["type"] == "DELETED":
                self._pods.pop(meta["name"], None)
            else:
                self._pods[meta["name"]] = pod
        self.changed.set()

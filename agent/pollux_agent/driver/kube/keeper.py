"""A driver keeps its own pod readable: what somebody breaks of its annotations and labels is put back."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.notes import READERS, fault_of

logger = logging.getLogger(__name__)

_FIRST: Mapping[str, str] = {doc.STOP: "", doc.LOST: "[]", doc.RUN: ""}
"""What may be put back before anything sound was seen: a run is found again by the job's name."""


@dataclass(slots=True, kw_only=True)
class Keeper:
    """Remembers each annotation as it was last sound; the state is not among them, which the driver tells
    anew. ``labels`` are the ones that the pod must have.
    """

    api: KubeApi
    labels: Mapping[str, str]
    _sound: dict[str, str] = field(default_factory=lambda: dict(_FIRST), init=False)
    _said: str = field(default="", init=False)

    def mend(self, pod: Mapping[str, Any]) -> None:
        """Put back what is broken in the pod as seen, unless it has changed since; then again at the next
        look.
        """
        notes = doc.annotations(pod)
        broken = {}
        for name in READERS.keys() - {doc.STATE}:
            if name in notes and notes[name] == self._sound.get(name):
                continue
            if fault := fault_of(notes, name):
                broken[name] = fault
            elif name in notes:
                self._sound[name] = notes[name]
        kept = {name: self._sound[name] for name in broken if name in self._sound}
        labels = {name: text for name, text in self.labels.items() if doc.labels(pod).get(name) != text}
        if kept or labels:
            self._put_back(pod, kept, labels)
        self._say("; ".join([*sorted(broken.values()), *(f"label {name}: not as it was" for name in labels)]))

    def _put_back(self, pod: Mapping[str, Any], notes: Mapping[str, str], labels: Mapping[str, str]) -> None:
        meta = pod["metadata"]
        changes = {"resourceVersion": meta["resourceVersion"], "annotations": notes, "labels": labels}
        try:
            self.api.patch(pod_path(meta["namespace"], meta["name"]), {"metadata": changes})
        except KubeError as error:
            if error.status != 409:
                logger.warning("What is broken of the driver's pod could not be put back: %s", error)

    def _say(self, what: str) -> None:
        """Once for each fault."""
        if what and what != self._said:
            logger.error("Somebody changed the driver's pod: %s; what the driver knows is put back", what)
        self._said = what

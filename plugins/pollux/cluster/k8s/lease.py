"""One Lease a cluster: who schedules now, and the last decision's number.

Times are the API server's own (the ``Date`` of its answers), so that clocks that differ or jump change
nothing. Every change is conditional on the Lease's resourceVersion.
"""

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pollux.cluster.base import MAX_LEASE
from pollux.cluster.k8s.claim import Claim
from pollux.cluster.k8s.nodes import unix_s
from pollux.cluster.numbers import next_number, read_counter
from pollux.errors import Conflict
from pollux_agent.driver.kube.api import KubeApi, KubeError
from pollux_agent.driver.kube.documents import DECISION, annotations

logger = logging.getLogger(__name__)

NAME = "pollux-scheduler"
_TRIES = 5
_CLOCKS_DIFFER_S = 60.0
"""Servers' clocks may; a lease that runs for longer than it was taken for is from before one was set back."""


@dataclass(frozen=True, slots=True)
class SchedulingLease:
    """The Lease ``pollux-scheduler`` in ``namespace``; methods raise KubeError besides what they name."""

    api: KubeApi
    namespace: str
    claim: Claim | None = None

    @contextmanager
    def hold(self, holder: str, ttl: timedelta) -> Iterator[None]:
        """Hold it; raises Conflict while another holder has it, ConfigError where ``claim`` is wrong."""
        self._take(holder, ttl)
        try:
            yield
        finally:
            with suppress(KubeError):
                self._give_back(holder)

    def last_decision(self) -> int:
        """The last number given out, 0 before the first."""
        lease = self._read()
        return (read_counter(_text(lease)) or 0) if lease else 0

    def next_decision(self, found: Collection[int]) -> int:
        """A number above all given out before and above those that were ``found`` elsewhere, as far as these
        count; a Lease that holds no number has one again. Raises Conflict if others are always faster.
        """
        for _ in range(_TRIES):
            lease = self._read() or self._create()
            text = _text(lease)
            number = next_number(read_counter(text), found)
            lease["metadata"].setdefault("annotations", {})[DECISION] = str(number)
            if self._replace(lease):
                if text and read_counter(text) is None:
                    logger.error(
                        "Lease %s/%s held %r for the last decision, after which none can come; goes on with "
                        "%d, above what is found on jobs",
                        self.namespace,
                        NAME,
                        text[:40],
                        number,
                    )
                return number
        raise Conflict(f"lease {self.namespace}/{NAME}: others change it all the time; try again")

    def _take(self, holder: str, ttl: timedelta) -> None:
        lease = self._read() or self._create()
        spec = lease.setdefault("spec", {})
        now = self.api.server_unix_s
        if self.claim is not None:
            self.claim.note(lease, now)
        other = spec.get("holderIdentity") or ""
        lasts_s = min(float(spec.get("leaseDurationSeconds") or 0), MAX_LEASE.total_seconds())
        left_s = unix_s(spec.get("renewTime")) + lasts_s - now
        if other and other != holder and 0 < left_s <= lasts_s + _CLOCKS_DIFFER_S:
            raise Conflict(f"the scheduling lease is held by {other} for another {left_s:.0f} s at most")
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec |= {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, math.ceil(ttl.total_seconds())),
            "acquireTime": stamp,
            "renewTime": stamp,
        }
        if not self._replace(lease):
            raise Conflict("another scheduler took the scheduling lease just now")

    def _give_back(self, holder: str) -> None:
        lease = self._read()
        if lease and (lease.get("spec") or {}).get("holderIdentity") == holder:
            lease["spec"]["holderIdentity"] = ""
            self._replace(lease)

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"

    def _read(self) -> dict[str, Any] | None:
        try:
            return self.api.get(f"{self._path}/{NAME}")
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def _create(self) -> dict[str, Any]:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": self.namespace},
            "spec": {},
        }
        try:
            return self.api.create(self._path, lease)
        except KubeError as error:
            if error.status != 409:
                raise
            return self.api.get(f"{self._path}/{NAME}")

    def _replace(self, lease: dict[str, Any]) -> bool:
        """Whether nobody had changed it since it was read."""
        try:
            self.api.replace(f"{self._path}/{NAME}", lease)
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        return True


def _text(lease: dict[str, Any]) -> str:
    return annotations(lease).get(DECISION, "")

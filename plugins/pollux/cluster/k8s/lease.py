"""One Lease a cluster: who schedules now, and the last decision's number.

Times are the API server's own (the ``Date`` of its answers), so that clocks that differ or jump change
nothing. Every change is conditional on the Lease's resourceVersion.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pollux.cluster.k8s.claim import Claim
from pollux.cluster.k8s.nodes import unix_s
from pollux.errors import Conflict
from pollux_agent.driver.kube.api import KubeApi, KubeError
from pollux_agent.driver.kube.documents import DECISION, annotations

NAME = "pollux-scheduler"
_TRIES = 5


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
        return _number(lease) if lease else 0

    def next_decision(self, largest_on_jobs: int) -> int:
        """A number above all given out before and above ``largest_on_jobs``; raises Conflict if others are
        always faster.
        """
        for _ in range(_TRIES):
            lease = self._read() or self._create()
            number = max(_number(lease), largest_on_jobs) + 1
            lease["metadata"].setdefault("annotations", {})[DECISION] = str(number)
            if self._replace(lease):
                return number
        raise Conflict(f"lease {self.namespace}/{NAME}: others change it all the time; try again")

    def _take(self, holder: str, ttl: timedelta) -> None:
        lease = self._read() or self._create()
        spec = lease.setdefault("spec", {})
        now = self.api.server_unix_s
        if self.claim is not None:
            self.claim.note(lease, now)
        other = spec.get("holderIdentity") or ""
        until = unix_s(spec.get("renewTime")) + float(spec.get("leaseDurationSeconds") or 0)
        if other and other != holder and now < until:
            raise Conflict(f"the scheduling lease is held by {other} for another {until - now:.0f} s at most")
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


def _number(lease: dict[str, Any]) -> int:
    text = annotations(lease).get(DECISION, "0")
    return int(text) if text.isdigit() else 0

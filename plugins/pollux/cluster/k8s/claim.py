"""Whose a deployment's name is, noted on the scheduling Lease.

Two Airflows under one name would take each other's jobs for orphans of their own, and end them.
"""

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pollux.errors import ConfigError
from pollux.settings import Settings
from pollux_agent.driver.kube.documents import PREFIX, annotations

_OWNER = f"{PREFIX}owner-of-"
_LEAST_KEPT_S = 600.0
_CYCLES_KEPT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That the name ``deployment`` belongs to ``owner``, for ``kept_s`` seconds after its last cycle."""

    deployment: str
    owner: str
    kept_s: float

    def note(self, lease: dict[str, Any], now_unix_s: float) -> None:
        """Write it on the Lease; raises ConfigError where the name is another's by then."""
        key = _OWNER + self.deployment
        other, until_unix_s = _read(annotations(lease).get(key, ""))
        if other not in ("", self.owner) and now_unix_s < until_unix_s <= now_unix_s + self._longest_s:
            raise ConfigError(
                f"POLLUX_DEPLOYMENT: {self.deployment!r} is the name of the Airflow at {other}; this one, at "
                f"{self.owner}, would end its jobs: give one of them another name (deployment in the chart). "
                f"If it moved here, wait {until_unix_s - now_unix_s:.0f} s"
            )
        text = json.dumps([self.owner, round(now_unix_s + self.kept_s)])
        lease["metadata"].setdefault("annotations", {})[key] = text

    @property
    def _longest_s(self) -> float:
        """A claim for longer was made before the server's clock was set back, or by nobody that we know."""
        return max(self.kept_s, 86_400.0 * _CYCLES_KEPT)


def claim_of(config: Settings) -> Claim | None:
    """That of an Airflow that ends orphans: known by its address, or by its state folder where the address is
    one of this machine alone, whose port changes; None for any other.
    """
    if not config.airflow_url:
        return None
    owner = config.airflow_url.rstrip("/")
    if (urlsplit(owner).hostname or "").startswith(("localhost", "127.", "::1")):
        owner = f"{config.state} on {socket.gethostname()}"
    kept_s = max(_LEAST_KEPT_S, _CYCLES_KEPT * config.interval_s)
    return Claim(deployment=config.deployment, owner=owner, kept_s=kept_s)


def _read(text: str) -> tuple[str, float]:
    """Owner, and until when; nobody where that cannot be read."""
    try:
        owner, until_unix_s = json.loads(text)
        return str(owner), float(until_unix_s)
    except (ValueError, TypeError, RecursionError):
        return "", 0.0

"""Which right each part needs on Kubernetes: the chart grants these, and the doctor asks for them; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Scope = Literal["cluster", "jobs", "lease"]
"""cluster: everywhere; jobs: the namespaces of jobs; lease: the namespace of the scheduling Lease."""

LEASE_NAME = "pollux-scheduler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource (``pods/log`` is a part of it); ``name`` where one object is enough."""

    verb: str
    resource: str
    group: str = ""
    scope: Scope = "jobs"
    name: str = ""

    def in_words(self, namespace: str) -> str:
        where = f"in namespace {namespace}" if namespace else "in the whole cluster"
        return f"{self.verb} {self.resource}{f' {self.name}' if self.name else ''} {where}"


def _rights(verbs: str, resource: str, **more: str) -> tuple[Right, ...]:
    return tuple(Right(verb=verb, resource=resource, **more) for verb in verbs.split())  # type: ignore[arg-type]


SHADOW = (
    *_rights("get list", "nodes", scope="cluster"),
    *_rights("get list", "pods", scope="cluster"),
    *_rights("list", "resourcequotas", scope="cluster"),
)
"""What a cycle that only looks needs."""

SCHEDULER = (
    *SHADOW,
    *_rights("patch", "pods"),
    *_rights("create", "events"),
    *_rights("create", "leases", group="coordination.k8s.io", scope="lease"),
    *_rights("get update", "leases", group="coordination.k8s.io", scope="lease", name=LEASE_NAME),
)
"""The scheduling task: sees all that holds GPUs, and writes allocations, events and its Lease."""

OPERATOR = (
    *_rights("create get list watch patch delete", "pods"),
    *_rights("get", "pods/log"),
    *_rights("list watch", "events"),
)
"""Airflow's tasks and triggers, for driver pods."""

DRIVER = (*_rights("create get list watch patch delete", "pods"), *_rights("get", "pods/log"))
"""A driver, for its job's worker pods. Workers have no right at all."""

ROLES: Mapping[str, Sequence[Right]] = {
    "scheduler": SCHEDULER,
    "shadow": SHADOW,
    "operator": OPERATOR,
    "driver": DRIVER,
}


def rule(rights: Sequence[Right]) -> str:
    """The rules that grant ``rights``, as the YAML of a Role; one rule a resource and object."""
    verbs: dict[tuple[str, str, str], list[str]] = {}
    for right in rights:
        verbs.setdefault((right.group, right.resource, right.name), []).append(right.verb)
    lines = []
    for (group, resource, name), of_one in verbs.items():
        only = f', resourceNames: ["{name}"]' if name else ""
        lines.append(
            f'- {{apiGroups: ["{group}"], resources: ["{resource}"]{only}, verbs: [{", ".join(of_one)}]}}'
        )
    return "\n".join(lines)

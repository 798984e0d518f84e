"""``pollux doctor``: what an installation lacks, and the exact rule or value to add."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.cluster.k8s.settings import KubeSettings
from pollux.cluster.local import LocalCluster
from pollux.doctor.access import check_rights
from pollux.doctor.capacity import check_nodes, check_quotas
from pollux.doctor.finding import Finding, failed, ok
from pollux.doctor.services import check_airflow, check_mlflow
from pollux.doctor.storage import check_storage
from pollux.doctor.versions import check_mlflow_version, check_packages, check_server
from pollux.errors import ClusterError
from pollux.settings import Settings
from pollux_agent.driver.kube.api import KubeError, open_api

__all__ = ["Finding", "KubePlan", "examine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubePlan:
    """What to look at on Kubernetes.

    ``roles`` are those of :mod:`pollux.doctor.rights`; ``account`` is whose rights are asked for, empty for
    the caller's own; ``pod`` is a template of the pods that try the storage, None to leave that out.
    """

    settings: KubeSettings
    namespaces: Sequence[str]
    roles: Sequence[str]
    account: str = ""
    pod: Mapping[str, Any] | None = None


def examine(config: Settings, kube: KubePlan | None) -> Iterator[Finding]:
    """All checks, one after the other; without ``kube`` those of the local cluster."""
    yield from check_packages()
    yield _check_state(config)
    yield from check_airflow(config)
    uri = config.mlflow_tracking_uri
    yield from check_mlflow(config, (kube.settings.mlflow_tracking_uri if kube else "") or uri)
    yield from check_mlflow_version(config)
    if kube is None:
        yield _check_local(config)
        return
    try:
        yield from _check_kubernetes(kube)
    except KubeError as error:
        fix = "" if error.unavailable else "see the rights above"
        yield failed("Kubernetes", str(error), fix or "correct POLLUX_KUBE_CONFIG or KUBECONFIG, or start it")


def _check_kubernetes(kube: KubePlan) -> Iterator[Finding]:
    settings = kube.settings
    api = open_api(settings.config, settings.context)
    yield from check_server(api)
    places = {"cluster": ("",), "jobs": tuple(kube.namespaces), "lease": (settings.lease_in,)}
    yield from check_rights(api, kube.roles, places, kube.account)  # type: ignore[arg-type]
    yield from check_nodes(list(api.items("/api/v1/nodes")), settings)
    yield from check_quotas(list(api.items("/api/v1/resourcequotas")), kube.namespaces, settings)
    for namespace in kube.namespaces:
        yield from check_storage(api, settings, namespace, kube.pod)


def _check_state(config: Settings) -> Finding:
    probe = config.state / ".doctor"
    try:
        config.state.mkdir(parents=True, exist_ok=True)
        probe.write_text("written by pollux doctor")
        probe.unlink()
    except OSError as error:
        fix = "mount a writable volume there, or name another folder in POLLUX_STATE"
        return failed("state folder", f"{config.state} cannot be written: {error}", fix)
    return ok("state folder", f"{config.state} can be written")


def _check_local(config: Settings) -> Finding:
    try:
        view = LocalCluster(config.socket).observe()
    except ClusterError as error:
        return failed("local cluster", str(error), f"pollux stack up --state {config.state}")
    gpus = sum(node.gpus for node in view.nodes)
    return ok("local cluster", f"{len(view.nodes)} nodes with {gpus} slots, {len(view.jobs)} jobs")

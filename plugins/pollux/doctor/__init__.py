"""``pollux doctor``: what an installation lacks, and the exact rule or value to add."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.cluster.k8s.settings import KubeSettings
from pollux.cluster.local import LocalCluster
from pollux.doctor.access import check_places, check_rights
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
    ``login_elsewhere``: Airflow's pods have a log-in that cannot be had here.
    """

    settings: KubeSettings
    namespaces: Sequence[str]
    roles: Sequence[str]
    account: str = ""
    pod: Mapping[str, Any] | None = None
    login_elsewhere: bool = False


def examine(config: Settings, kube: KubePlan | None) -> Iterator[Finding]:
    """All checks, one after the other; without ``kube`` those of the local cluster."""
    yield from check_packages()
    yield _check_state(config)
    yield from check_airflow(config, login_elsewhere=kube is not None and kube.login_elsewhere)
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
    yield from check_places(api, _namespaces(kube), _accounts(kube))
    account = settings.driver_service_account
    yield from check_rights(api, kube.roles, places, kube.account, account)  # type: ignore[arg-type]
    yield from check_nodes(list(api.items("/api/v1/nodes")), settings)
    yield from check_quotas(list(api.items("/api/v1/resourcequotas")), kube.namespaces, settings)
    for namespace in kube.namespaces:
        try:
            yield from check_storage(api, settings, namespace, kube.pod)
        except KubeError as error:
            yield failed(
                "shared storage", f"no pod can be run in {namespace}: {error}", "see the rights above"
            )


def _namespaces(kube: KubePlan) -> Mapping[str, str]:
    """Namespace -> what names it."""
    lease = {kube.settings.lease_in: "leaseNamespace (POLLUX_KUBE_LEASE_NAMESPACE)"}
    return lease | dict.fromkeys(kube.namespaces, "namespaces (POLLUX_KUBE_NAMESPACES, --namespace)")


def _accounts(kube: KubePlan) -> Mapping[str, str]:
    """ServiceAccount -> what names it."""
    found = {kube.account: "--account"} if kube.account else {}
    if name := kube.settings.driver_service_account:
        value = "driver.serviceAccount.name (POLLUX_KUBE_DRIVER_SERVICE_ACCOUNT)"
        found |= {f"{namespace}/{name}": value for namespace in kube.namespaces}
    return found


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

"""The settings that an installed chart gives to Airflow's pods, for a doctor that is not in one of them."""

from urllib.parse import quote

from pollux.errors import ConfigError
from pollux_agent.driver.kube.api import KubeApi

_INSIDE = frozenset(
    {"POLLUX_STATE", "POLLUX_AIRFLOW_LOGIN", "POLLUX_METRICS_TOKEN", "POLLUX_KUBE_POD_TEMPLATE"}
)
"""Paths in those pods."""


def settings_of(api: KubeApi, release: str) -> dict[str, str]:
    """The variables of ``NAMESPACE/RELEASE``, from its ConfigMap.

    MLflow's address is told as the one that pods use as well, since the doctor may go another way to it.
    Raises ConfigError for a release that is not there, KubeError.
    """
    namespace, _, name = release.partition("/")
    if not namespace or not name or "/" in name:
        raise ConfigError(f"--release: {release!r} is no NAMESPACE/RELEASE, such as airflow/pollux")
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps"
    found = [
        item
        for item in api.items(path, labelSelector=f"app.kubernetes.io/instance={name}")
        if item["metadata"]["name"].endswith("-settings")
    ]
    if not found:
        raise ConfigError(
            f"--release: namespace {namespace} has no release {name} of the chart; see helm list -A"
        )
    given = {key: str(value) for key, value in (found[0].get("data") or {}).items() if key not in _INSIDE}
    if uri := given.get("MLFLOW_TRACKING_URI"):
        given.setdefault("POLLUX_KUBE_MLFLOW_TRACKING_URI", uri)
    return given

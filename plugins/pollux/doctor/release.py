"""What an installed chart gives to Airflow's pods, for a doctor that is not in one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from pollux.errors import ConfigError
from pollux_agent.driver.kube.api import KubeApi

_INSIDE = frozenset(
    {"POLLUX_STATE", "POLLUX_AIRFLOW_LOGIN", "POLLUX_METRICS_TOKEN", "POLLUX_KUBE_POD_TEMPLATE"}
)
"""Paths in those pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """``settings`` are variables, but for those in ``inside``, which are paths that lead nowhere else;
    ``training_pod`` is the pod of tasks that name none, if there is one.
    """

    settings: Mapping[str, str]
    inside: frozenset[str]
    training_pod: Mapping[str, Any] | None


def read_release(api: KubeApi, release: str) -> Release:
    """What ``NAMESPACE/RELEASE`` gives, from its ConfigMaps.

    MLflow's address is told as the one that pods use as well, since the doctor may go another way to it.
    Raises ConfigError for a release that is not there, KubeError.
    """
    namespace, _, name = release.partition("/")
    if not namespace or not name or "/" in name:
        raise ConfigError(f"--release: {release!r} is no NAMESPACE/RELEASE, such as airflow/pollux")
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/configmaps"
    maps = {
        item["metadata"]["name"].rpartition("-")[2]: item.get("data") or {}
        for item in api.items(path, labelSelector=f"app.kubernetes.io/instance={name}")
    }
    if "settings" not in maps:
        raise ConfigError(
            f"--release: namespace {namespace} has no release {name} of the chart; see helm list -A"
        )
    data = {key: str(value) for key, value in maps["settings"].items()}
    given = {key: value for key, value in data.items() if key not in _INSIDE}
    if uri := given.get("MLFLOW_TRACKING_URI"):
        given.setdefault("POLLUX_KUBE_MLFLOW_TRACKING_URI", uri)
    pod = maps.get("training", {}).get("pod.yaml")
    return Release(
        settings=given,
        inside=_INSIDE & data.keys(),
        training_pod=yaml.safe_load(pod) if pod else None,
    )

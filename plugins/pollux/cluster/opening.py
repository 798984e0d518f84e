"""The cluster that the settings name, as the scheduler and the pages and commands for people see it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pollux.settings import Settings

if TYPE_CHECKING:
    from pollux.cluster.k8s import KubeCluster
    from pollux.cluster.local import LocalCluster


def open_cluster(config: Settings, environ: Mapping[str, str] | None = None) -> "LocalCluster | KubeCluster":
    """``environ`` has the settings of Kubernetes, by default the process's own.

    Raises ConfigError where those are wrong, and ClusterUnavailable where it is not reached.
    """
    if config.cluster == "local":
        from pollux.cluster.local import LocalCluster

        return LocalCluster(config.socket)
    from pollux.cluster.k8s import KubeCluster, kube_settings
    from pollux.cluster.k8s.calls import translated
    from pollux.cluster.k8s.claim import claim_of
    from pollux_agent.driver.kube.api import open_api

    kube = kube_settings(environ)
    with translated("connection to Kubernetes"):
        return KubeCluster(open_api(kube.config, kube.context), kube, claim=claim_of(config))

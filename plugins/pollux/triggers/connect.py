"""How operator and trigger reach the cluster that the settings name."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pollux.cluster.base import JobControl
from pollux.errors import Refused
from pollux.settings import Settings

if TYPE_CHECKING:
    from pollux.cluster.k8s import KubeCluster, KubeSettings

DEFAULT_CONNECTION = "kubernetes_default"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeReach:
    """Which way a task goes to Kubernetes: names only, never what is behind them, since a trigger's row in
    Airflow's database holds this.
    """

    namespace: str
    config_file: str | None = None
    context: str | None = None
    in_cluster: bool | None = None
    conn_id: str | None = None
    grace_s: float | None = None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def connect(config: Settings, cluster: str | None = None) -> JobControl:
    """The local cluster, if that is the one that ``cluster`` or else the settings name.

    Raises Refused for another kind of cluster.
    """
    kind = cluster or config.cluster
    if kind != "local":
        raise Refused(f"cluster is {kind!r}; set it to 'local' or 'kubernetes'")
    from pollux.cluster.local import LocalCluster

    return LocalCluster(config.socket)


def connect_kubernetes(
    config: Settings, reach: KubeReach, user_pod: Callable[[], Mapping[str, Any]] | None = None
) -> "KubeCluster":
    """The Kubernetes cluster, bound to the task's namespace; raises ConfigError and ClusterUnavailable."""
    from pollux.cluster.k8s import KubeCluster, kube_settings

    kube = kube_settings()
    return KubeCluster(
        _api(kube, reach),
        kube if reach.grace_s is None else replace(kube, grace_s=reach.grace_s),
        namespace=reach.namespace,
        user_pod=user_pod,
        mlflow_tracking_uri=config.mlflow_tracking_uri,
    )


def cursor_file(config: Settings, job_id: str, cluster: str = "local") -> Path:
    """Where the relay remembers how much of a job's output is in Airflow's logs."""
    if cluster == "local":
        return config.jobs / job_id / "relayed.cursor"
    folder = config.state / "relayed"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{job_id}.cursor"


def _api(kube: "KubeSettings", reach: KubeReach) -> Any:
    """Airflow's connection where the task names one, else a kubeconfig, else the pod's own cluster."""
    from pollux.cluster.k8s.calls import translated
    from pollux_agent.driver.kube.api import KubeApi, open_api

    with translated("connection to Kubernetes"):
        if reach.conn_id not in (None, DEFAULT_CONNECTION):
            from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook

            hook = KubernetesHook(
                conn_id=reach.conn_id,
                in_cluster=reach.in_cluster,
                config_file=reach.config_file,
                cluster_context=reach.context,
            )
            return KubeApi(hook.get_conn())
        if reach.config_file is not None:
            return open_api(Path(reach.config_file), reach.context or "")
        if reach.in_cluster:
            return open_api()
        return open_api(kube.config, reach.context or kube.context)

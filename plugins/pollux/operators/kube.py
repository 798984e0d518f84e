"""What the operator does on Kubernetes besides: the user's pod from its own parameters, and its way there."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.providers.cncf.kubernetes.callbacks import ExecutionMode
from airflow.providers.cncf.kubernetes.operators.pod import KubernetesPodOperator
from airflow.providers.cncf.kubernetes.utils.pod_manager import OnFinishAction
from kubernetes import client as kube_client

from pollux.cluster.k8s import kube_settings
from pollux.triggers.connect import DEFAULT_CONNECTION, KubeReach
from pollux_agent.driver.kube import documents as doc

if TYPE_CHECKING:
    from pollux.cluster.k8s import KubeCluster

MAX_LOSSES = 10
"""Drivers lost in a row within one try, each soon after it began."""
LONG_LIVED_S = 300.0
_DRIVER_ENDS_S = 10.0
_LOOK_EVERY_S = 0.5


def reach_of(operator: KubernetesPodOperator) -> KubeReach:
    """The operator's own way to the cluster and its namespace; raises ConfigError."""
    grace = operator.termination_grace_period
    return KubeReach(
        namespace=operator.namespace or kube_settings().namespace,
        config_file=operator.config_file,
        context=operator.cluster_context,
        in_cluster=operator.in_cluster,
        conn_id=operator.kubernetes_conn_id,
        grace_s=None if grace is None else max(1.0, float(grace)),
    )


def user_pod(operator: KubernetesPodOperator, context: Any) -> Mapping[str, Any]:
    """The pod that the operator's parameters describe, as the base class builds it, in JSON values."""
    kube = kube_settings()
    if operator.config_file is None and not operator.in_cluster and kube.config is not None:
        operator.config_file = str(kube.config)
        if operator.kubernetes_conn_id == DEFAULT_CONNECTION:
            operator.kubernetes_conn_id = None
    if operator.namespace is None:
        operator.namespace = kube.namespace
    given = (operator.pod_template_file, operator.pod_template_dict, operator.full_pod_spec)
    if kube.pod_template is not None and not any(given):
        operator.pod_template_file = str(kube.pod_template)
    wants_xcom, operator.do_xcom_push = operator.do_xcom_push, False  # a worker pod needs no sidecar for it
    try:
        pod = operator.build_pod_request_obj(context)
    finally:
        operator.do_xcom_push = wants_xcom
    for callback in operator.callbacks:
        callback.on_pod_manifest_created(
            pod_request=pod,
            client=operator.client,
            mode=ExecutionMode.SYNC,
            context=context,
            operator=operator,
        )
    plain = kube_client.ApiClient(kube_client.Configuration()).sanitize_for_serialization(pod)
    plain["metadata"].setdefault("labels", {})[doc.FINISH] = operator.on_finish_action.value
    return dict(plain)


def driver_ends(cluster: "KubeCluster", job_id: str) -> bool:
    """Whether the driver of a job that is over ends within a few seconds: one that has figures left for
    MLflow goes on until it has sent them. Raises ClusterError.
    """
    until_s = time.monotonic() + _DRIVER_ENDS_S
    while cluster.is_closing(job_id):
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def deletes_pod(operator: KubernetesPodOperator, *, succeeded: bool) -> bool:
    """Whether the driver's pod goes once the task has its verdict."""
    action = operator.on_finish_action
    return action == OnFinishAction.DELETE_POD or (
        action == OnFinishAction.DELETE_SUCCEEDED_POD and succeeded
    )

"""From the user's pod to a job's driver pod, which carries that pod as the template of workers; pure."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from pollux.cluster.base import JobIdentity
from pollux.cluster.k8s.settings import KubeSettings
from pollux.errors import Refused
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.state import DriverState
from pollux_agent.protocol import Allocation, JobSpec, encode

Json = Mapping[str, Any]

OPERATOR_LABELS = frozenset(
    {
        *("dag_id", "task_id", "run_id", "map_index", "try_number", "parent_dag_id"),
        *("kubernetes_pod_operator", "airflow_version", "airflow_kpo_in_cluster", "already_checked"),
        doc.FINISH,
    }
)
"""The driver's alone: by all but the last KubernetesPodOperator finds its pod."""

DRIVER_SECURITY: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Of a driver's container."""

_JOB_VOLUME = "pollux-job"
_MLFLOW_LOGIN = "MLFLOW_TRACKING_"
_TMP = "/tmp"  # noqa: S108 - a mount point
_LEAVE_LOST_NODES_S = 30
_GONE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_EXTRA_GRACE_S = 30
_PASSED_ON = (
    *("imagePullSecrets", "priorityClassName", "schedulerName", "securityContext"),
    *("activeDeadlineSeconds", "dnsPolicy", "dnsConfig", "hostAliases"),
)


def driver_pod(
    user_pod: Json,
    *,
    job_id: str,
    namespace: str,
    notes: Mapping[str, str],
    deployment: str,
    settings: KubeSettings,
    container_name: str = "base",
) -> dict[str, Any]:
    """The driver pod of a job: named as the job, with ``notes`` and the template of workers as annotations.

    Raises Refused where there is no image, or no volume for the jobs' folders.
    """
    spec = dict(user_pod.get("spec") or {})
    base = _container(spec, container_name)
    image = settings.driver_image or base.get("image")
    if not base.get("image"):
        raise Refused("image: not set; name the image with the training script and its libraries")
    if not settings.jobs_volume:
        raise Refused(
            "POLLUX_KUBE_JOBS_VOLUME: not set; name a volume that all nodes can mount, such as "
            '{"persistentVolumeClaim": {"claimName": "pollux-jobs"}}'
        )
    own_image = bool(settings.driver_image)
    meta = user_pod.get("metadata") or {}
    tolerations = _tolerations(spec, settings)
    volumes = [_job_volume(settings), *([] if own_image else spec.get("volumes") or ())]
    theirs = (
        [] if own_image else [part for part in base.get("volumeMounts") or () if part["mountPath"] != _TMP]
    )
    mounts = [_job_mount(job_id), *theirs, {"name": "pollux-tmp", "mountPath": _TMP}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": job_id,
            "namespace": namespace,
            "labels": {
                **(meta.get("labels") or {}),
                doc.ROLE: doc.DRIVER_ROLE,
                doc.JOB: job_id,
                doc.DEPLOYMENT: deployment,
            },
            "annotations": {
                **(meta.get("annotations") or {}),
                **notes,
                doc.DEFAULT_CONTAINER: container_name,
                doc.WORKER: worker_template(user_pod, job_id, settings, container_name),
            },
        },
        "spec": {
            **{name: spec[name] for name in _PASSED_ON if spec.get(name)},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": round(settings.grace_s + _EXTRA_GRACE_S),
            "tolerations": tolerations,
            **({"hostNetwork": True} if spec.get("hostNetwork") and not own_image else {}),
            **({"serviceAccountName": settings.driver_service_account} if _has_account(settings) else {}),
            "containers": [
                {
                    "name": container_name,
                    "image": image,
                    **_maybe(base, "imagePullPolicy"),
                    "command": [settings.python, "-m", "pollux_agent.cli", "drive"],
                    "env": _driver_env(settings, base),
                    "resources": {
                        "requests": {"cpu": "50m", "memory": "128Mi"},
                        "limits": {"memory": "512Mi"},
                    },
                    "securityContext": DRIVER_SECURITY,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [*volumes, {"name": "pollux-tmp", "emptyDir": {}}],
        },
    }


def worker_template(user_pod: Json, job_id: str, settings: KubeSettings, container_name: str) -> str:
    """The user's pod as JSON, with the job's own folder mounted and its main container first."""
    spec = copy.deepcopy(dict(user_pod.get("spec") or {}))
    base = _container(spec, container_name)
    base["volumeMounts"] = [*(base.get("volumeMounts") or ()), _job_mount(job_id)]
    spec["containers"] = [base, *(part for part in spec["containers"] if part["name"] != base["name"])]
    spec["volumes"] = [*(spec.get("volumes") or ()), _job_volume(settings)]
    spec["tolerations"] = _tolerations(spec, settings)
    spec.pop("activeDeadlineSeconds", None)  # it is the job's, so the driver has it
    meta = user_pod.get("metadata") or {}
    labels = {name: text for name, text in (meta.get("labels") or {}).items() if name not in OPERATOR_LABELS}
    template = {"metadata": {"labels": labels, "annotations": meta.get("annotations") or {}}, "spec": spec}
    return json.dumps(template, sort_keys=True, separators=(",", ":"))


def first_notes(
    *,
    identity: JobIdentity,
    spec: JobSpec,
    run_id: str | None,
    submitted_unix_s: float,
    decision: int,
    try_number: int,
    fresh: bool,
    state: DriverState | None,
    settings: KubeSettings,
    mlflow_tracking_uri: str,
) -> dict[str, str]:
    """A new driver pod's annotations: the job's documents, each present, so that patches can test them."""
    driver = doc.KubeDriverSettings(
        python=settings.python,
        gpu_resources=settings.gpu_resources,
        mlflow_tracking_uri=settings.mlflow_tracking_uri or mlflow_tracking_uri,
        grace_s=settings.grace_s,
        report_interval_s=settings.report_interval_s,
        checkpoint_interval_s=settings.checkpoint_interval_s,
        place_wait_s=settings.place_wait_s,
        pull_wait_s=settings.pull_wait_s,
    )
    return {
        doc.IDENTITY: encode(identity),
        doc.SPEC: encode(spec),
        doc.SUBMITTED: repr(submitted_unix_s),
        doc.RUN: run_id or "",
        doc.TRY: str(try_number),
        doc.FRESH: "true" if fresh else "",
        doc.DECISION: str(decision),
        doc.ALLOCATION: encode(Allocation(decision=decision)),
        doc.LOST: "[]",
        doc.STOP: "",
        doc.STATE: encode(state) if state else "",
        doc.SETTINGS: encode(driver),
    }


def _container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    containers = spec.get("containers") or [{}]
    return next((part for part in containers if part.get("name") == name), containers[0])


def _tolerations(spec: Json, settings: KubeSettings) -> list[Json]:
    """The user's and the settings', and to leave a node that is gone after half a minute."""
    given = [*(spec.get("tolerations") or ()), *settings.tolerations]
    leave = [
        {
            "key": key,
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LEAVE_LOST_NODES_S,
        }
        for key in _GONE_TAINTS
    ]
    return [*given, *leave]


def _job_volume(settings: KubeSettings) -> dict[str, Any]:
    return {"name": _JOB_VOLUME, **(settings.jobs_volume or {})}


def _job_mount(job_id: str) -> dict[str, Any]:
    """Only this job's part of the volume, so that no job sees another's files."""
    return {"name": _JOB_VOLUME, "mountPath": doc.JOB_DIR, "subPath": job_id}


def _driver_env(settings: KubeSettings, base: Json) -> list[dict[str, Any]]:
    """Who it is, the settings', and the user's log-in to MLflow for what the workers could not send."""
    fields = {doc.POD_VARIABLE: "metadata.name", doc.NAMESPACE_VARIABLE: "metadata.namespace"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
    extra = {"PYTHONUNBUFFERED": "1", "HOME": _TMP, **settings.driver_env}
    login = [part for part in base.get("env") or () if part.get("name", "").startswith(_MLFLOW_LOGIN)]
    return [*own, *login, *({"name": name, "value": value} for name, value in extra.items())]


def _has_account(settings: KubeSettings) -> bool:
    return bool(settings.driver_service_account)


def _maybe(part: Json, name: str) -> dict[str, Any]:
    return {name: part[name]} if part.get(name) else {}

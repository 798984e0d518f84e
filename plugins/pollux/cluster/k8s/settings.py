"""Settings of the Kubernetes side, read from the environment by a call."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from pollux.errors import ConfigError
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import DOCUMENT_CONFIG, from_plain

_PREFIX = "POLLUX_KUBE_"
_JSON_FIELDS = frozenset({"namespaces", "gpu_resources", "tolerations", "jobs_volume", "driver_env"})

Seconds = Annotated[float, Field(gt=0)]
NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


@dataclass(frozen=True, slots=True, kw_only=True, config=DOCUMENT_CONFIG)
class KubeSettings:
    """Each field is read from ``POLLUX_KUBE_<FIELD>``; those that are no plain text are JSON.

    ``config`` is a kubeconfig and ``context`` one of its contexts (default: the pod's own cluster, else the
    user's kubeconfig). ``namespace`` is where jobs run unless their task says otherwise, and ``namespaces``
    are all that tasks may name, for the doctor to look at; ``lease_namespace`` holds the one Lease that all
    Airflow deployments of a cluster share. ``gpu_resources`` are the extended
    resources that count as GPUs; nodes carry the type of the first one in ``gpu_type_label``, and any other
    is a type of its own. ``tolerations`` are given to all job pods. ``jobs_volume`` is a pod's volume source,
    such as ``{"persistentVolumeClaim": {"claimName": "pollux-jobs"}}``, that every node can mount.
    ``pod_template`` is a file with the pod of tasks that name none themselves: image, volumes, resources.
    ``driver_image`` runs drivers (default: the task's image), ``driver_service_account`` is theirs, and
    ``driver_env`` their extra variables. ``python`` starts workers and drivers in their images.
    ``mlflow_tracking_uri`` is MLflow's address as pods see it (default: the scheduler's). A node that is not
    ready for ``lost_after_s`` is lost: pods on it are forgotten once their job moves on.
    """

    config: Path | None = None
    context: str = ""
    namespace: Name = "default"
    namespaces: tuple[Name, ...] = ()
    lease_namespace: Name | None = None
    gpu_resources: Annotated[tuple[str, ...], Field(min_length=1)] = ("nvidia.com/gpu",)
    gpu_type_label: str = "nvidia.com/gpu.product"
    tolerations: tuple[Mapping[str, Any], ...] = ()
    pod_template: Path | None = None
    jobs_volume: Mapping[str, Any] | None = None
    driver_image: str = ""
    driver_service_account: str = ""
    driver_env: Mapping[str, str] = Field(default_factory=dict)
    python: str = "python"
    mlflow_tracking_uri: str = ""
    grace_s: Seconds = 30.0
    report_interval_s: Seconds = 30.0
    checkpoint_interval_s: Seconds = 30.0
    place_wait_s: Seconds = 60.0
    pull_wait_s: Seconds = 600.0
    lost_after_s: Seconds = 30.0

    @property
    def lease_in(self) -> str:
        """The namespace of the scheduling Lease."""
        return self.lease_namespace or self.namespace


def kube_settings(environ: Mapping[str, str] | None = None) -> KubeSettings:
    """Read the settings; raises ConfigError naming the variable, its value and what is expected."""
    environ = os.environ if environ is None else environ
    plain: dict[str, Any] = {}
    for field in KubeSettings.__dataclass_fields__:
        name = _PREFIX + field.upper()
        text = environ.get(name)
        if not text:
            continue
        try:
            plain[field] = json.loads(text) if field in _JSON_FIELDS else text
        except ValueError:
            raise ConfigError(f"{name}: no JSON (got {text[:120]!r}); quote it as one JSON value") from None
    try:
        return from_plain(KubeSettings, plain)
    except DocumentError as error:
        raise ConfigError(f"environment: {error} (each field is read from {_PREFIX}<FIELD>)") from None

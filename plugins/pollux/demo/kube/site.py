"""A Kubernetes cluster as the demo's site: one that is there, or one that scripts start for it."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from pollux.cluster.k8s import KubeCluster, kube_settings
from pollux.cluster.k8s.calls import translated
from pollux.demo.jobs import DemoPlan
from pollux.demo.kube.chart import NAMESPACE, Chart
from pollux.demo.kube.jobs import WatchedJobs
from pollux.demo.kube.pod import host_pod
from pollux.demo.kube.scripts import own_cluster
from pollux.demo.site import JobLook, Site
from pollux.errors import ConfigError, DemoError
from pollux.local.nodes import LocalNode, LocalNodes
from pollux.local.serve import RESERVED_CORES
from pollux_agent.driver.kube.api import KubeApi, open_api
from pollux_agent.driver.quota import available_cores, slot_share
from pollux_agent.records import write_atomic

WHAT_TO_SET = (
    "no cluster is named; set KUBECONFIG to the kubeconfig of one with GPU nodes, or POLLUX_KUBE to a folder "
    "with up.sh and node-up.sh, which start one"
)
_PREFIX = "POLLUX_KUBE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeChoice:
    """A cluster that is there, or scripts (up.sh, node-up.sh, down.sh) that start one; the former wins."""

    kubeconfig: Path | None = None
    scripts: Path | None = None

    def check(self) -> None:
        """Raise ConfigError where neither is named, or what is named is not there."""
        if self.kubeconfig is not None:
            if not self.kubeconfig.is_file():
                raise ConfigError(f"KUBECONFIG: {self.kubeconfig} is no file; name one kubeconfig")
        elif self.scripts is None:
            raise ConfigError(WHAT_TO_SET)
        elif not all((self.scripts / name).is_file() for name in ("up.sh", "node-up.sh", "down.sh")):
            raise ConfigError(
                f"POLLUX_KUBE: {self.scripts} has no up.sh, node-up.sh and down.sh; name another"
            )


@contextmanager
def kube_site(plan: DemoPlan, choice: KubeChoice, *, state: Path, examples: Path) -> Iterator[Site]:
    """The cluster with the chart installed; what was made on it is gone after the block.

    Raises ConfigError for a cluster without GPUs, DemoError where something cannot be made.
    """
    with ExitStack() as stack:
        kubeconfig = choice.kubeconfig
        if kubeconfig is None:
            assert choice.scripts is not None
            where = state.with_name(f"{state.name}.cluster")
            kubeconfig = stack.enter_context(own_cluster(choice.scripts, where, plan.nodes))
        kubeconfig = kubeconfig.absolute()
        api = open_api(kubeconfig)
        nodes = plan.nodes if choice.kubeconfig is None else _nodes_of(api)
        chart = Chart(api=api, kubeconfig=kubeconfig, home=state / "helm")
        installed = stack.enter_context(chart.installed(jobs=state / "jobs"))
        own = {
            "CONFIG": str(chart.airflow_kubeconfig(state / "kubeconfig")),
            "PYTHON": sys.executable,
            "POD_TEMPLATE": str(_write_template(state, plan, nodes, examples)),
            "DRIVER_ENV": json.dumps(_way_to(api)),
            "REPORT_INTERVAL_S": str(plan.report_interval_s),
        }
        settings = {**installed, **{_PREFIX + name: text for name, text in own.items()}, **_given(os.environ)}
        kube = kube_settings(settings)

        def look(folder: Path) -> JobLook:
            return WatchedJobs(KubeCluster(api, kube, namespace=kube.namespace), folder / "jobs")

        yield Site(kind="kubernetes", nodes=nodes, settings=settings, look=look)


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """What a person set for a cluster of their own, such as a pod template with an image that is there."""
    return {name: text for name, text in environ.items() if name.startswith(_PREFIX) and text}


def _nodes_of(api: KubeApi) -> LocalNodes:
    """The GPUs that the cluster has to give now, node by node; only their numbers matter."""
    with translated("nodes"):
        view = KubeCluster(api, kube_settings()).observe()
    gpus = [node.gpus for node in view.nodes if node.gpus]
    if sum(gpus) < 2:
        raise ConfigError(
            f"KUBECONFIG: its cluster has {sum(gpus)} GPUs to give, and 2 are needed at least; add a node "
            "whose status has nvidia.com/gpu"
        )
    return LocalNodes(
        nodes=tuple(LocalNode(name=f"node-{number}", slots=slots) for number, slots in enumerate(gpus))
    )


def _write_template(state: Path, plan: DemoPlan, nodes: LocalNodes, examples: Path) -> Path:
    """The pod of the demo's workers: this machine's own Python, a GPU being a share of its CPU as locally."""
    share = slot_share(
        num_slots=nodes.num_slots, cap=plan.slot_cap, reserve=RESERVED_CORES, num_cores=available_cores()
    )
    path = state / "pod.json"
    write_atomic(path, json.dumps(host_pod(share, working_dir=examples)).encode())
    return path


def _way_to(api: KubeApi) -> dict[str, str]:
    """The API server's address as a pod on the host's network reaches it without a cluster's proxy."""
    server = urlparse(api.client.configuration.host)
    if server.hostname is None:
        raise DemoError(f"the API server's address is no URL: {api.client.configuration.host}")
    port = server.port or (443 if server.scheme == "https" else 80)
    return {"KUBERNETES_SERVICE_HOST": server.hostname, "KUBERNETES_SERVICE_PORT": str(port)}


__all__ = ["NAMESPACE", "KubeChoice", "kube_site"]

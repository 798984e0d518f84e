"""``pollux bench kube``: what a cycle costs on a large cluster, on a real API server and MLflow server.

Nodes are objects without a kubelet, and job pods are bound to them but never run; all else is real. Each
round times a cycle's parts: to observe (cluster and model store), to decide, and to patch so many jobs.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from pollux.act import Act
from pollux.cluster.base import ClusterView, JobIdentity
from pollux.cluster.k8s.cluster import KubeCluster
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.settings import KubeSettings
from pollux.errors import PolluxError
from pollux.local.ports import LOOPBACK, free_port
from pollux.observe import build_snapshot
from pollux.plan import Action, plan
from pollux.policy import decide
from pollux.settings import Settings
from pollux.store import JobRecord, ModelStore
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.manifest import Gang, worker_pod
from pollux_agent.driver.machine import Start
from pollux_agent.driver.state import DriverState
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import REPORT_TAG, Allocation, JobSpec, Report, encode

GPUS_A_NODE = 8
_PREFIX = "pollux-bench-"
_FIRST_PORT, _NUM_PORTS = 15_000, 5_000
"""Below those that the kernel gives to clients."""
_FIT = ThroughputParams(
    alpha_grad=0.02,
    beta_grad=0.004,
    alpha_sync_local=0.01,
    beta_sync_local=0.001,
    alpha_sync_node=0.03,
    beta_sync_node=0.002,
    gamma=1.5,
)
_SPEC = JobSpec(
    name="bench",
    script="b.py",
    initial_batch_size=32,
    max_local_batch_size=128,
    max_batch_size=1024,
    max_gpus=16,
)
Follow = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large; ``changes`` are the jobs whose allocation one cycle changes."""

    nodes: int = 256
    jobs: int = 500
    changes: int = 50
    rounds: int = 5


@dataclass(slots=True)
class Timings:
    """Seconds and API calls of each round, and what could not be patched."""

    observe_s: list[float] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)
    patch_s: list[float] = field(default_factory=list)
    observe_calls: list[int] = field(default_factory=list)
    patch_calls: list[int] = field(default_factory=list)
    not_patched: int = 0

    def figures(self) -> dict[str, float]:
        """Medians by name; ``total_s`` is that of the sums."""
        sums = [sum(parts) for parts in zip(self.observe_s, self.decide_s, self.patch_s, strict=True)]
        return {
            "observe_s": median(self.observe_s),
            "decide_s": median(self.decide_s),
            "patch_s": median(self.patch_s),
            "total_s": median(sums),
            "observe_calls": median(self.observe_calls),
            "patch_calls": median(self.patch_calls),
            "not_patched": self.not_patched,
        }


def bench_kube(api: KubeApi, size: Size, folder: Path, follow: Follow) -> Timings:
    """Measure; everything that was made on the cluster is removed again. Raises PolluxError, KubeError."""
    name = f"{_PREFIX}{uuid4().hex[:8]}"
    kube = KubeSettings(namespace=name, jobs_volume={"emptyDir": {}})
    with _mlflow(folder) as uri:
        config = Settings(
            state=folder, cluster="kubernetes", deployment=name[:40], mlflow_tracking_uri=uri, experiment=name
        )
        store = ModelStore(
            uri, experiment=name, decisions_experiment=f"{name}-decisions", deployment=config.deployment
        )
        try:
            _fill_cluster(api, name, kube, size, follow)
            cluster = KubeCluster(api, kube)
            _fill_store(store, uri, cluster.observe(), follow)
            return _measure(cluster, store, config, size, follow)
        finally:
            follow("removes what it made", 1.0)
            _empty(api, name, size)


def _measure(
    cluster: KubeCluster, store: ModelStore, config: Settings, size: Size, follow: Follow
) -> Timings:
    timings = Timings()
    for turn in range(size.rounds):
        follow(f"round {turn + 1}", turn / size.rounds)
        with cluster.lease("bench", timedelta(minutes=5)):
            began_s, calls = time.perf_counter(), cluster.api.num_calls
            number = cluster.next_decision()
            view = cluster.observe()
            snapshot = build_snapshot(
                view,
                _records(view, store),
                decision=number,
                now_unix_s=time.time(),
                settings=config,
                state={},
            )
            observed_s = time.perf_counter()
            timings.observe_calls.append(cluster.api.num_calls - calls)
            plan(snapshot, decide(snapshot))
            decided_s, calls = time.perf_counter(), cluster.api.num_calls
            actions = _changes(view, size.changes, grow=turn % 2 == 1)
            act = Act(cluster, actions, decision=number, still_ours=lambda: True)
            outcomes = act.run(0.0)
            timings.patch_s.append(time.perf_counter() - decided_s)
            timings.patch_calls.append(cluster.api.num_calls - calls)
            timings.not_patched += sum(outcome.outcome != "done" for outcome in outcomes)
            timings.observe_s.append(observed_s - began_s)
            timings.decide_s.append(decided_s - observed_s)
    return timings


def _records(view: ClusterView, store: ModelStore) -> Mapping[str, JobRecord]:
    reports = store.reports()
    return {job.job_id: reports[job.job_id] for job in view.jobs if job.job_id in reports}


def _changes(view: ClusterView, count: int, *, grow: bool) -> tuple[Action, ...]:
    """Takes one GPU from each of so many jobs, or gives it back."""
    actions = []
    for job in view.jobs[:count]:
        ((node, gpus),) = job.allocation.placement.items()
        after = {node: gpus + (1 if grow else -1)}
        actions.append(
            Action(
                job_id=job.job_id,
                kind="grow" if grow else "shrink",
                before=job.allocation.placement,
                after=after,
                expected=job.allocation.decision,
                reason="bench",
            )
        )
    return tuple(actions)


def _fill_cluster(api: KubeApi, name: str, kube: KubeSettings, size: Size, follow: Follow) -> None:
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    for number in range(size.nodes):
        follow("makes nodes", number / size.nodes)
        _make_node(api, f"{name}-{number}")
    _await_account(api, name)
    for number in range(size.jobs):
        follow("makes jobs", number / size.jobs)
        _make_job(api, name, kube, number, f"{name}-{number % size.nodes}")


def _make_node(api: KubeApi, name: str) -> None:
    api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
    sizes = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": str(GPUS_A_NODE)}
    ready = {"type": "Ready", "status": "True", "reason": "Bench", "message": "has no kubelet"}
    status = {"capacity": sizes, "allocatable": sizes, "conditions": [ready]}
    api.patch(f"/api/v1/nodes/{name}/status", {"status": status})


def _make_job(api: KubeApi, namespace: str, kube: KubeSettings, number: int, node: str) -> None:
    """A job that runs on three GPUs of a node; its pods are bound but nothing starts them."""
    job_id = f"bench-{number}"
    placement = {node: 3}
    notes = first_notes(
        identity=JobIdentity(deployment=namespace[:40], dag_id="bench", run_id=str(number), task_id="bench"),
        spec=_SPEC,
        run_id=f"run-{number}",
        submitted_unix_s=time.time(),
        decision=0,
        try_number=1,
        fresh=False,
        state=DriverState(phase="running", incarnation=1, placement=placement, max_gpus_seen=3),
        settings=kube,
        mlflow_tracking_uri="",
    )
    notes[doc.ALLOCATION] = encode(Allocation(decision=0, placement=placement))
    user = {"spec": {"containers": [{"name": "base", "image": "localhost/none:1"}]}}
    driver = driver_pod(
        user, job_id=job_id, namespace=namespace, notes=notes, deployment=namespace[:40], settings=kube
    )
    driver["spec"]["nodeName"] = node
    made = api.create(pod_path(namespace), driver)
    gang = Gang(
        job_id=job_id,
        driver=made,
        template=json.loads(doc.annotations(made)[doc.WORKER]),
        start=Start(incarnation=1, placement=placement, signal_unix_s=None),
        settings=doc.KubeDriverSettings(),
        gpu_type="gpu",
        env={},
        mlflow_run_id="",
    )
    worker = worker_pod(gang, 0, "")
    worker["spec"]["nodeName"] = node
    api.create(pod_path(namespace), worker)


def _await_account(api: KubeApi, namespace: str) -> None:
    """Pods are refused until the namespace's account is there, with a token on old servers."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(KubeError):
            account = api.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default")
            if account.get("secrets") or int(str(api.get("/version")["minor"]).rstrip("+")) >= 24:
                return
        time.sleep(0.2)
    raise PolluxError(f"namespace {namespace} got no service account within a minute; look at its controller")


def _fill_store(store: ModelStore, uri: str, view: ClusterView, follow: Follow) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    for number, job in enumerate(view.jobs):
        follow("makes MLflow runs", number / len(view.jobs))
        run_id = store.ensure_run(job.job_id, job.identity, job.spec, time.time())
        report = Report(
            job_id=job.job_id,
            incarnation=1,
            sequence=1,
            time_unix_s=time.time(),
            fits={"gpu": replace(_FIT, alpha_grad=0.01 + 0.0001 * number)},
            noise_scale=400.0 + number,
            initial_batch_size=_SPEC.initial_batch_size,
            max_batch_size=_SPEC.batch_size_limit,
            max_local_batch_size=_SPEC.max_local_batch_size,
            max_gpus_seen=4,
            progress=100.0,
            goodput=900.0,
        )
        client.set_tag(run_id, REPORT_TAG, encode(report))


@contextlib.contextmanager
def _mlflow(folder: Path) -> Iterator[str]:
    """An MLflow server of our own on the loopback address."""
    port = free_port(_FIRST_PORT + os.getpid() % _NUM_PORTS)
    command = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environ = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with (folder / "mlflow.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
    uri = f"http://{LOOPBACK}:{port}"
    try:
        _await_server(uri, process, folder / "mlflow.log")
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(30)


def _await_server(uri: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    import httpx

    until_s = time.monotonic() + 90
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{uri}/health", trust_env=False).is_success:
                return
        time.sleep(0.2)
    raise PolluxError(f"MLflow did not start: {log.read_text()[-1000:]}")


def _empty(api: KubeApi, name: str, size: Size) -> None:
    path: Any = pod_path(name)
    with contextlib.suppress(KubeError):
        for pod in list(api.items(path)):
            api.delete(f"{path}/{pod['metadata']['name']}", grace_s=0)
    for number in range(size.nodes):
        with contextlib.suppress(KubeError):
            api.delete(f"/api/v1/nodes/{name}-{number}")
    with contextlib.suppress(KubeError):
        api.delete(f"/api/v1/namespaces/{name}")

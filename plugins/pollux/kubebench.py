"""``pollux bench kube``: what a cycle costs on a large cluster, on a real API server and MLflow server.

Nodes are objects without a kubelet, and job pods are bound to them but never run; all else is real. Each
round is a cycle as the scheduling task runs it, from taking the lease to giving it back, and its parts are
timed: to observe cluster and model store, both at once, to decide, and to patch so many jobs. What is
patched is not what was decided but a GPU less, or more, for each of them, so that every round changes as
many.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar
from uuid import uuid4

from pollux.act import Act
from pollux.cluster.base import ClusterView, JobIdentity
from pollux.cluster.k8s.cluster import KubeCluster
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.settings import KubeSettings
from pollux.cycle import observe_both
from pollux.errors import PolluxError
from pollux.jobruns import job_records
from pollux.local.ports import LOOPBACK, free_port
from pollux.observe import build_snapshot
from pollux.plan import Action, plan
from pollux.policy import decide
from pollux.settings import Settings
from pollux.stack import tether
from pollux.store import ModelStore
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import PAGE_SIZE, KubeApi, KubeError, pod_path
from pollux_agent.driver.kube.manifest import Gang, worker_pod
from pollux_agent.driver.machine import Start
from pollux_agent.driver.state import DriverState
from pollux_agent.model.throughput import ThroughputParams
from pollux_agent.protocol import REPORT_TAG, Allocation, JobSpec, Report, encode

GPUS_A_NODE = 8
PARTS = ("observe", "decide", "patch", "total")
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
T = TypeVar("T")
_MAKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large; ``changes`` are the numbers of jobs whose allocation a cycle changes, each measured."""

    nodes: int = 256
    jobs: int = 500
    changes: tuple[int, ...] = (50, 500)
    rounds: int = 5
    policy: str = "ours"

    def calls_at_most(self, changes: int, patch_s: float) -> int:
        """API calls that a cycle may make: a patch and an event for each change, ten for the lease, and one
        for each five seconds of patching; nodes, quotas and pods (a driver and a worker a job) page by page,
        twice where the first view has grown old until the patches.
        """
        view = -(-self.nodes // PAGE_SIZE) + -(-2 * self.jobs // PAGE_SIZE) + 1
        return 2 * changes + 10 + 2 * view + int(patch_s / 5)


@dataclass(slots=True)
class Round:
    """One cycle: seconds and API calls of its parts, how many calls it might make, and what could not be
    patched."""

    parts_s: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    calls_at_most: int = 0
    not_patched: int = 0

    @contextlib.contextmanager
    def part(self, name: str, api: KubeApi) -> Iterator[None]:
        began_s, calls = time.perf_counter(), api.num_calls
        yield
        self.parts_s[name] = time.perf_counter() - began_s
        self.calls[name] = api.num_calls - calls


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Median seconds by name; ``total`` is the whole cycle. The largest numbers of calls of any cycle."""
    seconds = {f"{name}_s": median(one.parts_s[name] for one in rounds) for name in PARTS}
    return {
        **seconds,
        "calls": max(one.calls["total"] for one in rounds),
        "patch_calls": max(one.calls["patch"] for one in rounds),
        "calls_too_many": max(0, *(one.calls["total"] - one.calls_at_most for one in rounds)),
        "not_patched": sum(one.not_patched for one in rounds),
    }


def bench_kube(api: KubeApi, size: Size, folder: Path, follow: Follow) -> dict[int, list[Round]]:
    """Measure; everything that was made on the cluster is removed again. Raises PolluxError, KubeError."""
    name = f"{_PREFIX}{uuid4().hex[:8]}"
    kube = KubeSettings(namespace=name, jobs_volume={"emptyDir": {}})
    with _mlflow(folder) as uri:
        config = Settings(
            state=folder,
            cluster="kubernetes",
            deployment=name[:40],
            policy=size.policy,
            mlflow_tracking_uri=uri,
            experiment=name,
        )
        store = ModelStore(
            uri, experiment=name, decisions_experiment=f"{name}-decisions", deployment=config.deployment
        )
        try:
            jobs = [_Job(number=number, deployment=config.deployment) for number in range(size.jobs)]
            _fill_store(store, uri, jobs, follow)
            _fill_cluster(api, name, kube, size, jobs, follow)
            found: dict[int, list[Round]] = {}
            for changes in size.changes:
                found[changes] = []
                for turn in range(size.rounds):
                    follow(f"cycles with {changes} changes", turn / size.rounds)
                    cluster = KubeCluster(api, kube)
                    found[changes].append(_cycle(cluster, store, config, size, changes, turn))
            return found
        finally:
            _empty(api, name, size, follow)


def _cycle(
    cluster: KubeCluster, store: ModelStore, config: Settings, size: Size, changes: int, turn: int
) -> Round:
    """A cycle of a task process of its own, which knows nothing of the one before."""
    found = Round()
    api = cluster.api
    with found.part("total", api), cluster.lease("bench", timedelta(minutes=5)):
        with found.part("observe", api):
            number, view, reports = observe_both(cluster, store)
            known, _ = job_records(cluster, store, view, reports, config)
        with found.part("decide", api):
            snapshot = build_snapshot(
                view, known, decision=number, now_unix_s=time.time(), settings=config, state={}
            )
            plan(snapshot, decide(snapshot))
        if len(snapshot.jobs) != len(view.jobs):
            raise PolluxError(f"{len(snapshot.jobs)} of {len(view.jobs)} jobs have an MLflow run")
        with found.part("patch", api):
            actions = _changes(view, changes, grow=turn % 2 == 1)
            outcomes = Act(cluster, actions, decision=number, still_ours=lambda: True).run(0.0)
        found.not_patched = sum(outcome.outcome != "done" for outcome in outcomes)
    found.calls_at_most = size.calls_at_most(changes, found.parts_s["patch"])
    return found


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


@dataclass(slots=True, kw_only=True)
class _Job:
    """One job of the bench, and its MLflow run once it is made."""

    number: int
    deployment: str
    run_id: str = ""
    submitted_unix_s: float = field(default_factory=time.time)

    @property
    def job_id(self) -> str:
        return f"bench-{self.number}"

    @property
    def identity(self) -> JobIdentity:
        return JobIdentity(
            deployment=self.deployment, dag_id="bench", run_id=str(self.number), task_id="bench"
        )


def _fill_cluster(
    api: KubeApi, name: str, kube: KubeSettings, size: Size, jobs: Sequence[_Job], follow: Follow
) -> None:
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    _at_once(
        "makes nodes", [f"{name}-{number}" for number in range(size.nodes)], partial(_make_node, api), follow
    )
    _await_account(api, name)
    make = partial(_make_job, api, name, kube, num_nodes=size.nodes)
    _at_once("makes jobs", jobs, make, follow)


def _at_once(what: str, items: Sequence[T], make: Callable[[T], None], follow: Follow) -> None:
    """Make them in a few threads, since the time is that of the servers' answers."""
    with ThreadPoolExecutor(_MAKERS) as pool:
        for number, _ in enumerate(pool.map(make, items)):
            follow(what, number / len(items))


def _make_node(api: KubeApi, name: str) -> None:
    api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
    sizes = {"cpu": "96", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": str(GPUS_A_NODE)}
    ready = {"type": "Ready", "status": "True", "reason": "Bench", "message": "has no kubelet"}
    status = {"capacity": sizes, "allocatable": sizes, "conditions": [ready]}
    api.patch(f"/api/v1/nodes/{name}/status", {"status": status})


def _make_job(api: KubeApi, namespace: str, kube: KubeSettings, job: _Job, *, num_nodes: int) -> None:
    """A job that runs on three GPUs of a node; its pods are bound but nothing starts them."""
    node = f"{namespace}-{job.number % num_nodes}"
    placement = {node: 3}
    notes = first_notes(
        identity=job.identity,
        spec=_SPEC,
        run_id=job.run_id,
        submitted_unix_s=job.submitted_unix_s,
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
        user, job_id=job.job_id, namespace=namespace, notes=notes, deployment=job.deployment, settings=kube
    )
    driver["spec"]["nodeName"] = node
    made = api.create(pod_path(namespace), driver)
    gang = Gang(
        job_id=job.job_id,
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


def _fill_store(store: ModelStore, uri: str, jobs: Sequence[_Job], follow: Follow) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)

    def make(job: _Job) -> None:
        job.run_id = store.ensure_run(job.job_id, job.identity, _SPEC, job.submitted_unix_s)
        client.set_tag(job.run_id, REPORT_TAG, encode(_report(job)))

    _at_once("makes MLflow runs", jobs, make, follow)


def _report(job: _Job) -> Report:
    return Report(
        job_id=job.job_id,
        incarnation=1,
        sequence=1,
        time_unix_s=time.time(),
        fits={"gpu": replace(_FIT, alpha_grad=0.01 + 0.0001 * job.number)},
        noise_scale=400.0 + job.number,
        initial_batch_size=_SPEC.initial_batch_size,
        max_batch_size=_SPEC.batch_size_limit,
        max_local_batch_size=_SPEC.max_local_batch_size,
        max_gpus_seen=4,
        progress=100.0,
        goodput=900.0,
    )


@contextlib.contextmanager
def _mlflow(folder: Path) -> Iterator[str]:
    """An MLflow server of our own on the loopback address."""
    port = free_port(_FIRST_PORT + os.getpid() % _NUM_PORTS)
    command = [sys.executable, "-IS", tether.__file__, str(os.getpid())]
    command += [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port)]
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


def _empty(api: KubeApi, name: str, size: Size, follow: Follow) -> None:
    path = pod_path(name)

    def remove(what: str) -> None:
        with contextlib.suppress(KubeError):
            api.delete(what, grace_s=0)

    with contextlib.suppress(KubeError):
        pods = [f"{path}/{pod['metadata']['name']}" for pod in api.items(path)]
        nodes = [f"/api/v1/nodes/{name}-{number}" for number in range(size.nodes)]
        _at_once("removes what it made", pods + nodes, remove, follow)
    remove(f"/api/v1/namespaces/{name}")

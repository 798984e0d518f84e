"""The minute DAG schedules real trainings on real nodes: shrunk for a newcomer, grown when it is gone."""

from collections.abc import Iterator

import pytest
from kube_nodes import GPU, TOP, TestKube, awaited, long_run
from kube_stack import KubeStack, kube_stack
from mlflow import MlflowClient

from pollux_agent.driver.kube.api import pod_path
from pollux_agent.driver.kube.documents import JOB_DIR

pytestmark = [pytest.mark.needs("kube"), pytest.mark.e2e, pytest.mark.timeout(1200)]

TARGET = 0.95
NODES = {"node-0": 4, "node-1": 4}


@pytest.fixture(scope="module")
def stack(kube: TestKube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeStack]:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    namespace = kube.namespace("training")
    with kube_stack(kube, namespace, tmp_path_factory.mktemp("kube")) as running:
        yield running


@pytest.fixture
def tenants(stack: KubeStack) -> Iterator[None]:
    """Somebody else's pods, which leave one GPU on each node."""
    path = pod_path(stack.namespace)
    for node, gpus in NODES.items():
        body = {
            "metadata": {"name": f"tenant-{node}"},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "base",
                        "image": "localhost/busybox:1",
                        "command": ["sleep", "3600"],
                        "resources": {"limits": {GPU: str(gpus - 1)}},
                    }
                ],
            },
        }
        stack.kube.api.create(path, body)
    for node in NODES:
        tenant = f"{path}/tenant-{node}"
        awaited(lambda tenant=tenant: stack.kube.api.get(tenant)["status"]["phase"] == "Running")
    yield
    for node in NODES:
        stack.kube.api.delete(f"{path}/tenant-{node}", grace_s=0)


@long_run
def test_digits_shrinks_for_a_newcomer_grows_again_and_reaches_its_target(
    stack: KubeStack, tenants: None
) -> None:
    digits = stack.train(
        name="digits",
        script=str(TOP / "agent/examples/digits.py"),
        epochs=60,
        max_gpus=2,
        initial_batch_size=32,
    )
    digits.wait(digits.runs_on(2), "it grows to both GPUs that others leave")
    newcomer = stack.train(
        name="newcomer",
        script=str(TOP / "tests/e2e/steady_training.py"),
        arguments=["--until", f"{JOB_DIR}/stop"],
        kind="rigid",
        scaling_rule="none",
        initial_batch_size=8,
        max_local_batch_size=8,
        max_gpus=1,
    )
    other = newcomer.wait(newcomer.runs_on(1), "the newcomer gets one of them")
    job = digits.wait(digits.runs_on(1), "digits goes on with the other one")
    pods = list(stack.kube.api.items(pod_path(stack.namespace), labelSelector="pollux.dev/role=worker"))
    assert [pod["spec"]["automountServiceAccountToken"] for pod in pods] == [False, False]
    (stack.jobs / other.job_id / "stop").touch()
    newcomer.wait(lambda job, task: task.state == "success", "the newcomer ends")
    digits.wait(
        lambda job, task: task.state == "success" or digits.runs_on(2)(job, task), "digits grows again"
    )
    digits.wait(lambda job, task: task.state == "success", "digits is done", 600)

    assert digits.task.try_number == 1
    sizes = digits.sizes(job.job_id)
    assert sizes[:4] == [1, 2, 1, 2], sizes
    run = MlflowClient(stack.mlflow_url).get_run(job.mlflow_run_id)
    assert run.data.metrics["val_accuracy"] >= TARGET
    awaited(
        lambda: MlflowClient(stack.mlflow_url).get_run(job.mlflow_run_id).info.status,
        lambda status: status == "FINISHED",
        30,
    )
    assert "resizing 2 -> 1 GPUs" in digits.log()
    assert "validation accuracy" in digits.log()
    told = stack.kube.api.items(f"/api/v1/namespaces/{stack.namespace}/events")
    reasons = {event["reason"] for event in told if event["involvedObject"]["name"] == job.job_id}
    assert {"Placed", "Grown", "Shrunk"} <= reasons
    awaited(stack.cluster.held, lambda held: not held, 30)

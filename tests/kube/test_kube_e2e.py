"""The minute DAG schedules real trainings on real nodes: shrunk for a newcomer, grown when it is gone, moved
off a lost node; and a person's acts reach the job.
"""

import base64
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from kube_jobs import tenant
from kube_nodes import TOP, TestKube, awaited
from kube_stack import DAG, SYNC_DAG, KubeStack, KubeTraining, kube_stack
from mlflow import MlflowClient
from side_by_side import Act, SideBySide, chosen, side_by_side
from stack_services import frozen, kill_services

from pollux.store.runs import JOB_TAG
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import pod_path
from pollux_agent.driver.kube.documents import JOB_DIR
from pollux_agent.protocol import JobFolder

pytestmark = [pytest.mark.needs("kube"), pytest.mark.e2e, pytest.mark.timeout(1200)]

TARGET = 0.95
EPOCHS = 10_000
NODES = {"node-0": 4, "node-1": 4}


@pytest.fixture(scope="module")
def stack(kube: TestKube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeStack]:
    for name, gpus in NODES.items():
        kube.node_up(name, gpus)
    with kube_stack(kube, "pollux-test-training", tmp_path_factory.mktemp("kube")) as running:
        yield running


@pytest.fixture
def tenants(stack: KubeStack) -> Iterator[None]:
    """Somebody else's pods, which leave one GPU on each node."""
    with ExitStack() as running:
        for node, gpus in NODES.items():
            running.enter_context(tenant(stack.kube, stack.namespace, node, gpus - 1))
        yield


def test_digits_shrinks_grows_loses_a_node_and_reaches_its_target(stack: KubeStack, tenants: None) -> None:
    digits = stack.train(
        name="digits",
        script=str(TOP / "tests/kube/endless_digits.py"),
        arguments=["--until", f"{JOB_DIR}/stop"],
        epochs=EPOCHS,
        max_gpus=2,
        initial_batch_size=32,
    )
    digits.wait(digits.runs_on(2), "it grows to both GPUs that others leave")
    newcomer = steady(stack, "newcomer")
    other = newcomer.wait(newcomer.runs_on(1), "the newcomer gets one of them")
    job = digits.wait(digits.runs_on(1), "digits goes on with the other one")
    pods = list(stack.kube.api.items(pod_path(stack.namespace), labelSelector="pollux.dev/role=worker"))
    assert {pod["spec"]["automountServiceAccountToken"] for pod in pods} == {False}
    (stack.jobs / other.job_id / "stop").touch()
    newcomer.wait(lambda job, task: task.state == "success", "the newcomer ends")
    digits.wait(digits.runs_on(2), "digits grows again")
    lost = next(node for node in NODES if node != stack.driver_node(job.job_id))
    stack.kube.node_down(lost, crash=True)
    try:
        before = digits.job.status.incarnation
        digits.wait(
            lambda job, task: digits.runs_on(1)(job, task) and job.status.incarnation > before,
            "digits goes on without the node that is lost",
        )
        assert lost not in digits.job.status.held
    finally:
        stack.kube.node_up(lost, NODES[lost])
    runs = MlflowClient(stack.mlflow_url)
    scores = lambda: runs.get_run(job.mlflow_run_id).data.metrics  # noqa: E731
    awaited(scores, lambda found: found.get("val_accuracy", 0.0) >= TARGET, 600)
    (stack.jobs / job.job_id / "stop").touch()
    digits.wait(lambda job, task: task.state == "success", "digits is done")

    assert digits.task.try_number == 1
    sizes = [size for size, _ in groupby(digits.sizes(job.job_id))]
    assert sizes[:5] == [1, 2, 1, 2, 1], sizes
    assert scores()["val_accuracy"] >= TARGET
    awaited(lambda: runs.get_run(job.mlflow_run_id).info.status, lambda status: status == "FINISHED", 60)
    assert "resizing 2 -> 1 GPUs" in digits.log()
    assert "validation accuracy" in digits.log()
    told = stack.kube.api.items(f"/api/v1/namespaces/{stack.namespace}/events")
    reasons = {event["reason"] for event in told if event["involvedObject"]["name"] == job.job_id}
    assert {"Placed", "Grown", "Shrunk"} <= reasons
    awaited(stack.cluster.held, lambda held: not held, 120)


def steady(stack: KubeStack, name: str, dag: str = DAG) -> KubeTraining:
    """Start a training of one GPU that ends once its folder holds a file ``stop``."""
    return stack.train(
        dag,
        name=name,
        script=str(TOP / "tests/e2e/steady_training.py"),
        arguments=["--until", f"{JOB_DIR}/stop"],
        kind="rigid",
        scaling_rule="none",
        initial_batch_size=8,
        max_local_batch_size=8,
        max_gpus=1,
    )


Train = Callable[..., KubeTraining]


@contextmanager
def trainings(stack: KubeStack, early: dict[str, KubeTraining]) -> Iterator[Train]:
    """Starts steady trainings, or takes those of that name that were started early."""
    started = []

    def start(name: str, dag: str = DAG) -> KubeTraining:
        started.append(early.pop(name, None) or steady(stack, name, dag))
        return started[-1]

    try:
        yield start
    finally:
        for training in started:
            training.abandon()


@pytest.fixture(scope="module")
def early(stack: KubeStack) -> Iterator[dict[str, KubeTraining]]:
    """Trainings for tests to come, started while others are at work."""
    started: dict[str, KubeTraining] = {}
    yield started
    for training in started.values():
        training.abandon()


@pytest.fixture
def train(stack: KubeStack, early: dict[str, KubeTraining]) -> Iterator[Train]:
    with trainings(stack, early) as start:
        yield start


def a_persons_acts_on_the_task_reach_the_job(stack: KubeStack, train: Train) -> None:
    training = train("by-hand")
    first = training.wait(training.runs_on(1), "it runs")
    training.wait(lambda job, task: task.state == "deferred", "its task waits for it")
    training.set_state("failed")
    failed = training.wait(lambda job, task: job.status.phase == "ended", "marked failed: it ends")
    assert failed.status.stop == "failed"
    awaited(stack.cluster.held, lambda held: failed.job_id not in held, 60)

    training.clear()
    again = training.wait(
        lambda job, task: (
            training.runs_on(1)(job, task) and job.status.incarnation > first.status.incarnation
        ),
        "cleared: it runs again",
    )
    assert (again.job_id, again.mlflow_run_id) == (failed.job_id, first.mlflow_run_id)

    training.wait(lambda job, task: task.state == "deferred", "its task waits for it again")
    training.set_state("success")
    done = training.wait(lambda job, task: job.status.phase == "ended", "marked success: it ends")
    assert done.status.stop == "success"
    assert training.task.state == "success"


def a_task_that_waits_itself_and_is_ended_never_succeeds_and_its_retry_resumes(
    stack: KubeStack, train: Train
) -> None:
    training = train("waited-for", SYNC_DAG)
    first = training.wait(training.runs_on(1), "it runs")
    assert training.task.state == "running"
    training.end_process()
    again = training.wait(
        lambda job, task: (
            task.try_number == 2
            and training.runs_on(1)(job, task)
            and job.status.incarnation > first.status.incarnation
        ),
        "the retry resumes it",
    )
    assert again.mlflow_run_id == first.mlflow_run_id
    assert "writes a checkpoint and ends" in training.log(1)
    (stack.jobs / again.job_id / "stop").touch()
    training.wait(lambda job, task: task.state == "success", "it is done")
    events = training.events(again.job_id, again.status.incarnation)
    assert [event.step for event in events if event.event == "resume"] > [0], "from its checkpoint"


def a_driver_pod_that_somebody_deletes_is_made_again_in_the_same_try(stack: KubeStack, train: Train) -> None:
    training = train("driverless")
    first = training.wait(training.runs_on(1), "it runs")
    training.wait(lambda job, task: task.state == "deferred", "its task is deferred")
    stack.kube.api.delete(pod_path(stack.namespace, first.job_id))
    again = training.wait(
        lambda job, task: (
            training.runs_on(1)(job, task) and job.status.incarnation > first.status.incarnation
        ),
        "it goes on with a new driver",
    )
    assert again.mlflow_run_id == first.mlflow_run_id
    (stack.jobs / again.job_id / "stop").touch()
    training.wait(lambda job, task: task.state == "success", "it is done")
    assert training.task.try_number == 1
    assert "goes on from its checkpoint with a new driver" in training.log()
    events = training.events(again.job_id, again.status.incarnation)
    assert [event.step for event in events if event.event == "resume"] > [0], "from its checkpoint"


def garbage_on_a_jobs_pod_costs_its_task_no_try_and_no_other_its_cycle(
    stack: KubeStack, train: Train
) -> None:
    """Written so often that the trigger and a cycle see it, whatever the driver puts back meanwhile."""
    training = train("scribbled-on")
    first = training.wait(training.runs_on(1), "it runs")
    training.wait(lambda job, task: task.state == "deferred", "its task is deferred")
    names = (doc.ALLOCATION, doc.DECISION, doc.SPEC, doc.IDENTITY, doc.STATE)
    garbage = {"metadata": {"annotations": dict.fromkeys(names, "{garbage")}}

    cycles = lambda: len(list((stack.state / "decisions").glob("*/result.json")))  # noqa: E731
    before = cycles()

    def seen() -> bool:
        stack.kube.api.patch(pod_path(stack.namespace, first.job_id), garbage)
        return "cannot be read" in training.log() and cycles() >= before + 2

    awaited(seen, timeout_s=240)
    again = training.wait(
        lambda job, task: task.state == "deferred" and training.runs_on(1)(job, task), "it goes on"
    )
    assert again.status.incarnation == first.status.incarnation
    (stack.jobs / again.job_id / "stop").touch()
    training.wait(lambda job, task: task.state == "success", "it is done")
    assert training.task.try_number == 1


ALONE = (
    garbage_on_a_jobs_pod_costs_its_task_no_try_and_no_other_its_cycle,
    a_driver_pod_that_somebody_deletes_is_made_again_in_the_same_try,
    a_task_that_waits_itself_and_is_ended_never_succeeds_and_its_retry_resumes,
    a_persons_acts_on_the_task_reach_the_job,
)
"""The shortest first."""


@pytest.fixture(scope="module")
def acts(stack: KubeStack, request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    def play(act: Act) -> None:
        with trainings(stack, {}) as train:
            act(stack, train)

    with side_by_side(chosen(request), play, len(ALONE)) as playing:
        yield playing


@pytest.mark.parametrize("act", ALONE)
def test_a_task_among_others(
    stack: KubeStack, acts: SideBySide, early: dict[str, KubeTraining], act: Act
) -> None:
    acts.end(act)
    if not early:
        for name, dag in {"deferred": DAG, "waiting": SYNC_DAG, "unheard": DAG}.items():
            early[name] = steady(stack, name, dag)


def test_airflows_killed_processes_cost_a_job_nothing_but_the_tasks_own_a_try(
    stack: KubeStack, train: Train
) -> None:
    deferred, waiting = train("deferred"), train("waiting", SYNC_DAG)
    first = deferred.wait(deferred.runs_on(1), "one whose task is deferred runs")
    other = waiting.wait(waiting.runs_on(1), "one whose task waits itself runs")
    deferred.wait(lambda job, task: task.state == "deferred", "its task is deferred")

    waiting.end_process(signal.SIGKILL)
    waiting.wait(
        lambda job, task: (task.state, task.try_number) == ("running", 2), "the killed task is tried again"
    )
    kill_services(stack.state, "airflow-triggerer", "airflow-scheduler")
    waiting.wait(lambda job, task: task.state == "running" and waiting.is_running, "it is tried on")
    for training, before in ((deferred, first), (waiting, other)):
        now = training.job
        assert now is not None
        assert now.status.incarnation == before.status.incarnation, "the job went on meanwhile"
        assert now.mlflow_run_id == before.mlflow_run_id
        (stack.jobs / now.job_id / "stop").touch()
        training.wait(lambda job, task: task.state == "success", "it is done")
    assert deferred.task.try_number == 1
    assert waiting.task.try_number > 1


def test_a_task_that_is_killed_on_its_way_to_its_deferral_or_back_has_one_job(
    stack: KubeStack, train: Train
) -> None:
    trainings = [train(f"killed-{number}") for number in range(3)]
    for number, training in enumerate(trainings):
        training.wait(lambda job, task: task.state in ("running", "deferred"), "its task begins")
        time.sleep(0.7 * number)
        with suppress(ProcessLookupError):
            training.end_process(signal.SIGKILL)
    jobs = [training.wait(training.runs_on(1), "it runs") for training in trainings]
    for training in trainings:
        training.wait(lambda job, task: task.state == "deferred", "its task is deferred")
    tries = [training.task.try_number for training in trainings]
    assert max(tries) <= 2
    assert max(tries[:-1]) == 2, "some were killed in time"
    for job in reversed(jobs):
        (stack.jobs / job.job_id / "stop").touch()
    trainings[-1].wait(lambda job, task: task.state in ("running", "success"), "its task comes back")
    with suppress(ProcessLookupError):
        trainings[-1].end_process(signal.SIGKILL)
    for training, job, before in zip(trainings, jobs, tries, strict=True):
        training.wait(lambda job, task: task.state == "success", "it is done")
        assert training.task.try_number <= before + 1
        assert training.sizes(job.job_id) == [1], "one job, started once"


def test_figures_of_a_job_that_ends_while_mlflow_is_away_arrive(stack: KubeStack, train: Train) -> None:
    training = train("unheard")
    running = training.wait(training.runs_on(1), "it runs")
    with frozen(stack.state, "mlflow"):
        (stack.jobs / running.job_id / "stop").touch()
        done = training.wait(lambda job, task: job.status.phase == "done", "it is done without MLflow")
        assert JobFolder(stack.jobs / running.job_id).unsent.exists()
        training.wait(lambda job, task: task.state == "success", "its task is done without MLflow")
        assert training.job is not None, "what MLflow is to hear yet is with its pod"
    assert done.status.outcome is not None
    runs = MlflowClient(stack.mlflow_url)
    wanted = list(range(done.status.outcome.step + 1))
    walked = lambda: sorted(  # noqa: E731
        point.value for point in runs.get_metric_history(running.mlflow_run_id, "walked")
    )
    awaited(walked, lambda found: found == wanted, 120)
    awaited(lambda: runs.get_run(running.mlflow_run_id).info.status, lambda seen: seen == "FINISHED", 120)


def test_in_the_end_no_pod_is_left_and_no_run_is_open(stack: KubeStack) -> None:
    """Of all of the jobs above: a person ended one, and MLflow was away at another one's end."""
    path, role = pod_path(stack.namespace), "pollux.dev/role"
    awaited(lambda: list(stack.kube.api.items(path, labelSelector=role)), lambda left: not left, 180)
    runs = MlflowClient(stack.mlflow_url)
    everywhere = [experiment.experiment_id for experiment in runs.search_experiments()]
    states = {
        run.data.tags[JOB_TAG]: run.info.status
        for run in runs.search_runs(everywhere)
        if JOB_TAG in run.data.tags
    }
    assert "RUNNING" not in states.values(), states
    assert {"FINISHED", "KILLED"} <= set(states.values()), states


def test_no_credential_is_in_a_log_a_database_or_an_artifact(stack: KubeStack) -> None:
    """Of Airflow's account and of all accounts of the jobs' namespace, after all of the runs above."""
    found = stack.kube.api.items(f"/api/v1/namespaces/{stack.namespace}/secrets")
    secrets = [secret.get("data") or {} for secret in found]
    tokens = [base64.b64decode(data["token"]) for data in secrets if "token" in data]
    tokens.append(yaml.safe_load(stack.config.read_text())["users"][0]["user"]["token"].encode())
    pods_logs = stack.kube.state.glob("nodes/*/varlog") if stack.kube.state else ()
    assert holding(tokens, [stack.config.parent, *pods_logs]) == [stack.config], "where it has to be, only"


def holding(texts: list[bytes], places: list[Path]) -> list[Path]:
    """The files there that hold one of the texts."""
    paths = [path for place in places for path in place.rglob("*")]
    files = {path: path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()}
    return [path for path, data in files.items() if any(text in data for text in texts)]

"""Orphans end in their second cycle, and nothing else does."""

import json
from pathlib import Path

import httpx
import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.models.dagrun import DagRun as RunRow
from airflow.models.taskinstance import TaskInstance as TaskRow
from airflow.utils.session import create_session
from airflow_rim import EndingCluster, ending
from fastapi.testclient import TestClient
from sqlalchemy import update

from pollux.airflow_api import AirflowApi, TaskInstance
from pollux.cluster.base import ClusterJob, JobIdentity
from pollux.errors import AirflowApiError
from pollux.orphans import ALIVE_STATES, GONE, LEFT, ask_airflow, end_orphans
from pollux_agent.protocol import JobSpec

SPEC = JobSpec(name="digits", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2)


@pytest.fixture
def jobs(cluster: EndingCluster) -> list[ClusterJob]:
    """One job of a task that is unmapped, one of a mapped one, and one of another Airflow."""
    made = []
    for job_id, deployment, map_index in (("a", "airflow", -1), ("b", "airflow", 2), ("c", "other", -1)):
        identity = JobIdentity(
            deployment=deployment, dag_id="dag", run_id="run", task_id="train", map_index=map_index
        )
        made.append(cluster.submit(job_id, identity=identity, spec=SPEC, run_id=None))
    return made


def cycle(
    cluster: EndingCluster, jobs: list[ClusterJob], state_of: dict[int, str], memory: Path
) -> dict[str, str]:
    """``state_of`` is by map index; the rest are running."""
    return end_orphans(
        cluster,
        jobs,
        lambda identity: state_of.get(identity.map_index, "running"),
        deployment="airflow",
        memory=memory,
    )


@pytest.mark.parametrize("dead", ["failed", "success", "skipped", "upstream_failed", "removed", GONE, LEFT])
def test_an_orphan_ends_in_the_second_cycle(
    cluster: EndingCluster,
    jobs: list[ClusterJob],
    tmp_path: Path,
    dead: str,
) -> None:
    memory = tmp_path / "suspects.json"
    assert cycle(cluster, jobs, {2: dead}, memory) == {}
    assert list(cycle(cluster, jobs, {2: dead}, memory)) == ["b"]
    assert cluster.stops == ["orphan"]


@pytest.mark.parametrize("alive", sorted(ALIVE_STATES))
def test_a_task_that_comes_back_keeps_its_job(
    cluster: EndingCluster,
    jobs: list[ClusterJob],
    tmp_path: Path,
    alive: str,
) -> None:
    for _ in range(3):
        assert cycle(cluster, jobs, {-1: alive, 2: alive}, tmp_path / "suspects.json") == {}


def test_two_cycles_in_a_row_are_needed(
    cluster: EndingCluster, jobs: list[ClusterJob], tmp_path: Path
) -> None:
    memory = tmp_path / "suspects.json"
    for states in ({-1: "failed"}, {}, {-1: "failed"}):
        assert cycle(cluster, jobs, states, memory) == {}
    assert list(cycle(cluster, jobs, {-1: "failed"}, memory)) == ["a"]


@pytest.mark.parametrize("content", ["", "{", "7", '{"a": 1}'])
def test_a_memory_that_makes_no_sense_costs_at_most_a_cycle(
    cluster: EndingCluster,
    jobs: list[ClusterJob],
    tmp_path: Path,
    content: str,
) -> None:
    memory = tmp_path / "suspects.json"
    memory.write_text(content)
    ended = [list(cycle(cluster, jobs, {2: "failed"}, memory)) for _ in range(2)]
    assert ended[1] == ["b"]


def test_a_job_that_is_asked_to_stop_is_left_to_that(
    cluster: EndingCluster,
    jobs: list[ClusterJob],
    tmp_path: Path,
) -> None:
    stopped = cluster.stop("b", "success")
    for _ in range(2):
        assert cycle(cluster, [stopped], {2: "success"}, tmp_path / "suspects.json") == {}


def test_a_cluster_that_is_away_is_tried_again_next_time(
    cluster: EndingCluster,
    jobs: list[ClusterJob],
    tmp_path: Path,
) -> None:
    memory = tmp_path / "suspects.json"
    cycle(cluster, jobs, {2: "failed"}, memory)
    cluster.away = True
    assert cycle(cluster, jobs, {2: "failed"}, memory) == {}
    cluster.away = False
    assert list(cycle(cluster, jobs, {2: "failed"}, memory)) == ["b"]


def through(app: TestClient) -> httpx.MockTransport:
    """Requests of a client go to the application in this process."""

    def answer(request: httpx.Request) -> httpx.Response:
        got = app.request(
            request.method,
            request.url.raw_path.decode(),
            content=request.content,
            headers=dict(request.headers),
        )
        return httpx.Response(got.status_code, json=got.json())

    return httpx.MockTransport(answer)


def test_airflow_tells_the_states_of_tasks(
    airflow_app: TestClient,
    airflow_login: Path,
    cluster: EndingCluster,
) -> None:
    cluster.ends = [ending("done")]
    dag = DagBag(Path(__file__).parents[2] / "dags").dags["pollux_train"]
    run = dag.test()
    job = cluster.job(cluster.submissions[0]["job_id"])
    lost = ClusterJob(
        job_id="lost",
        identity=JobIdentity(deployment="airflow", dag_id="pollux_train", run_id="never", task_id="train"),
        spec=SPEC,
        submitted_unix_s=0.0,
    )
    password = json.loads(airflow_login.read_text())["admin"]
    api = AirflowApi("http://testserver", user="admin", password=password, transport=through(airflow_app))
    state_of = ask_airflow(api, [job.identity, lost.identity])
    assert job.identity.run_id == run.run_id
    assert state_of(job.identity) == "success"
    assert state_of(lost.identity) == GONE
    assert ask_airflow(api, [])(job.identity) == GONE


def test_a_task_that_its_ended_run_has_left_unscheduled_leads_nowhere(
    airflow_app: TestClient,
    airflow_login: Path,
    cluster: EndingCluster,
) -> None:
    """As Airflow leaves a task that was marked failed and cleared again in the same moment."""
    cluster.ends = [ending("done")]
    run = DagBag(Path(__file__).parents[2] / "dags").dags["pollux_train"].test()
    job = cluster.job(cluster.submissions[0]["job_id"])
    password = json.loads(airflow_login.read_text())["admin"]
    api = AirflowApi("http://testserver", user="admin", password=password, transport=through(airflow_app))
    for run_state, want in (("success", LEFT), ("queued", "none")):
        with create_session() as session:
            session.execute(update(TaskRow).where(TaskRow.run_id == run.run_id).values(state=None))
            session.execute(update(RunRow).where(RunRow.run_id == run.run_id).values(_state=run_state))
        assert ask_airflow(api, [job.identity])(job.identity) == want


class ShortSighted(AirflowApi):
    """Lists nothing, as for a user who may not read the DAG, and answers a question for one task."""

    def __init__(self, answer: TaskInstance | AirflowApiError) -> None:
        self._answer = answer

    def find_task_instances(self, **asked: object) -> tuple[TaskInstance, ...]:
        return ()

    def task_instance(self, *asked: object) -> TaskInstance | None:
        if isinstance(self._answer, AirflowApiError):
            raise self._answer
        return self._answer


def test_a_task_that_is_not_in_the_list_is_not_gone_yet(jobs: list[ClusterJob]) -> None:
    running = TaskInstance(
        dag_id="dag",
        run_id="run",
        task_id="train",
        map_index=2,
        state="deferred",
        try_number=1,
        started=None,
        ended=None,
    )
    assert ask_airflow(ShortSighted(running), [jobs[1].identity])(jobs[1].identity) == "deferred"
    with pytest.raises(AirflowApiError, match="403"):
        ask_airflow(ShortSighted(AirflowApiError("GET: 403: Forbidden")), [job.identity for job in jobs])

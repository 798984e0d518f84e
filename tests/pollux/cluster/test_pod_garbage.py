"""Anybody may write anything on a job's pod: that costs this job at most, and never the other jobs' cycle."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pollux.cluster.base import ClusterView, JobIdentity
from pollux.cluster.k8s.jobs import allocation_fault, job_of, left_by, numbers_of, read_jobs
from pollux.cluster.k8s.manifest import driver_pod, first_notes
from pollux.cluster.k8s.settings import KubeSettings
from pollux.cluster.numbers import next_number
from pollux.observe import build_snapshot
from pollux.policy import decide
from pollux.settings import Settings
from pollux.snapshot import Node
from pollux.store import JobRecord
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube import notes
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobSpec, encode

NOW = 1_800_000_000.0
BORN = "2027-01-15T08:00:00Z"
CLAIM = {"persistentVolumeClaim": {"claimName": "jobs"}}
NODES = (Node(name="node-0", gpus=4), Node(name="node-1", gpus=4))

GARBAGE = [
    *("", "{garbage", "[]", "{}", "null", "true", "0", "-1", "1e999", "NaN", "nan", "inf", "-inf", "\u00b2"),
    *("1e300", "9" * 30, "9" * 5000, "[" * 9999, '"\\ud800"', "\x00", "99999999999", "9007199254740000"),
    '{"decision": 1e21}',
    '{"decision": -1}',
    '{"decision": 3, "placement": {"node-0": -1}}',
    '{"decision": 3, "placement": {"node-0": 1e30}}',
    '{"decision": 3, "placement": {"node-0": 4, "node-1": 4}}',
    '{"decision": 3, "placement": {"nowhere": 60000}}',
    '{"decision": 9007199254740000}',
    '{"phase": "done"}',
    '{"phase": "running", "incarnation": 9007199254740992, "placement": {"node-0": 4}}',
    '{"phase": "running", "incarnation": 9223372036854775808}',
    '{"phase": "running", "attained_gpu_s": 1e308, "counted_unix_s": -1e308, "placement": {"node-0": 4}}',
    '{"phase": "running", "max_gpus_seen": 9007199254740992, "since_unix_s": -1e308}',
    '{"phase": "running", "acted_decision": 9007199254740992}',
    '{"deployment": "airflow", "dag_id": "", "run_id": "", "task_id": "", "map_index": -5}',
    '{"name": "x", "script": "x", "initial_batch_size": 1, "max_local_batch_size": 1, "max_gpus": 999999999}',
    '{"metadata": [], "spec": {"containers": "x"}}',
]

TEXTS = st.one_of(st.sampled_from(GARBAGE), st.text(max_size=40), st.none())
"""None: the annotation is gone."""


def a_pod(job_id: str, *, decision: int = 3, placement: dict[str, int] | None = None) -> dict[str, Any]:
    """A job that was given GPUs by a decision, on which its driver has acted."""
    found = first_notes(
        identity=JobIdentity(deployment="airflow", dag_id="d", run_id=job_id, task_id="t"),
        spec=JobSpec(name=job_id, script="s.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=4),
        run_id="run",
        submitted_unix_s=NOW - 60,
        decision=decision,
        try_number=1,
        fresh=False,
        state=DriverState(phase="running", incarnation=1, acted_decision=decision, placement=placement or {}),
        settings=KubeSettings(jobs_volume=CLAIM),
        mlflow_tracking_uri="",
    )
    found[doc.ALLOCATION] = encode(Allocation(decision=decision, placement=placement or {}))
    user = {"spec": {"containers": [{"name": "base", "image": "train:1"}]}}
    pod = driver_pod(
        user,
        job_id=job_id,
        namespace="team",
        notes=found,
        deployment="airflow",
        settings=KubeSettings(jobs_volume=CLAIM),
    )
    pod["metadata"] |= {"creationTimestamp": BORN, "uid": f"uid-{job_id}", "resourceVersion": "1"}
    return pod


def with_notes(pod: dict[str, Any], **texts: str | None) -> dict[str, Any]:
    """The pod with annotations set, or taken away, by the names that they have behind our prefix."""
    for name, text in texts.items():
        if text is None:
            pod["metadata"]["annotations"].pop(doc.PREFIX + name, None)
        else:
            pod["metadata"]["annotations"][doc.PREFIX + name] = text
    return pod


NAMES = [name.removeprefix(doc.PREFIX) for name in (*notes.READERS, doc.FRESH)]


TAKES_ALL = '{"decision": 3, "placement": {"node-0": 4, "node-1": 4}}'


@settings(deadline=None, max_examples=100)
@example(bad={"allocation": TAKES_ALL})
@example(bad={"allocation": TAKES_ALL, "spec": None})
@example(bad={"allocation": '{"decision": 3, "placement": {"nowhere": 60000}}'})
@example(bad={"state": '{"phase": "running", "incarnation": 9007199254740992, "placement": {"node-0": 4}}'})
@example(bad={"state": '{"phase": "running", "attained_gpu_s": 1e17, "counted_unix_s": -1e308}'})
@example(bad={"submitted": "0"})
@given(bad=st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1, max_size=4))
def test_whatever_stands_on_a_pod_the_others_are_read_and_decided_on(bad: dict[str, str | None]) -> None:
    good = [a_pod("job-a", placement={"node-0": 2}), a_pod("job-b", placement={"node-1": 1})]
    wanted = read_jobs(good, now_unix_s=NOW).jobs
    pods = [*good, with_notes(a_pod("job-c", placement={"node-1": 1}), **bad)]
    found = read_jobs(pods, now_unix_s=NOW)
    assert {job_id: found.jobs[job_id] for job_id in wanted} == wanted
    assert ("job-c" in found.jobs) != ("team/job-c" in found.left_out)

    number = next_number(3, [number for pod in pods for number in numbers_of(pod)])
    assert not any(allocation_fault(pod, given_out=number) for pod in good)
    jobs = tuple(job for job in found.jobs.values() if job.status.phase == "running")
    snapshot = build_snapshot(
        ClusterView(nodes=NODES, jobs=jobs),
        {job.job_id: JobRecord(run_id="run") for job in jobs},
        decision=number,
        now_unix_s=NOW,
        settings=Settings(state=Path("state")),
        state={},
    )
    decision = decide(snapshot)
    assert {"job-a", "job-b"} <= decision.jobs.keys()
    left_by(pods[-1], NOW)


@pytest.mark.parametrize("name", ["identity", "spec"])
@pytest.mark.parametrize("text", [None, *GARBAGE[:6]])
def test_a_job_of_which_it_is_not_known_what_it_is_is_left_out_and_the_annotation_named(
    name: str, text: str | None
) -> None:
    found = read_jobs([with_notes(a_pod("job-c"), **{name: text})], now_unix_s=NOW)
    assert not found.jobs
    assert doc.PREFIX + name in found.left_out["team/job-c"]


@pytest.mark.parametrize(
    "bad",
    [
        {"allocation": "{garbage"},
        {"allocation": None},
        {"decision": "999999999999999999999"},
        {"decision": "\u00b2"},
        {"decision": "4"},
        {"decision": None},
        {"allocation": '{"decision": 4}'},
        {"decision": "9007199254740000", "allocation": '{"decision": 9007199254740000}'},
    ],
)
def test_an_allocation_that_cannot_be_right_is_known(bad: dict[str, str | None]) -> None:
    pod = with_notes(a_pod("job-c", placement={"node-1": 1}), **bad)
    assert allocation_fault(pod, given_out=5)
    assert next_number(3, numbers_of(pod)) <= 5
    readable = "9007199254740000" not in bad.values()
    if readable:
        given = job_of(pod, now_unix_s=NOW).allocation
        assert (given.decision, given.placement) == (3, {"node-1": 1}), "as the driver has it"


def test_a_number_on_which_a_driver_acted_is_not_used_again_where_its_annotation_is_lost() -> None:
    pod = with_notes(a_pod("job-c", decision=57), decision="0", allocation='{"decision": 0}')
    assert next_number(None, numbers_of(pod)) == 58


@pytest.mark.parametrize(
    ("bad", "field", "want"),
    [
        ({"submitted": "nan"}, "submitted_unix_s", 1_800_000_000.0),
        ({"submitted": "1e300"}, "submitted_unix_s", 1_800_000_000.0),
        ({"submitted": "-5"}, "submitted_unix_s", 1_800_000_000.0),
        ({"submitted": None}, "submitted_unix_s", 1_800_000_000.0),
        ({"run": "../../else"}, "mlflow_run_id", None),
        ({"run": None}, "mlflow_run_id", None),
    ],
)
def test_what_else_cannot_be_read_counts_as_not_told(bad: dict[str, Any], field: str, want: object) -> None:
    """BORN is 1.8e9 seconds after 1970 (``date -u -d @1800000000``)."""
    assert getattr(job_of(with_notes(a_pod("job-c"), **bad), now_unix_s=NOW), field) == want


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({doc.JOB: None}, id="no job"),
        pytest.param({doc.JOB: "job-a"}, id="another pod's job"),
        pytest.param({doc.JOB: ""}, id="empty"),
    ],
)
def test_a_pod_that_is_not_labelled_as_the_driver_of_its_name_is_no_jobs(
    labels: dict[str, str | None],
) -> None:
    pod = a_pod("job-c")
    for name, text in labels.items():
        if text is None:
            del pod["metadata"]["labels"][name]
        else:
            pod["metadata"]["labels"][name] = text
    found = read_jobs([a_pod("job-a"), pod], now_unix_s=NOW)
    assert list(found.jobs) == ["job-a"]
    assert "label" in found.left_out["team/job-c"]


def test_of_two_pods_of_one_name_the_older_is_the_job_whatever_the_order() -> None:
    first, later = a_pod("job-a"), a_pod("job-a")
    later["metadata"] |= {"namespace": "other", "uid": "uid-0", "creationTimestamp": "2027-01-15T08:00:01Z"}
    for pods in ([first, later], [later, first]):
        found = read_jobs(pods, now_unix_s=NOW)
        assert found.pods["job-a"] is first
        assert "namespace team" in found.left_out["other/job-a"]


@given(st.sampled_from(sorted(notes.READERS)), TEXTS)
def test_a_fault_names_its_annotation_and_readers_raise_nothing_else(name: str, text: str | None) -> None:
    found = with_notes(a_pod("job-c"), **{name.removeprefix(doc.PREFIX): text})["metadata"]["annotations"]
    for reader in notes.READERS.values():
        try:
            reader(found)
        except DocumentError as error:
            assert doc.PREFIX in str(error)


def test_a_pod_as_it_is_made_has_no_fault() -> None:
    found = a_pod("job-a", placement={"node-0": 2})["metadata"]["annotations"]
    assert [name for name in notes.READERS if notes.fault_of(found, name)] == []
    assert json.loads(found[doc.WORKER]) == notes.template_of(found)

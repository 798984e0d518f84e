"""A driver puts back what somebody breaks of its pod, and nothing that was changed soundly."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux_agent.driver import Start
from pollux_agent.driver.kube import documents as doc
from pollux_agent.driver.kube.api import KubeApi, KubeError
from pollux_agent.driver.kube.keeper import Keeper
from pollux_agent.driver.kube.manifest import Gang, worker_pod
from pollux_agent.driver.kube.notes import READERS, driver_labels, fault_of
from pollux_agent.driver.state import DriverState
from pollux_agent.errors import DocumentError
from pollux_agent.protocol import Allocation, JobIdentity, JobSpec, encode

LABELS = driver_labels("job", "airflow")
TEMPLATE = {"spec": {"containers": [{"name": "base", "image": "train:1"}]}}
SOUND = {
    doc.IDENTITY: encode(JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t")),
    doc.SPEC: encode(
        JobSpec(name="j", script="s.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2)
    ),
    doc.SETTINGS: encode(doc.KubeDriverSettings()),
    doc.DECISION: "7",
    doc.ALLOCATION: encode(Allocation(decision=7, placement={"a": 2})),
    doc.STATE: encode(DriverState(phase="running", incarnation=1)),
    doc.STOP: "",
    doc.RUN: "0123456789abcdef0123456789abcdef",
    doc.TRY: "1",
    doc.SUBMITTED: "1700000000.25",
    doc.LOST: "[]",
    doc.WORKER: json.dumps(TEMPLATE),
}
KEPT = SOUND.keys() - {doc.STATE}


@dataclass
class OnePod:
    """An API server's merge patch (RFC 7386) of one pod's metadata, under its resourceVersion."""

    meta: dict[str, Any] = field(
        default_factory=lambda: {
            "name": "job",
            "namespace": "team",
            "resourceVersion": "1",
            "annotations": dict(SOUND),
            "labels": {**LABELS, "team": "x"},
        }
    )
    num_patches: int = 0

    @property
    def pod(self) -> dict[str, Any]:
        copied: dict[str, Any] = json.loads(json.dumps({"metadata": self.meta}))
        return copied

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/team/pods/job"
        self.num_patches += 1
        changes = body["metadata"]
        if changes.get("resourceVersion", self.meta["resourceVersion"]) != self.meta["resourceVersion"]:
            raise KubeError("the object has been modified", status=409)
        for part in ("annotations", "labels"):
            for name, text in changes.get(part, {}).items():
                self.meta[part].pop(name, None)
                if text is not None:
                    self.meta[part][name] = text
        self.meta["resourceVersion"] = str(int(self.meta["resourceVersion"]) + 1)
        return self.pod

    def scribble(self, **parts: dict[str, str | None]) -> None:
        self.patch("/api/v1/namespaces/team/pods/job", {"metadata": parts})
        self.num_patches = 0


def keeper(server: OnePod) -> Keeper:
    made = Keeper(api=cast("KubeApi", server), labels=LABELS)
    made.mend(server.pod)
    assert server.num_patches == 0, "nothing is wrong with it"
    return made


TEXTS = st.one_of(
    st.none(), st.text(max_size=20), st.sampled_from(["[]", "{}", "-1", "1e999", "9" * 30, "[" * 9999])
)


@given(
    notes=st.dictionaries(st.sampled_from(sorted(KEPT)), TEXTS, min_size=1),
    labels=st.dictionaries(st.sampled_from(sorted(LABELS)), st.sampled_from([None, "", "other"])),
)
def test_what_is_broken_is_put_back_and_the_rest_is_let_alone(
    notes: dict[str, str | None], labels: dict[str, str | None]
) -> None:
    server = OnePod()
    kept = keeper(server)
    server.scribble(annotations=notes, labels=labels)
    scribbled = server.pod["metadata"]["annotations"]
    kept.mend(server.pod)
    found = server.pod["metadata"]
    assert found["labels"] == {**LABELS, "team": "x"}
    for name in KEPT:
        assert not fault_of(found["annotations"], name)
        assert found["annotations"].get(name) in (SOUND[name], scribbled.get(name))
    kept.mend(server.pod)
    assert server.num_patches <= 1


def test_a_new_allocation_stays_and_is_what_is_put_back_from_then_on() -> None:
    server = OnePod()
    kept = keeper(server)
    new = {doc.DECISION: "8", doc.ALLOCATION: encode(Allocation(decision=8, placement={"b": 1}))}
    server.scribble(annotations=dict(new))
    kept.mend(server.pod)
    assert server.num_patches == 0
    server.scribble(annotations={doc.ALLOCATION: "{garbage"})
    kept.mend(server.pod)
    assert {name: server.pod["metadata"]["annotations"][name] for name in new} == new


def test_what_came_meanwhile_is_not_overwritten() -> None:
    """The driver sees the garbage late, when the scheduler has already given a new allocation."""
    server = OnePod()
    kept = keeper(server)
    server.scribble(annotations={doc.ALLOCATION: "{garbage"})
    late = server.pod
    new = {doc.DECISION: "8", doc.ALLOCATION: encode(Allocation(decision=8))}
    server.scribble(annotations=dict(new))
    kept.mend(late)
    assert {name: server.pod["metadata"]["annotations"][name] for name in new} == new


def test_each_fault_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    server = OnePod()
    del server.meta["annotations"][doc.TRY]
    kept = Keeper(api=cast("KubeApi", server), labels=LABELS)
    for _ in range(5):
        kept.mend(server.pod)
    assert [doc.TRY in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    "template",
    [
        {"spec": 5},
        {"spec": {"containers": "x"}},
        {"spec": {"containers": [5]}},
        {"spec": {"containers": [{"env": "x"}]}},
        {"spec": {"containers": [{"resources": [1]}]}},
        {"spec": {"containers": [{}], "affinity": [1]}},
        {"metadata": [1], "spec": {"containers": [{}]}},
    ],
)
def test_a_template_that_is_no_pod_is_refused_by_its_annotations_name(template: dict[str, Any]) -> None:
    gang = Gang(
        job_id="job",
        driver={"metadata": {"name": "job", "namespace": "team", "uid": "u"}},
        template=template,
        start=Start(incarnation=1, placement={"a": 1}, signal_unix_s=None),
        settings=doc.KubeDriverSettings(),
        gpu_type="",
        env={},
        mlflow_run_id="",
    )
    with pytest.raises(DocumentError, match=doc.WORKER):
        worker_pod(gang, 0, "")


def test_every_annotation_that_can_be_wrong_has_a_reader() -> None:
    own = {value for name, value in vars(doc).items() if name.isupper() and str(value).startswith(doc.PREFIX)}
    labels = {doc.ROLE, doc.JOB, doc.DEPLOYMENT, doc.NODE, doc.INCARNATION, doc.FINISH}
    assert own - {doc.PREFIX} - labels - {doc.FRESH} == READERS.keys()

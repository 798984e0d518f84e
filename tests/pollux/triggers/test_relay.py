"""Lines are relayed once, changes are told in words, and a cluster that is away is waited for."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.cluster.base import ClusterJob, JobIdentity, JobStatus, LogChunk
from pollux.errors import ClusterUnavailable, Refused
from pollux.triggers.relay import Relay, changes
from pollux_agent.protocol import Allocation, JobSpec

JOB = ClusterJob(
    job_id="digits-0123456789",
    identity=JobIdentity(deployment="airflow", dag_id="d", run_id="r", task_id="t"),
    spec=JobSpec(name="digits", script="a.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=2),
    submitted_unix_s=0.0,
)
LOG = logging.getLogger("relay-test")


class Script:
    """A cluster whose job's output is a list of lines; the cursor counts them, three at most a call."""

    def __init__(self, jobs: Sequence[ClusterJob | Exception], lines: Sequence[str] = ()) -> None:
        self.jobs = list(jobs)
        self.lines = list(lines)

    def job(self, job_id: str) -> ClusterJob:
        now = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        if isinstance(now, Exception):
            raise now
        return now

    def logs(self, job_id: str, cursor: str = "") -> LogChunk:
        if cursor and not cursor.isdecimal():
            raise Refused(f"cursor: {cursor!r} is none of ours")
        start = int(cursor or 0)
        lines = tuple(self.lines[start : start + 3])
        return LogChunk(lines=lines, cursor=str(start + len(lines)))


def status(job: ClusterJob = JOB, **fields: object) -> ClusterJob:
    return replace(job, status=JobStatus(**fields))


def printed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="relay-test")


def test_each_line_once_over_polls_and_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Script([status(phase="running")], [f"line {n}" for n in range(8)])
    cursor = tmp_path / "relayed.cursor"
    relay = Relay(cluster, JOB.job_id, LOG, cursor_file=cursor)
    assert relay.poll() is None
    cluster.lines += ["line 8"]
    assert relay.poll() is None
    cluster.lines += ["line 9"]
    assert Relay(cluster, JOB.job_id, LOG, cursor_file=cursor).poll() is None
    assert [text for text in printed(caplog) if text.startswith("line")] == [f"line {n}" for n in range(10)]


def test_a_job_that_is_over_is_returned_with_all_of_its_output(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Script([status(phase="failed", message="it broke")], ["a", "b", "c", "d", "e"])
    job = Relay(cluster, JOB.job_id, LOG).poll()
    assert job is not None and job.status.phase == "failed"
    assert printed(caplog) == ["failed: it broke", "a", "b", "c", "d", "e"]


def test_a_job_that_prints_without_end_leaves_others_their_turn(caplog: pytest.LogCaptureFixture) -> None:
    class Chatty(Script):
        def logs(self, job_id: str, cursor: str = "") -> LogChunk:
            return LogChunk(lines=("on and on",), cursor=str(int(cursor or 0) + 1))

    assert Relay(Chatty([status(phase="running")]), JOB.job_id, LOG).poll() is None
    assert 0 < printed(caplog).count("on and on") < 100


def test_of_far_too_much_output_the_first_and_the_last_lines_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{number:06} {'x' * 993}" for number in range(2000)]
    cursor = tmp_path / "relayed.cursor"
    job = Relay(Script([status(phase="done")], lines), JOB.job_id, LOG, cursor_file=cursor).poll()
    assert job is not None
    texts = printed(caplog)
    assert texts[1] == lines[0]
    assert texts[-1] == lines[-1]
    assert sum(map(len, texts)) < 400_000
    (note,) = (text for text in texts if "lines are left out here" in text)
    assert int(note.split()[0]) == len(lines) - (len(texts) - 2)
    assert cursor.read_text() == "2000"


def test_a_percent_sign_in_the_output_is_no_format(caplog: pytest.LogCaptureFixture) -> None:
    Relay(Script([status(phase="running")], ["100% %s %d"]), JOB.job_id, LOG).poll()
    assert "100% %s %d" in printed(caplog)


def test_a_cluster_that_is_away_is_complained_about_once(caplog: pytest.LogCaptureFixture) -> None:
    away = ClusterUnavailable("no socket")
    relay = Relay(Script([away, away, away, status(phase="done")]), JOB.job_id, LOG)
    assert [relay.poll() for _ in range(3)] == [None, None, None]
    assert len([text for text in printed(caplog) if "cannot be looked at" in text]) == 1
    assert relay.poll() is not None


def test_a_cursor_that_makes_no_sense_starts_from_the_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cursor = tmp_path / "relayed.cursor"
    cursor.write_text("\x00 garbage")
    Relay(Script([status(phase="running")], ["x"]), JOB.job_id, LOG, cursor_file=cursor).poll()
    assert printed(caplog).count("x") == 1


def test_a_folder_that_is_gone_costs_only_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    relay = Relay(
        Script([status(phase="running")], ["x"]), JOB.job_id, LOG, cursor_file=tmp_path / "gone" / "cursor"
    )
    relay.poll()
    relay.poll()
    assert printed(caplog).count("x") == 1


def allocated(placement: dict[str, int], decision: int, reason: str, phase: str = "running") -> ClusterJob:
    job = replace(JOB, allocation=Allocation(decision=decision, placement=placement, reason=reason))
    return status(job, phase=phase, held=placement, incarnation=decision)


@pytest.mark.parametrize(
    ("before", "now", "want"),
    [
        (None, status(phase="waiting", message="the cluster is full"), ["waiting: the cluster is full"]),
        (None, status(phase="waiting"), ["waiting: for the next scheduling cycle"]),
        (
            status(phase="waiting"),
            allocated({"node-0": 2}, 1, "first start"),
            ["allocated node-0: 2 (decision 1): first start", "running, incarnation 1: on node-0: 2"],
        ),
        (
            allocated({"node-0": 2}, 1, "first start"),
            allocated({"node-1": 1}, 2, "makes room for digits"),
            [
                "resizing 2 -> 1 GPUs (decision 2): makes room for digits",
                "running, incarnation 2: on node-1: 1",
            ],
        ),
        (
            allocated({"node-0": 2}, 1, "first start"),
            allocated({}, 2, "makes room", phase="waiting"),
            ["pausing 2 -> 0 GPUs (decision 2): makes room", "waiting: makes room"],
        ),
        (allocated({"node-0": 2}, 1, "a"), allocated({"node-0": 2}, 1, "a"), []),
        (allocated({"node-0": 2}, 1, "a"), status(phase="done", message="complete"), ["done: complete"]),
    ],
    ids=["waiting with a cause", "waiting", "first start", "resize", "pause", "nothing new", "the end"],
)
def test_changes_in_words(before: ClusterJob | None, now: ClusterJob, want: list[str]) -> None:
    assert changes(before, now) == want

"""Jobs on the local cluster: started, resized, killed, failed and stopped, as real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from local_service import Service, awaited, identity, kill

from pollux.errors import ClusterError, Conflict, Refused
from pollux.local.nodes import LocalNode, LocalNodes
from pollux_agent.protocol import Allocation, JobSpec, encode

BUSY = "while True:\n    pass\n"
RAISE = "import sys\n\nraise ValueError('no such data set')\n"


def test_a_job_runs_to_its_end_on_the_slots_it_was_given(service: Service) -> None:
    service.submit("job", "count.py", "20")
    service.give("job", {"node-0": 2, "node-1": 1})
    done = service.until("job", "done")
    assert done.status.outcome is not None
    assert done.status.outcome.step == 20
    assert (done.status.held, done.allocation.placement, done.status.max_gpus_seen) == ({}, {}, 3)
    assert done.status.attained_gpu_s > 1
    starts = {(event.node, event.slots) for event in service.events("job", "*") if event.event == "start"}
    assert starts == {("node-0", (0,)), ("node-0", (1,)), ("node-1", (0,))}
    assert [event.event for event in service.driver_events("job")] == [
        "submit",
        "allocate",
        "start",
        "exit",
        "end",
    ]
    lines = service.cluster.logs("job").lines
    assert "[1/node-0] counts on from 0" in lines
    assert sorted(line.partition("]")[0] for line in lines) == ["[1/node-0", "[1/node-0", "[1/node-1"]
    assert service.submit("job", "count.py", "20").status.phase == "done"


def test_a_resize_goes_on_from_the_checkpoint_and_slots_have_one_holder(service: Service) -> None:
    """A moves off a slot that B was given: B starts only when A's workers are gone."""
    service.submit("a", "count.py", "100000")
    service.submit("b", "count.py", "100000")
    service.give("a", {"node-0": 2})
    service.until("a", "running")
    service.give("a", {"node-0": 1})
    service.give("b", {"node-0": 1, "node-1": 1})
    service.until("a", "starting", "running")
    awaited(lambda: service.cluster.job("a"), lambda job: job.status.incarnation == 2)
    service.until("a", "running")
    service.until("b", "running")
    assert service.cluster.held() == {"a": {"node-0": 1}, "b": {"node-0": 1, "node-1": 1}}
    events = service.events("a")
    last = max(event.step for event in events if event.event == "stop")
    again = next(event for event in events if event.event == "start" and event.step > 0)
    assert again.step == last
    exit_a = next(event for event in service.driver_events("a") if event.event == "exit")
    start_b = next(event for event in service.driver_events("b") if event.event == "start")
    assert start_b.t_unix_s >= exit_a.t_unix_s
    for job_id in ("a", "b"):
        service.cluster.stop(job_id, "failed")
        assert service.until(job_id, "ended").status.stop == "failed"
    assert service.processes() == []
    assert service.cluster.held() == {}


def test_a_worker_killed_by_the_kernel_costs_no_failure(service: Service) -> None:
    service.submit("job", "count.py", "100000")
    service.give("job", {"node-0": 2})
    service.until("job", "running")
    kill(service.workers()[0])
    job = awaited(lambda: service.cluster.job("job"), lambda job: job.status.incarnation == 2)
    assert job.status.outcome is None
    assert service.until("job", "running").status.restarts == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(RAISE, "ValueError: no such data set", id="an exception"),
        pytest.param("def broken(:\n", "SyntaxError", id="a syntax error"),
        pytest.param("import nowhere_to_be_found\n", "ModuleNotFoundError", id="a missing module"),
        pytest.param("import sys\n\nsys.exit(3)\n", "status 3", id="its own exit status"),
        pytest.param("print('hello')\n", "ElasticJob", id="nothing trained"),
    ],
)
def test_a_script_that_never_steps_fails_for_good_and_says_why(
    service: Service, text: str, message: str
) -> None:
    service.submit("job", service.script("script.py", text))
    service.give("job", {"node-0": 1})
    job = service.until("job", "failed")
    assert job.status.final
    assert job.status.outcome is not None
    assert message in job.status.outcome.error
    assert message in job.status.outcome.traceback
    assert "runpy" not in job.status.outcome.traceback
    assert any(message in line for line in service.cluster.logs("job").lines)
    assert service.cluster.held() == {}


def test_a_failed_job_is_opened_again_with_the_new_spec_and_the_next_number(service: Service) -> None:
    service.submit("job", service.script("script.py", RAISE))
    service.give("job", {"node-0": 1})
    service.until("job", "failed")
    again = service.submit("job", "count.py", "5")
    assert (again.status.phase, again.status.try_number, again.status.final) == ("waiting", 2, False)
    service.give("job", {"node-0": 1})
    assert service.until("job", "done").status.incarnation == 2


def test_a_fresh_submission_starts_over(service: Service) -> None:
    service.submit("job", "count.py", "10")
    service.give("job", {"node-0": 1})
    service.until("job", "done")
    assert service.submit("job", "count.py", "10", fresh=True).status.phase == "waiting"
    service.give("job", {"node-0": 1})
    assert service.until("job", "done").status.incarnation == 2
    starts = [event.step for event in service.events("job") if event.event == "start"]
    assert starts == [0, 0]


def test_a_done_job_that_is_asked_for_more_goes_on_from_its_end(service: Service) -> None:
    service.submit("job", "count.py", "10")
    service.give("job", {"node-0": 1})
    service.until("job", "done")
    again = service.submit("job", "count.py", "25")
    assert (again.status.phase, again.status.try_number, again.status.outcome) == ("waiting", 2, None)
    service.give("job", {"node-0": 1})
    done = service.until("job", "done")
    assert done.status.outcome is not None
    assert (done.status.outcome.step, done.status.outcome.steps_taken) == (25, 15)
    assert service.submit("job", "count.py", "25").status.phase == "done"


def test_a_fresh_submission_of_a_job_at_work_starts_over_too(service: Service) -> None:
    service.submit("job", "count.py", "100000")
    service.give("job", {"node-0": 1})
    awaited((service.folder("job").checkpoints / "step").exists)
    service.folder("job").logged.write_text('{"goodput": 10}')
    service.cluster.stop("job", "failed")
    service.submit("job", "count.py", "100000", fresh=True)
    awaited(lambda: service.cluster.job("job"), lambda job: job.status.incarnation == 2)
    service.until("job", "running")
    starts = [event.step for event in service.events("job") if event.event == "start"]
    assert starts == [0, 0]
    assert not service.folder("job").logged.exists()


@pytest.mark.parametrize("reason", ["success", "clear"])
def test_a_stop_by_a_person_leaves_a_checkpoint_to_resume_from(service: Service, reason: str) -> None:
    service.submit("job", "count.py", "100000")
    service.give("job", {"node-1": 1})
    service.until("job", "running")
    service.cluster.stop("job", reason)
    ended = service.until("job", "ended")
    assert ended.status.outcome is not None
    assert ended.status.outcome.kind == "interrupted"
    service.submit("job", "count.py", str(ended.status.outcome.step + 5))
    service.give("job", {"node-1": 1})
    service.until("job", "done")
    starts = [event.step for event in service.events("job") if event.event == "start"]
    assert starts == [0, ended.status.outcome.step]


def test_a_submission_takes_back_a_stop_that_is_under_way(service: Service) -> None:
    service.submit("job", "count.py", "100000")
    service.give("job", {"node-1": 1})
    service.until("job", "running")
    service.cluster.stop("job", "clear")
    service.until("job", "stopping")
    again = service.submit("job", "count.py", "100000")
    assert (again.status.stop, again.status.try_number) == (None, 2)
    awaited(lambda: service.cluster.job("job"), lambda job: job.status.incarnation == 2)


def test_a_script_deaf_to_signals_is_gone_within_seconds_of_mark_failed(service: Service) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n" + BUSY
    service.submit("job", service.script("deaf.py", deaf))
    service.give("job", {"node-0": 1})
    awaited(lambda: service.cluster.logs("job").lines)
    service.cluster.stop("job", "failed")
    service.until("job", "ended", timeout_s=8)
    assert service.processes() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"script": "nowhere.py"}, "script", id="a script that does not exist"),
        pytest.param({"script": "~nobody-of-that-name/train.py"}, "script", id="a script in nobody's home"),
        pytest.param({"script": "x" * 5000}, "script", id="a script whose name no file can have"),
        pytest.param({"min_gpus": 5, "max_gpus": 8}, "min_gpus", id="more GPUs than the cluster has"),
        pytest.param({"gpu_types": ("h100",)}, "gpu_types", id="a GPU type that it lacks"),
    ],
)
def test_what_can_never_run_is_refused_by_field(service: Service, change: dict, field: str) -> None:
    plain = {"script": "count.py", "max_gpus": 4, **change}
    spec = JobSpec(name="job", initial_batch_size=8, max_local_batch_size=8, **plain)
    with pytest.raises(Refused, match=rf"^{field}: "):
        service.cluster.submit("job", identity=identity("job"), spec=spec, run_id=None)


def test_more_gpus_than_there_are_of_one_type_are_refused(
    make_service: Callable[..., Service], tmp_path: Path
) -> None:
    nodes = (LocalNode(name="a", slots=2, gpu_type="x"), LocalNode(name="b", slots=1, gpu_type="y"))
    (tmp_path / "cluster.json").write_text(encode(LocalNodes(nodes=nodes)))
    service = make_service("--cluster", str(tmp_path / "cluster.json"))
    plain = {"name": "job", "script": "count.py", "initial_batch_size": 8, "max_local_batch_size": 8}
    for change in ({"min_gpus": 3}, {"min_gpus": 2, "gpu_types": ("y",)}):
        spec = JobSpec(**plain, max_gpus=4, **change)
        with pytest.raises(Refused, match=r"^min_gpus: "):
            service.cluster.submit("job", identity=identity("job"), spec=spec, run_id=None)


@pytest.mark.parametrize("job_id", ["..", "a/b", "A", "x" * 64])
def test_an_id_that_is_no_label_is_refused(service: Service, job_id: str) -> None:
    spec = JobSpec(name="job", script="count.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=1)
    with pytest.raises(ClusterError):
        service.cluster.submit(job_id, identity=identity("job"), spec=spec, run_id=None)
    assert not list((service.state / "jobs").glob("*"))


def test_an_older_decision_changes_nothing(service: Service) -> None:
    service.submit("job", "count.py", "5")
    old, new = service.cluster.next_decision(), service.cluster.next_decision()
    service.cluster.patch_allocation("job", expected=0, allocation=Allocation(decision=new))
    with pytest.raises(Conflict):
        service.cluster.patch_allocation(
            "job", expected=0, allocation=Allocation(decision=old, placement={"node-0": 1})
        )
    assert service.cluster.job("job").allocation.decision == new


@contextmanager
def busy_machine() -> Iterator[None]:
    """Six times as many other processes that compute as there are cores."""
    others = [
        subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True)
        for _ in range(6 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_a_slot_gets_its_share_of_a_busy_machine_and_no_more(make_service: Callable[..., Service]) -> None:
    service = make_service("--slot-cap", "0.3")
    if not any(Path("/sys/fs/cgroup").glob("cpu/pollux-*")):
        pytest.skip("needs a machine where CPU quotas are permitted")
    service.submit("job", service.script("busy.py", "print('busy', flush=True)\n" + BUSY))
    service.give("job", {"node-0": 1})
    awaited(lambda: service.cluster.logs("job").lines)
    worker = psutil.Process(service.workers()[0].pid)
    with busy_machine():
        before, begin = worker.cpu_times(), time.monotonic()
        time.sleep(4)
        after, seconds = worker.cpu_times(), time.monotonic() - begin
    used = (after.user + after.system - before.user - before.system) / seconds
    assert used == pytest.approx(0.3, rel=0.25)
    (group,) = Path("/sys/fs/cgroup").glob("cpu/pollux-*/job.node-0")
    service.cluster.stop("job", "failed")
    service.until("job", "ended")
    assert not group.exists()


def test_a_job_sees_only_the_environment_that_is_meant_for_it(
    make_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracking server's credentials and TLS settings are meant for a job that has a run there."""
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", "/ca.pem")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/ca.pem")
    service = make_service()
    script = service.script("env.py", "import os\n\nprint(sorted(os.environ))\n")
    for job_id, run_id in (("job", None), ("tracked", "run")):
        service.submit(job_id, script, run_id=run_id)
        service.give(job_id, {"node-0": 1})
    for job_id in ("job", "tracked"):
        service.until(job_id, "failed")
        printed = " ".join(service.cluster.logs(job_id).lines)
        assert "AIRFLOW" not in printed
        assert "POLLUX_JOB_ID" in printed and "REQUESTS_CA_BUNDLE" in printed
        for name in ("MLFLOW_TRACKING_SERVER_CERT_PATH", "MLFLOW_TRACKING_TOKEN"):
            assert (name in printed) == (job_id == "tracked")
    assert os.environ["AIRFLOW__CORE__FERNET_KEY"] == "secret"

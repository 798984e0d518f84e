"""The service itself: one a folder, for its owner only, and nothing is left when it ends, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from local_service import Service, awaited, identity

from pollux.cluster.local import LocalCluster
from pollux.errors import ClusterUnavailable, ConfigError
from pollux.local.serve import ServeOptions, serve
from pollux_agent.protocol import JobSpec


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != "zombie" for process in processes)


def test_a_killed_service_takes_its_processes_along_and_jobs_resume_when_it_is_back(service: Service) -> None:
    service.submit("job", "count.py", "100000")
    service.submit("waits", "count.py", "5")
    service.give("job", {"node-0": 1, "node-1": 1})
    service.until("job", "running")
    awaited((service.folder("job").checkpoints / "step").exists)
    processes = service.processes()
    assert len(service.workers()) == 2
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGKILL)
    awaited(lambda: gone(processes), timeout_s=5)
    service.process.wait(10)
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        service.cluster.health()

    service.start()
    job = awaited(lambda: service.cluster.job("job"), lambda job: job.status.incarnation == 2)
    assert job.allocation.placement == {"node-0": 1, "node-1": 1}
    service.until("job", "running")
    starts = [event.step for event in service.events("job") if event.event == "start"]
    assert starts[0] == 0
    assert starts[1] >= 10
    assert service.cluster.job("waits").status.phase == "waiting"


def test_a_terminated_service_has_workers_checkpoint_and_leaves_nothing(service: Service) -> None:
    service.submit("job", "count.py", "100000")
    service.give("job", {"node-0": 1})
    service.until("job", "running")
    processes = service.processes()
    service.stop()
    assert service.process is not None
    assert service.process.returncode == 0
    assert gone(processes)
    assert not (service.state / "local.sock").exists()
    assert service.driver_events("job")[-1].event == "exit"
    assert not list(Path("/sys/fs/cgroup").glob("cpu/pollux-*/job.node-0"))
    stopped_at = max(event.step for event in service.events("job"))

    service.start()
    service.until("job", "running")
    resumed = [event for event in service.events("job") if event.event == "start"][-1]
    assert resumed.step == stopped_at


def test_a_request_to_stop_outlives_the_service(service: Service) -> None:
    deaf = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\n"
        "time.sleep(600)\n"
    )
    service.submit("job", service.script("deaf.py", deaf))
    service.give("job", {"node-0": 1})
    awaited(lambda: service.cluster.logs("job").lines)
    service.cluster.stop("job", "success")
    assert service.process is not None
    service.process.kill()
    service.process.wait(10)
    service.start()
    service.until("job", "ended")


def test_two_services_on_one_folder_are_refused(service: Service) -> None:
    command = [str(Path(sys.executable).with_name("pollux")), "local", "serve", "--state", str(service.state)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert "another local cluster runs in" in second.stderr
    assert service.cluster.health()["ok"]


def test_a_disk_that_refuses_is_named_and_leaves_no_half_done_lease(service: Service) -> None:
    in_the_way = service.state / "lease.json" / "in-the-way"
    in_the_way.mkdir(parents=True)
    with pytest.raises(ClusterUnavailable, match=r"cannot be written .*disk of the state folder"):
        with service.cluster.lease("first", timedelta(seconds=60)):
            pass
    shutil.rmtree(in_the_way.parent)
    with service.cluster.lease("second", timedelta(seconds=60)):
        pass


def test_a_service_that_hangs_is_named_and_waited_for_no_longer_than_asked(service: Service) -> None:
    assert service.process is not None
    service.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ClusterUnavailable, match=r"does not answer .* within 1 s .*hangs"):
            LocalCluster(service.cluster.socket, timeout=timedelta(seconds=1)).observe()
    finally:
        service.process.send_signal(signal.SIGCONT)
    assert service.cluster.observe().jobs == ()


def test_a_service_that_was_hung_does_nothing_for_those_who_wait_no_longer(service: Service) -> None:
    """Above all it gives no lease to a cycle that is gone: no other could schedule until that is over."""
    assert service.process is not None
    impatient = LocalCluster(service.cluster.socket, timeout=timedelta(seconds=1))
    spec = JobSpec(name="late", script="count.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=1)
    service.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ClusterUnavailable), impatient.lease("gone", timedelta(seconds=300)):
            pass
        with pytest.raises(ClusterUnavailable):
            impatient.submit("late", identity=identity("late"), spec=spec, run_id=None)
    finally:
        service.process.send_signal(signal.SIGCONT)
    log = service.state / "serve.log"
    awaited(lambda: log.read_text().count("came too late"), lambda count: count == 2)
    with service.cluster.lease("next", timedelta(seconds=60)):
        pass
    assert service.cluster.every_job().jobs == ()


def test_who_watches_the_status_waits_for_a_service_that_is_away(service: Service, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("pollux")),
        "status",
        "--state",
        str(service.state),
        "--watch",
    ]
    output = tmp_path / "watched"
    environ = {**os.environ, "FORCE_COLOR": "1", "MLFLOW_TRACKING_URI": ""}
    with output.open("wb") as file:
        watching = subprocess.Popen(command, stdout=file, stderr=file, env=environ)
    try:
        awaited(lambda: "no active jobs" in output.read_text())
        service.stop()
        awaited(lambda: "waits for the cluster" in output.read_text())
        service.start()
        awaited(lambda: "no active jobs" in output.read_text().rpartition("waits for the cluster")[2])
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    finally:
        watching.kill()
        watching.wait()


def test_only_the_owner_may_open_the_socket(service: Service) -> None:
    mode = (service.state / "local.sock").stat().st_mode
    assert mode & 0o777 == 0o600


def test_a_state_folder_with_a_long_name_works(tmp_path: Path) -> None:
    state = tmp_path / ("long-" * 30)
    state.mkdir()
    service = Service(state)
    try:
        service.start()
        assert LocalCluster(state / "local.sock").observe().jobs == ()
    finally:
        service.stop()


def test_a_wrong_cluster_file_is_named_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"nodes": [{"name": "node-0", "slots": 0}]}')
    command = [str(Path(sys.executable).with_name("pollux")), "local", "serve", "--state", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "cluster.json: LocalNodes: nodes.0.slots" in run.stderr


def test_a_cluster_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    named = tmp_path / "typo.json"
    with pytest.raises(ConfigError, match=r"typo\.json is no file"):
        serve(ServeOptions(state=tmp_path / "state", cluster=named, scripts=tmp_path))
    assert not named.exists()


def test_nothing_listens_on_the_network_but_loopback(make_service: Callable[..., Service]) -> None:
    """All-reduces over two nodes with two workers each, watched from outside while they run."""
    script = (
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('joined', flush=True)\n"
        "time.sleep(600)\n"
    )
    service = make_service()
    service.submit("job", service.script("join.py", script))
    service.give("job", {"node-0": 2, "node-1": 2})
    awaited(lambda: service.cluster.logs("job").lines, lambda lines: len(lines) == 4)
    assert service.process is not None
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(service.process.pid), *service.processes()]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 5
    assert set(listening) == {"127.0.0.1"}

"""The service without its process: what a crash, a broken disk or a job's own children may leave."""

import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from local_service import awaited

from pollux.cluster.base import JobIdentity
from pollux.errors import Conflict
from pollux.local.nodes import DEFAULT_NODES
from pollux.local.service import LocalService
from pollux.local.slots import Slots
from pollux.local.store import JobStore
from pollux.local.workers import Site, WorkerOptions
from pollux_agent.driver import DriverState, Timing
from pollux_agent.protocol import Allocation, DriverEvent, JobSpec, Outcome, decode
from pollux_agent.records import write_outcome

SPEC = JobSpec(name="job", script="train.py", initial_batch_size=8, max_local_batch_size=8, max_gpus=4)


def opened(state: Path) -> LocalService:
    site = Site(
        nodes=DEFAULT_NODES, slots=Slots(DEFAULT_NODES), cgroups=None, options=WorkerOptions(slot_share=0.5)
    )
    return LocalService(store=JobStore(state), site=site, timing=Timing(), scripts=state)


@pytest.fixture
def service(tmp_path: Path) -> LocalService:
    (tmp_path / "train.py").write_text("")
    service = opened(tmp_path)
    for name in ("a", "b"):
        identity = JobIdentity(deployment="test", dag_id="train", run_id=name, task_id="train")
        service.submit(name, identity=identity, spec=SPEC, run_id=None, fresh=False, now_unix_s=1.0)
    return service


def test_a_job_that_ended_just_before_a_crash_is_over_when_the_service_is_back(
    service: LocalService, tmp_path: Path
) -> None:
    store = JobStore(tmp_path)
    job = service.job("a", 1.0)
    held = Allocation(decision=1, placement={"node-0": 1})
    store.save_job(replace(job, allocation=held, status=replace(job.status, phase="running")))
    store.save_driver("a", DriverState(phase="done", incarnation=1))
    again = opened(tmp_path)
    again.tick(2.0)
    assert [job.job_id for job in again.view(2.0).jobs] == ["b"]
    assert again.job("a", 2.0).allocation.placement == {}
    again.tick(3.0)
    assert [job.job_id for job in opened(tmp_path).view(3.0).jobs] == ["b"]


@pytest.mark.parametrize("lost", ["driver.json", "job.json"])
def test_a_job_whose_books_are_lost_counts_its_incarnations_on(
    service: LocalService, tmp_path: Path, lost: str
) -> None:
    """Otherwise its checkpoints would fence it off, and old outcomes be taken for new ones."""
    folder = JobStore(tmp_path).folder("a")
    for incarnation in (2, 10):
        write_outcome(
            folder,
            Outcome(
                kind="failed",
                job_id="a",
                incarnation=incarnation,
                rank=0,
                time_unix_s=2.0,
                step=5,
                progress=5.0,
            ),
        )
    (folder.root / "events-11-0.jsonl").touch()
    (folder.root / lost).unlink()
    again = opened(tmp_path)
    identity = JobIdentity(deployment="test", dag_id="train", run_id="a", task_id="train")
    again.submit("a", identity=identity, spec=SPEC, run_id=None, fresh=False, now_unix_s=3.0)
    held = Allocation(decision=1, placement={"node-0": 1})
    again.patch_allocation("a", expected=0, allocation=held)
    try:
        again.tick(4.0)
        assert again.job("a", 4.0).status.incarnation == 12
    finally:
        again.stop("a", "failed", 5.0)
        awaited(
            lambda: [again.tick(time.time()), again.job("a", 6.0).status.phase][1],
            lambda phase: phase == "ended",
        )


def test_a_job_whose_files_cannot_be_written_harms_no_other(
    service: LocalService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "jobs" / "a" / "driver.json"
    broken.unlink()
    (broken / "in-the-way").mkdir(parents=True)
    for name in ("a", "b"):
        service.patch_allocation(name, expected=0, allocation=Allocation(decision=1))
    for now_unix_s in (2.0, 2.2, 2.4):
        service.tick(now_unix_s)
    assert [service.job(name, 2.4).status.acted_decision for name in ("a", "b")] == [0, 1]
    assert caplog.text.count("a: waits until its files can be written") == 1, "a full disk fills no log"
    (broken / "in-the-way").rmdir()
    broken.rmdir()
    service.tick(3.0)
    assert service.job("a", 3.0).status.acted_decision == 1


def test_a_killed_schedulers_lease_ends_also_where_the_clock_was_set_back(service: LocalService) -> None:
    service.take_lease("first", 60.0, 100_000.0)
    with pytest.raises(Conflict, match="held by first"):
        service.take_lease("second", 60.0, 100_059.0)
    service.take_lease("second", 60.0, 99_000.0)


def test_slots_come_free_also_where_neither_events_nor_logs_can_be_written(
    service: LocalService, tmp_path: Path
) -> None:
    """As on a full disk; what the driver did is written down once that is possible."""
    folder = tmp_path / "jobs" / "a"
    events, logs = folder / "driver.jsonl", folder / "logs"
    before = events.read_text()
    events.unlink()
    events.mkdir()
    logs.symlink_to("/dev/full")
    service.patch_allocation("a", expected=0, allocation=Allocation(decision=1, placement={"node-0": 1}))

    def phase() -> str:
        service.tick(time.time())
        return service.job("a", time.time()).status.phase

    awaited(phase, lambda phase: phase == "failed")
    assert service.held() == {}
    events.rmdir()
    events.write_text(before)
    service.tick(time.time())
    written = [decode(DriverEvent, line).event for line in events.read_text().splitlines()]
    assert [name for name in written if name != "signal"] == ["submit", "allocate", "start", "exit", "end"]
    assert service.job("a", time.time()).status.phase == "failed"
    assert service.view(time.time()).jobs[0].job_id == "b"


def test_where_there_are_no_cpu_groups_nothing_of_a_job_outlives_its_launcher(
    service: LocalService, tmp_path: Path
) -> None:
    child = "import subprocess, sys\np = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    (tmp_path / "train.py").write_text(child + "open(sys.argv[1], 'w').write(str(p.pid))\n")
    noted = tmp_path / "pid"
    spec = replace(SPEC, arguments=(str(noted),))
    identity = JobIdentity(deployment="test", dag_id="train", run_id="c", task_id="train")
    service.submit("c", identity=identity, spec=spec, run_id=None, fresh=False, now_unix_s=1.0)
    service.patch_allocation("c", expected=0, allocation=Allocation(decision=1, placement={"node-0": 1}))

    def phase() -> str:
        service.tick(time.time())
        return service.job("c", time.time()).status.phase

    awaited(phase, lambda phase: phase == "failed")
    assert service.held() == {}
    stray = int(noted.read_text())
    assert not psutil.pid_exists(stray) or psutil.Process(stray).status() == psutil.STATUS_ZOMBIE


def test_pipes_and_devices_in_a_jobs_folder_hold_nobody_up(service: LocalService, tmp_path: Path) -> None:
    """A job's folder is its own; what it puts there may be read for ever, and must not be."""
    folder = tmp_path / "jobs" / "a"
    (folder / "outcomes").mkdir()
    (folder / "logs").mkdir()
    for name in ("outcomes/1-1.json", "complete.json", "events-1-0.jsonl", "logs/0-node-0.log"):
        os.mkfifo(folder / name)
    (folder / "outcomes" / "1-2.json").symlink_to("/dev/zero")
    service.patch_allocation("a", expected=0, allocation=Allocation(decision=1, placement={"node-0": 1}))

    def phase() -> str:
        service.tick(time.time())
        service.logs("a", "")
        return service.job("a", time.time()).status.phase

    awaited(phase, lambda phase: phase == "failed")
    assert service.held() == {}
    (folder / "driver.json").unlink()
    os.mkfifo(folder / "driver.json")
    assert [job.job_id for job in opened(tmp_path).view(1.0, every=True).jobs] == ["b"]

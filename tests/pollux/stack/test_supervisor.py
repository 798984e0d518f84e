"""The supervisor over real small processes: start order, restarts, and that nothing stays behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pollux.cli import app
from pollux.errors import StackError
from pollux.stack import control
from pollux.stack.memory import MemorySampler, stack_processes, total_bytes
from pollux.stack.processes import children, is_alive, send, wait_until
from pollux.stack.record import StackPlan, StackRecord, read_record
from pollux.stack.services import keep_logs_small, log_path
from pollux.stack.supervisor import MAX_RESTARTS

TOY = Path(__file__).with_name("toy_supervisor.py")
WAIT_S = 60.0


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(TOY), str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        control.down(tmp_path)
        process.kill()
        process.wait()


def await_record(state: Path, condition: Callable[[StackRecord], bool]) -> StackRecord:
    def holds() -> bool:
        record = read_record(state)
        return record is not None and condition(record)

    assert wait_until(holds, WAIT_S), (read_record(state), control.tail(state / "logs" / "fragile.log"))
    record = read_record(state)
    assert record is not None
    return record


def is_ready(record: StackRecord) -> bool:
    return record.phase == "ready"


def test_all_services_run_once_the_first_program_has_ended(
    tmp_path: Path, toy: subprocess.Popen[bytes]
) -> None:
    record = await_record(tmp_path, is_ready)
    assert (tmp_path / "migrated").exists()
    assert {name for name, part in record.components.items() if part.process} == {
        *("breeder", "stubborn", "fragile")
    }
    assert record.supervisor.pid == toy.pid
    assert control.is_running(record)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_the_supervisor_ends(
    tmp_path: Path, toy: subprocess.Popen[bytes], signum: signal.Signals
) -> None:
    processes = stack_processes(await_record(tmp_path, is_ready))
    assert len(processes) == 7, "supervisor, guard, three services and two children of one"
    toy.send_signal(signum)
    toy.wait(WAIT_S)
    assert wait_until(lambda: not any(map(is_alive, processes)), WAIT_S)


def test_a_state_folder_that_is_removed_ends_the_stack_and_is_not_made_again(tmp_path: Path) -> None:
    """Nobody could find its processes any more, and the next stack in that folder is not to be disturbed."""
    state = tmp_path / "state"
    state.mkdir()
    toy = subprocess.Popen([sys.executable, str(TOY), str(state)], stderr=subprocess.DEVNULL)
    try:
        processes = stack_processes(await_record(state, is_ready))
        shutil.rmtree(state)
        assert toy.wait(WAIT_S) == 1
        assert wait_until(lambda: not any(map(is_alive, processes)), WAIT_S)
        assert not state.exists()
    finally:
        control.down(state)
        toy.kill()
        toy.wait(WAIT_S)


def test_down_ends_what_is_left_when_supervisor_and_guard_were_killed(
    tmp_path: Path, toy: subprocess.Popen[bytes]
) -> None:
    record = await_record(tmp_path, is_ready)
    processes = stack_processes(record)
    assert record.guard is not None
    for helper in (record.guard, record.supervisor):
        os.kill(helper.pid, signal.SIGKILL)
    toy.wait(WAIT_S)
    assert control.down(tmp_path)
    assert not any(map(is_alive, processes))
    stopped = read_record(tmp_path)
    assert stopped is not None
    assert stopped.phase == "stopped"
    assert not control.down(tmp_path), "a second time there is nothing to stop"


def test_a_service_that_is_killed_is_started_again_without_its_children(
    tmp_path: Path, toy: subprocess.Popen[bytes]
) -> None:
    before = await_record(tmp_path, is_ready).components["breeder"]
    assert before.process is not None
    os.kill(before.process.pid, signal.SIGKILL)
    again = await_record(tmp_path, lambda record: record.components["breeder"].restarts == 1)
    after = await_record(
        tmp_path, lambda record: record.components["breeder"].process not in (None, before.process)
    )
    assert again.phase == after.phase == "ready"
    assert not is_alive(before.process)
    assert "breeder: ended with signal SIGKILL" not in control.tail(after.components["breeder"].log)


def test_a_service_that_hangs_is_started_again_and_those_seen_through_it_are_not(tmp_path: Path) -> None:
    command = [sys.executable, str(TOY), str(tmp_path), "hasty"]
    toy = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        before = await_record(tmp_path, is_ready)
        (tmp_path / "stubborn.up").unlink()
        after = await_record(
            tmp_path,
            lambda record: (
                record.components["stubborn"].restarts > 0
                and all(part.ready for part in record.components.values())
            ),
        )
        assert {name: part.restarts for name, part in after.components.items() if part.restarts} == {
            "stubborn": 1
        }
        assert after.components["breeder"].process == before.components["breeder"].process
        assert after.phase == "ready"
        hung = before.components["stubborn"].process
        assert hung is not None
        assert not is_alive(hung)
    finally:
        control.down(tmp_path)
        toy.wait(WAIT_S)


def test_a_service_whose_lasting_child_is_killed_is_started_again(tmp_path: Path) -> None:
    """As the executor's idle worker that holds the lock of their queue; another child may go."""
    toy = subprocess.Popen([sys.executable, str(TOY), str(tmp_path), "hasty"], stderr=subprocess.DEVNULL)
    try:
        breeder = await_record(tmp_path, is_ready).components["breeder"].process
        assert breeder is not None
        (lasting,) = children(breeder, "sleep 301")
        (passing,) = children(breeder, "sleep 300")
        send(passing, signal.SIGKILL)
        assert wait_until(lambda: not children(breeder, "sleep 300"), WAIT_S)
        assert is_alive(breeder)

        send(lasting, signal.SIGKILL)

        def again(record: StackRecord) -> bool:
            return record.components["breeder"].restarts == 1 and record.components["breeder"].ready

        after = await_record(tmp_path, again)
        assert (after.phase, is_alive(breeder)) == ("ready", False)
    finally:
        control.down(tmp_path)
        toy.wait(WAIT_S)


def test_a_record_that_cannot_be_written_ends_nothing_and_is_written_later(
    tmp_path: Path, toy: subprocess.Popen[bytes]
) -> None:
    """As on a full disk, just when a service is killed."""
    before = await_record(tmp_path, is_ready).components["fragile"]
    assert before.process is not None
    (tmp_path / "fragile.up").unlink()
    (tmp_path / "stack.json").unlink()
    (tmp_path / "stack.json" / "in-the-way").mkdir(parents=True)
    try:
        os.kill(before.process.pid, signal.SIGKILL)
        assert wait_until((tmp_path / "fragile.up").exists, WAIT_S), "it is started again"
        assert toy.poll() is None
    finally:
        shutil.rmtree(tmp_path / "stack.json")
    after = await_record(tmp_path, lambda record: record.components["fragile"].restarts == 1)
    assert after.phase == "ready"


def test_services_that_end_because_the_disk_is_full_do_not_stop_the_others(tmp_path: Path) -> None:
    toy = subprocess.Popen([sys.executable, str(TOY), str(tmp_path), "hasty"], stderr=subprocess.DEVNULL)
    log = tmp_path / "logs" / "fragile.log"
    try:
        before = await_record(tmp_path, is_ready)
        (tmp_path / "stack.json").unlink()
        (tmp_path / "stack.json" / "in-the-way").mkdir(parents=True)
        (tmp_path / "poison").touch()
        assert wait_until(lambda: log.read_text().count("poisoned") > 2 * MAX_RESTARTS, WAIT_S)
        (tmp_path / "poison").unlink()
        shutil.rmtree(tmp_path / "stack.json")
        after = await_record(tmp_path, lambda record: all(part.ready for part in record.components.values()))
        assert after.phase == "ready"
        assert after.components["breeder"].process == before.components["breeder"].process
    finally:
        control.down(tmp_path)
        toy.wait(WAIT_S)


def test_a_stack_whose_disk_is_full_is_not_well(
    tmp_path: Path, toy: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    await_record(tmp_path, is_ready)
    command = ["stack", "status", "--state", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    status = CliRunner().invoke(app, command)
    assert status.exit_code == 1
    assert "the disk of the state folder is full" in status.output


@pytest.mark.slow
def test_a_service_that_keeps_ending_stops_the_stack_and_names_its_log(
    tmp_path: Path, toy: subprocess.Popen[bytes]
) -> None:
    processes = stack_processes(await_record(tmp_path, is_ready))
    (tmp_path / "poison").touch()
    told = await_record(tmp_path, lambda record: record.phase == "failed")
    assert told.components["stubborn"].process, "the cause is told before all have ended, which takes a while"
    assert toy.wait(60) == 1
    record = read_record(tmp_path)
    assert record is not None
    assert record.phase == "failed"
    assert "fragile: ended 6 times" in record.error
    assert str(tmp_path / "logs" / "fragile.log") in record.error
    assert control.tail(tmp_path / "logs" / "fragile.log").splitlines()[-1] == "poisoned"
    assert wait_until(lambda: not any(map(is_alive, processes)), WAIT_S)


def test_a_service_that_ends_during_the_start_fails_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "poison").touch()
    process = subprocess.Popen([sys.executable, str(TOY), str(tmp_path)], stderr=subprocess.DEVNULL)
    assert process.wait(WAIT_S) == 1
    record = read_record(tmp_path)
    assert record is not None
    assert record.phase == "failed"
    assert "fragile: ended with exit code 3 while the stack started" in record.error


def test_a_second_supervisor_is_refused(tmp_path: Path, toy: subprocess.Popen[bytes]) -> None:
    first = await_record(tmp_path, is_ready)
    second = subprocess.run([sys.executable, str(TOY), str(tmp_path)], check=False, timeout=WAIT_S)
    assert second.returncode == 1
    assert is_alive(first.supervisor)
    assert read_record(tmp_path) == first


def test_two_starts_at_once_leave_one_stack_that_both_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both looked before either had begun; the supervisor of the second is refused."""
    started: list[subprocess.Popen[bytes]] = []

    def overtaken(plan: StackPlan, *, tethered: bool) -> subprocess.Popen[bytes]:
        for _ in range(2):
            started.append(subprocess.Popen([sys.executable, str(TOY), str(plan.state)]))
            await_record(tmp_path, is_ready)
        return started[-1]

    monkeypatch.setattr(control, "_spawn", overtaken)
    try:
        record = control.up(StackPlan(state=tmp_path, dags=tmp_path, scripts=tmp_path), tethered=False)
        assert record.supervisor.pid == started[0].pid
        assert started[1].wait(WAIT_S) == 1
        assert control.is_running(read_record(tmp_path))
    finally:
        control.down(tmp_path)
        for process in started:
            process.kill()
            process.wait()


def test_a_large_log_is_put_aside_and_written_on_from_its_beginning(tmp_path: Path) -> None:
    log, aside = log_path(tmp_path, "mlflow"), log_path(tmp_path, "mlflow").with_suffix(".log.1")
    log.parent.mkdir()
    with log.open("ab", buffering=0) as service:
        for text in (b"first\n", b"second\n"):
            service.write(text)
            keep_logs_small(tmp_path, max_bytes=10)
            service.write(b"on\n")
    assert aside.read_text() == "first\non\nsecond\n"
    assert log.read_text() == "on\n"


def test_memory_counts_every_process_of_the_stack(tmp_path: Path, toy: subprocess.Popen[bytes]) -> None:
    processes = stack_processes(await_record(tmp_path, is_ready))
    with MemorySampler(tmp_path) as sampler:
        assert wait_until(lambda: sampler.samples > 0, WAIT_S)
    pythons = 5
    assert sampler.peak_bytes > pythons * 2e6
    assert sampler.peak_bytes < 3 * total_bytes(processes)


def test_up_refuses_a_folder_of_dags_that_does_not_exist(tmp_path: Path) -> None:
    from pollux.errors import ConfigError

    plan = StackPlan(state=tmp_path / "state", dags=tmp_path / "nowhere", scripts=tmp_path)
    with pytest.raises(ConfigError, match=r"--dags: .*nowhere is no folder"):
        control.up(plan, tethered=True)
    assert not (tmp_path / "state").exists()


def test_a_spoilt_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{}")
    with pytest.raises(StackError, match=r"stack\.json.*phase: missing"):
        control.down(tmp_path)

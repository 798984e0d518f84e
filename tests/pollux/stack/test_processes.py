"""Identities of processes, ports, and the stack's record."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pollux.errors import ConfigError
from pollux.local.ports import free_port, is_free
from pollux.stack.processes import ProcessId, identify, is_alive, kill, members, send, this_boot
from pollux.stack.record import (
    ComponentState,
    StackPlan,
    StackRecord,
    read_record,
    record_path,
    stack_lock,
    write_record,
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def known(process: subprocess.Popen[bytes]) -> ProcessId:
    identity = identify(process.pid)
    assert identity is not None
    return identity


def test_a_process_with_another_start_time_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    real = known(sleeper)
    reused = replace(real, started_ticks=real.started_ticks - 1)
    assert is_alive(real)
    assert not is_alive(reused)
    assert not send(reused, signal.SIGKILL)
    assert kill((reused,), mark="")
    assert sleeper.poll() is None
    assert send(real, signal.SIGKILL)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    real = known(sleeper)
    os.kill(sleeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(real)
    assert not send(real, signal.SIGTERM)


def test_members_are_found_after_their_leader_has_ended() -> None:
    leader = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 >/dev/null & echo $!; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    identity = known(leader)
    leader.kill()
    leader.wait()
    leader.stdout.close()
    assert [process.pid for process in members((identity,), mark="")] == [child]
    assert kill((identity,), mark="")
    assert identify(child) is None


def test_tether_ends_the_program_with_its_parent() -> None:
    from pollux.stack import tether

    code = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-IS', {tether.__file__!r}, str(os.getpid()),"
        " 'sleep', '60'], start_new_session=True)\n"
        "comm = f'/proc/{child.pid}/comm'\n"
        "while open(comm).read().strip() != 'sleep': pass\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=30)
    pid = int(parent.stdout)
    handle = identify(pid)
    if handle is not None:
        from pollux.stack.processes import wait_until

        assert wait_until(lambda: not is_alive(handle), 10)


def test_a_port_in_use_is_not_chosen_and_a_free_one_is_kept() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = server.getsockname()[1]
        assert not is_free(taken)
        assert free_port(taken) != taken
    assert is_free(taken)
    assert free_port(taken) == taken


def test_no_connection_of_this_machine_takes_a_free_port_before_its_server_listens() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(20)]
    assert all(is_free(port) for port in ports)
    assert first < 21_000 or all(port < first for port in ports)


def make_record(state: Path) -> StackRecord:
    me = identify(os.getpid())
    assert me is not None
    return StackRecord(
        phase="ready",
        plan=StackPlan(state=state, interval_s=5.0, slot_cap=0.5),
        mark="0123",
        airflow_port=18080,
        execution_port=9090,
        mlflow_port=15000,
        login=state / "airflow" / "login.json",
        supervisor=me,
        guard=ProcessId(pid=77, started_ticks=12),
        components={"mlflow": ComponentState(process=me, ready=True, restarts=2, log=state / "m.log")},
        since_unix_s=1.5,
    )


def test_the_record_comes_back_as_it_was_written_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    assert read_record(tmp_path) is None
    write_record(record)
    assert read_record(tmp_path) == record
    assert record_path(tmp_path).stat().st_mode & 0o077 == 0
    assert record.airflow_url == "http://127.0.0.1:18080"
    assert record.leaders == (record.supervisor,)


def test_a_record_from_before_a_restart_of_the_machine_names_no_leaders(tmp_path: Path) -> None:
    """Their numbers are other processes by now, and their sessions other sessions."""
    record = make_record(tmp_path)
    assert replace(record, boot=this_boot()).leaders == record.leaders
    assert replace(record, boot="an earlier one").leaders == ()


def test_only_one_holds_the_state_folder(tmp_path: Path) -> None:
    with stack_lock(tmp_path) as first:
        with stack_lock(tmp_path) as second:
            assert (first, second) == (True, False)
    with stack_lock(tmp_path) as later:
        assert later


def test_a_plan_whose_socket_path_is_too_long_is_refused(tmp_path: Path) -> None:
    plan = StackPlan(state=tmp_path / ("x" * 120), dags=tmp_path, scripts=tmp_path)
    with pytest.raises(ConfigError, match=r"--state: .* at most"):
        plan.check()


def test_one_port_for_two_services_is_refused(tmp_path: Path) -> None:
    plan = StackPlan(state=tmp_path, dags=tmp_path, scripts=tmp_path, airflow_port=8080, mlflow_port=8080)
    with pytest.raises(ConfigError, match="--mlflow-port: 8080"):
        plan.check()

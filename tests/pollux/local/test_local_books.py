"""The small parts of the local cluster: cluster file, slots, CPU shares, logs, and the store."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.errors import ConfigError, Refused
from pollux.local.logs import LogPipe, read_logs
from pollux.local.nodes import LocalNode, LocalNodes, read_nodes
from pollux.local.slots import Slots
from pollux.local.store import JobStore
from pollux_agent.driver import quota
from pollux_agent.driver.quota import Cgroups, slot_share
from pollux_agent.protocol import JobFolder

NODES = LocalNodes(nodes=(LocalNode(name="node-0", slots=2), LocalNode(name="node-1", slots=3)))


def test_a_missing_cluster_file_is_made_with_two_nodes_of_two_slots(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    assert [(node.name, node.slots) for node in read_nodes(path).nodes] == [("node-0", 2), ("node-1", 2)]
    assert read_nodes(path).num_slots == 4


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        pytest.param([], "nodes", id="no nodes"),
        pytest.param([{"name": "a", "slots": 0}], "nodes.0.slots", id="no slots"),
        pytest.param([{"name": "A b", "slots": 1}], "nodes.0.name", id="a name that is no label"),
        pytest.param([{"name": "a", "slots": 1}] * 2, "'a' is there twice", id="one name twice"),
        pytest.param([{"name": "a", "slots": 2, "devices": [0]}], "one device a slot", id="too few devices"),
        pytest.param(
            [{"name": "a", "slots": 1, "devices": [0]}, {"name": "b", "slots": 1, "devices": [0]}],
            "a device can be one slot only",
            id="a device of two nodes",
        ),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_field(tmp_path: Path, nodes: list, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": nodes}))
    with pytest.raises(ConfigError, match=message):
        read_nodes(path)


PLACEMENTS = st.dictionaries(st.sampled_from(["node-0", "node-1"]), st.integers(1, 3), min_size=1)


@settings(deadline=None, max_examples=100)
@given(acts=st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), PLACEMENTS), max_size=30))
def test_no_slot_has_two_holders(acts: list[tuple[str, bool, dict[str, int]]]) -> None:
    slots = Slots(NODES)
    taken: dict[str, set[tuple[str, int]]] = {}
    for holder, takes, placement in acts:
        slots.release(holder)
        taken.pop(holder, None)
        if takes and not slots.blocked(placement):
            got = slots.take(holder, placement)
            taken[holder] = {(node, slot) for node, numbers in got.items() for slot in numbers}
            assert {node: len(numbers) for node, numbers in got.items()} == placement
        everything = [slot for held in taken.values() for slot in held]
        assert len(everything) == len(set(everything))
        assert {holder: sum(held.values()) for holder, held in slots.held().items()} == {
            holder: len(held) for holder, held in taken.items()
        }


def test_what_blocks_a_placement_is_named() -> None:
    slots = Slots(NODES)
    slots.take("other", {"node-0": 1})
    assert slots.blocked({"node-1": 3}) == ""
    assert "other" in slots.blocked({"node-0": 2})
    assert "node-7" in slots.blocked({"node-7": 1})


@pytest.mark.parametrize(
    ("num_cores", "num_slots", "cap", "want"),
    [
        pytest.param(2, 4, 1.0, 0.375, id="an equal part of what half a core for the stack leaves"),
        pytest.param(64, 4, 0.5, 0.5, id="the cap on a large machine"),
        pytest.param(64, 4, 1.0, 1.0, id="never more than a core"),
    ],
)
def test_a_slot_is_an_equal_share(num_cores: int, num_slots: int, cap: float, want: float) -> None:
    share = slot_share(num_slots=num_slots, cap=cap, reserve=0.5, num_cores=num_cores)
    assert share == pytest.approx(want)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        pytest.param({"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}, 0.5, id="version 1"),
        pytest.param({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None, id="1, no quota"),
        pytest.param({"cpu.max": "25000 100000\n", "cgroup.controllers": "cpu\n"}, 0.25, id="version 2"),
        pytest.param({"cpu.max": "max 100000\n", "cgroup.controllers": "cpu\n"}, None, id="2, no quota"),
    ],
)
def test_a_container_has_the_cores_that_its_quota_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], want: float | None
) -> None:
    version = 2 if "cpu.max" in files else 1
    monkeypatch.setattr(quota, "_parents", lambda base: [(version, base)])
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert quota.available_cores(tmp_path) == (want or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("version", "want"),
    [
        pytest.param(1, {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "7500"}, id="version 1"),
        pytest.param(2, {"cpu.max": "7500 10000"}, id="version 2"),
    ],
)
def test_a_quota_has_a_period_of_ten_milliseconds(tmp_path: Path, version: int, want: dict) -> None:
    group = Cgroups(tmp_path, version).create("job.node-0", 0.75)
    assert {path.name: path.read_text() for path in group.path.iterdir()} == want


def log(folder: JobFolder, incarnation: int, node: str, text: str) -> None:
    path = folder.log(incarnation, node)
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_logs_come_in_whole_lines_and_each_once(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    log(folder, 1, "node-0", "one\ntw")
    first = read_logs(folder, "")
    assert first.lines == ("[1/node-0] one",)
    log(folder, 1, "node-0", "o\n")
    log(folder, 1, "node-1", "three\n")
    second = read_logs(folder, first.cursor)
    assert second.lines == ("[1/node-0] two", "[1/node-1] three")
    log(folder, 1, "node-1", "cut off")
    log(folder, 2, "node-1", "four\n")
    third = read_logs(folder, second.cursor)
    assert third.lines == ("[1/node-1] cut off", "[2/node-1] four")
    assert read_logs(folder, third.cursor).lines == ()


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 400_000)), min_size=1, max_size=12),
)
def test_large_logs_come_in_pieces_without_loss(
    sizes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = JobFolder(tmp_path_factory.mktemp("job"))
    wanted: dict[int, str] = {}
    for number, (incarnation, size) in enumerate(sizes):
        line = f"{number} " + "x" * size
        log(folder, incarnation, "node-0", line + "\n")
        wanted[incarnation] = wanted.get(incarnation, "") + line
    cursor, got = "", dict.fromkeys(wanted, "")
    while (chunk := read_logs(folder, cursor)).lines:
        cursor = chunk.cursor
        for text in chunk.lines:
            head, _, rest = text.partition("] ")
            got[int(head[1:].partition("/")[0])] += rest
    assert got == wanted


@pytest.mark.parametrize("cursor", ["x", "1;../../etc/passwd=0", "1;node-0=-4"])
def test_a_foreign_cursor_is_refused(tmp_path: Path, cursor: str) -> None:
    with pytest.raises(Refused, match="cursor"):
        read_logs(JobFolder(tmp_path), cursor)


def test_a_log_has_a_limit_and_says_so(tmp_path: Path) -> None:
    pipe = LogPipe(tmp_path / "1-a.log", max_bytes=10)
    for _ in range(4):
        pipe.note("12345")
    pipe.close()
    lines = (tmp_path / "1-a.log").read_text().splitlines()
    assert lines[0] == "[pollux] 1"
    assert "this log is full" in lines[1]
    assert len(lines) == 2


def test_a_full_disk_costs_output_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "1-a.log").symlink_to("/dev/full")
    for pipe in (LogPipe(tmp_path / "1-a.log"), LogPipe(Path("/dev/full/logs/1-b.log"))):
        os.write(pipe.write_end, b"half a line")
        pipe.drain()
        pipe.close()


def test_a_job_that_prints_without_end_does_not_hold_up_the_service(tmp_path: Path) -> None:
    pipe = LogPipe(tmp_path / "1-a.log", max_bytes=10)
    with subprocess.Popen(["yes"], stdout=pipe.write_end) as endless:
        pipe.opened_by_child()
        begin = time.monotonic()
        for _ in range(20):
            pipe.drain()
        assert time.monotonic() - begin < 10
        endless.kill()
    pipe.close()


def test_decision_numbers_count_up_above_those_on_jobs(tmp_path: Path) -> None:
    store = JobStore(tmp_path)
    assert [store.next_decision([]), store.next_decision([1, 0]), store.next_decision([7])] == [1, 2, 8]


@pytest.mark.parametrize(
    "content", ["", "-7", "1e21", "999999999999999999999", "9007199254740992", "\u0663", "\x00", "9" * 5000]
)
def test_a_counter_that_holds_no_number_goes_on_above_the_jobs_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / "decision-counter").write_text(content)
    store = JobStore(tmp_path)
    assert store.last_decision() == 0
    assert [store.next_decision([8, 9007199254740000]), store.next_decision([])] == [9, 10]
    assert bool(content) == any("decision-counter" in message for message in caplog.messages)


def test_a_lease_that_was_taken_for_longer_than_any_is_void(tmp_path: Path) -> None:
    (tmp_path / "lease.json").write_text('{"holder": "x", "until_unix_s": 1e300, "ttl_s": 1e300}')
    assert JobStore(tmp_path).lease() is None


def test_an_unreadable_job_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "job").mkdir(parents=True)
    (tmp_path / "jobs" / "job" / "job.json").write_text("{")
    assert JobStore(tmp_path).load() == []

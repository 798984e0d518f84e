"""On a full disk a training goes on, with its last whole checkpoint, and says so."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from elastic_runs import DriverRun
from full_disk import SmallDisk, small_disk

from pollux_agent.driver.records import unsaved
from pollux_agent.errors import CheckpointError
from pollux_agent.records import is_full
from pollux_agent.torch.checkpoint import CheckpointStore

BALLAST = torch.zeros(250_000)
"""A megabyte."""


def awaited(what: Callable[[], object], run: DriverRun) -> None:
    until_s = time.monotonic() + 120
    while not what():
        assert time.monotonic() < until_s, run.output.read_text()
        time.sleep(0.02)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", megabytes=6) as made:
        yield made


@pytest.fixture
def run(disk: SmallDisk, tmp_path: Path) -> Iterator[DriverRun]:
    """The job's folder is on the disk; what the test itself needs is not."""
    made = DriverRun(disk.folder, epochs=1_000_000)
    made.seen, made.ready, made.output = tmp_path / "seen", tmp_path / "ready", tmp_path / "output"
    yield made
    made.end_all()


def steps_saved(run: DriverRun, incarnation: int) -> list[int]:
    return [event.step for event in run.events(incarnation) if event.event == "checkpoint"]


def started_on_a_disk_that_fills_up(run: DriverRun, disk: SmallDisk) -> BaseProcess:
    """A training that has saved, and has found no room since."""
    process = run.start(0, "--wait-at", "1", "--ballast", "250000", checkpoint_interval_s=0.2)
    run.wait_ready(process)
    awaited(lambda: steps_saved(run, 0), run)
    disk.fill(process.pid)
    awaited(lambda: unsaved(run.folder, 0), run)
    return process


def test_training_goes_on_says_so_once_and_saves_again_once_there_is_room(
    run: DriverRun, disk: SmallDisk
) -> None:
    process = started_on_a_disk_that_fills_up(run, disk)
    said = unsaved(run.folder, 0)
    seen = len(run.samples_seen())
    awaited(lambda: len(run.samples_seen()) > seen + 40, run)
    assert unsaved(run.folder, 0) == said
    stands = CheckpointStore(run.folder.checkpoints).newest()
    assert stands is not None
    assert f"the checkpoint of step {int(stands[-10:])} stands" in said
    assert "free some space there" in said
    assert len(list(run.folder.checkpoints.glob("checkpoint-*"))) <= 2

    disk.free(process.pid)
    awaited(lambda: not run.folder.unsaved.exists(), run)
    assert (CheckpointStore(run.folder.checkpoints).newest() or "") > stands
    run.terminate(process)
    output = run.output.read_text()
    assert output.count("training goes on, and saving is tried again and again") == 1
    assert output.count("checkpoints are written again") == 1
    assert run.outcome(0).error == ""


def test_sigterm_on_a_full_disk_says_which_checkpoint_stands_and_the_next_start_goes_on_from_it(
    run: DriverRun, disk: SmallDisk
) -> None:
    process = started_on_a_disk_that_fills_up(run, disk)
    run.terminate(process)
    stopped = run.outcome(0)
    stands = CheckpointStore(run.folder.checkpoints).newest()
    assert stands is not None
    assert (stopped.kind, stopped.traceback) == ("interrupted", "")
    assert f"step {stopped.step} is not saved" in stopped.error
    assert f"the checkpoint of step {int(stands[-10:])} stands" in stopped.error
    assert not list(run.folder.checkpoints.glob(".saving-*"))

    disk.free()
    run.terminate(run.start(1, "--wait-at", "1", "--ballast", "250000"))
    resumed = next(event for event in run.events(1) if event.event == "resume")
    assert resumed.step == int(stands[-10:])


def test_a_start_on_a_full_disk_goes_on_from_what_is_there(run: DriverRun, disk: SmallDisk) -> None:
    run.terminate(run.start(0, "--wait-at", "3", "--ballast", "250000"))
    before = run.outcome(0)
    if disk.mounted:
        disk.fill(0)
    process = run.start(1, "--wait-at", "3", "--ballast", "250000", checkpoint_interval_s=0.2)
    if not disk.mounted:
        disk.fill(process.pid)
    run.wait_ready(process)
    awaited(lambda: "is not saved" in run.output.read_text(), run)
    disk.free(process.pid)
    awaited(lambda: steps_saved(run, 1), run)
    run.terminate(process)
    assert run.outcome(1).step > before.step
    assert (run.folder.checkpoints / "incarnation").read_text().split()[0] == "1"


def test_where_a_third_checkpoint_finds_no_room_the_oldest_makes_way(disk: SmallDisk) -> None:
    """Only as long as the newest is whole."""
    store = CheckpointStore(disk.folder / "checkpoints")
    store.claim(1)
    state = {"ballast": BALLAST.repeat(2)}
    for step in (1, 2):
        store.save(state, step=step)
    if disk.mounted:
        for step in (3, 4):
            store.save(state, step=step)
        assert [int(name[-1]) for name in store.names()] == [4, 3]
    newest = disk.folder / "checkpoints" / store.names()[0] / "state.pt"
    newest.write_bytes(b"damaged")
    (disk.folder / "filling").write_bytes(b"x" * 2_000_000)
    if disk.mounted:
        with pytest.raises(CheckpointError, match="free some space there"):
            store.save(state | {"more": BALLAST.clone()}, step=9)
        assert len(store.names()) == 2


LOOP = """
import resource, sys
from pathlib import Path
from pollux_agent.torch.worker import forgiving
sys.stdout = forgiving(sys.stdout)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
for _ in range(10_000):
    print("a line that finds no room")
sys.stdout.flush()
sys.stderr.write("went on")
"""


def test_a_print_to_a_full_disk_does_not_end_the_training(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", LOOP], stdout=out, stderr=subprocess.PIPE, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"went on")


CUT = """
import resource, sys
from pathlib import Path
from pollux_agent.protocol import Event
from pollux_agent.records import append_line, is_full
path = Path(sys.argv[1])
event = Event(t_unix_s=1.0, event="step", node="a", slots=(0,), step=1, progress=1.0, batch_size=1)
append_line(path, event)
size = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, size + 10))
try:
    append_line(path, event)
except OSError as error:
    print(is_full(error), path.stat().st_size == size)
"""


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUT, str(tmp_path / "events.jsonl")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(
    ("error", "want"),
    [
        pytest.param(OSError(28, "No space left on device"), True, id="full"),
        pytest.param(OSError(122, "Disk quota exceeded"), True, id="over quota"),
        pytest.param(RuntimeError("[enforce fail] No space left on device"), True, id="in torch's words"),
        pytest.param(OSError(5, "Input/output error"), False, id="broken"),
    ],
)
def test_only_a_full_disk_counts_as_full(error: Exception, want: bool) -> None:
    assert is_full(error) is want

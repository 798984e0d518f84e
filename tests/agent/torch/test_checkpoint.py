"""Checkpoints are whole or absent, verified before use, and fenced."""

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from pollux_agent.errors import CheckpointError, FencedError
from pollux_agent.torch import places
from pollux_agent.torch.checkpoint import CheckpointStore


def store(folder: Path, incarnation: int | None = 1) -> CheckpointStore:
    opened = CheckpointStore(folder)
    opened.claim(incarnation)
    return opened


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saving = store(tmp_path)
    state = saving.load(saving.save({"weights": torch.arange(5), "step": 3, "names": ["a"]}, step=3))
    assert torch.equal(state["weights"], torch.arange(5))
    assert (state["step"], state["names"]) == (3, ["a"])


@pytest.mark.parametrize("number", [np.float64(0.05), np.float32(2), np.int64(3), np.bool_(True)], ids=repr)
def test_numbers_of_numpy_come_back_as_a_schedule_leaves_them_in_an_optimizer(
    tmp_path: Path, number: np.generic
) -> None:
    saving = store(tmp_path)
    state = saving.load(saving.save({"param_groups": [{"lr": number}]}, step=1))
    assert state["param_groups"][0]["lr"] == number


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    saving = store(tmp_path)
    for step in (1, 2, 30):
        saving.save({"step": step}, step=step)
    assert [saving.load(name)["step"] for name in saving.names()] == [30, 2]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: (path / "state.pt").write_bytes(b""), id="an empty state file"),
        pytest.param(
            lambda path: (path / "state.pt").write_bytes((path / "state.pt").read_bytes()[:-9]),
            id="a torn one",
        ),
        pytest.param(lambda path: flip_byte(path / "state.pt"), id="one flipped byte"),
        pytest.param(lambda path: (path / "manifest.json").unlink(), id="no manifest"),
        pytest.param(lambda path: (path / "manifest.json").write_text("{"), id="a torn manifest"),
        pytest.param(
            lambda path: (path / "manifest.json").write_text("[1]"), id="a manifest of another kind"
        ),
    ],
)
def test_a_damaged_newest_one_is_skipped_with_a_warning(tmp_path: Path, damage, caplog) -> None:
    saving = store(tmp_path)
    good, bad = saving.save({"step": 1}, step=1), saving.save({"step": 2}, step=2)
    damage(tmp_path / bad)
    with caplog.at_level(logging.WARNING):
        assert saving.newest() == good
    assert bad in caplog.text
    with pytest.raises(CheckpointError, match=bad):
        saving.load(bad)


def test_what_was_gone_on_from_stays_beside_one_that_was_skipped(tmp_path: Path) -> None:
    first = store(tmp_path)
    good, bad = first.save({"step": 1}, step=1), first.save({"step": 2}, step=2)
    flip_byte(tmp_path / bad / "state.pt")
    resumed = CheckpointStore(tmp_path)
    resumed.claim(2)
    assert resumed.load(resumed.newest() or "") == {"step": 1}
    third = resumed.save({"step": 3}, step=3)
    assert resumed.names() == [third, good], "two that are whole are kept, and no other"
    fourth = resumed.save({"step": 4}, step=4)
    assert resumed.names() == [fourth, third]


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    saving = store(tmp_path / "checkpoints")
    name = saving.save({"trap": Trap()}, step=1)
    assert saving.verify(name) is None
    with pytest.raises(CheckpointError, match="not safe to load"):
        saving.load(name)
    assert not (tmp_path / "ran").exists()


def test_an_older_incarnation_may_not_write_once_a_newer_one_has_begun(tmp_path: Path) -> None:
    old = store(tmp_path, 4)
    old.save({"step": 1}, step=1)
    new = store(tmp_path, 5)
    fenced = r"incarnation 4 may not write .* another process, or a later start.* checkpoint_dir of its own"
    with pytest.raises(FencedError, match=fenced):
        old.save({"step": 2}, step=2)
    with pytest.raises(FencedError):
        store(tmp_path, 4)
    assert [new.load(name)["step"] for name in new.names()] == [1]


def test_without_a_driver_each_start_is_the_next_incarnation(tmp_path: Path) -> None:
    assert [CheckpointStore(tmp_path).claim() for _ in range(3)] == [1, 2, 3]


def test_of_starts_at_the_same_moment_one_alone_may_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, write = threading.Barrier(3), places.LocalPlace.write

    def write_together(place: places.LocalPlace, name: str, data: bytes) -> None:
        at_once.wait(timeout=30)  # all have read which incarnation is free by now
        write(place, name, data)

    monkeypatch.setattr(places.LocalPlace, "write", write_together)
    stores = [CheckpointStore(tmp_path) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(CheckpointStore.claim, stores)) == [1, 1, 1]
    fenced = 0
    for number, each in enumerate(stores):
        try:
            each.save({"step": number}, step=number)
        except FencedError as error:
            assert "incarnation 1 may not write" in str(error)
            assert "begun a second time" in str(error)
            fenced += 1
    assert fenced == 2


def test_a_later_claim_of_the_same_incarnation_fences_off_the_earlier(tmp_path: Path) -> None:
    earlier = store(tmp_path, 3)
    earlier.save({"step": 1}, step=1)
    later = store(tmp_path, 3)
    with pytest.raises(FencedError, match="begun a second time"):
        earlier.save({"step": 2}, step=2)
    later.save({"step": 3}, step=3)


def test_after_its_folder_was_deleted_the_next_save_is_whole_and_fenced(tmp_path: Path) -> None:
    saving = store(tmp_path / "checkpoints", 3)
    saving.save({"step": 1}, step=1)
    shutil.rmtree(tmp_path / "checkpoints")
    assert saving.save({"step": 2}, step=2) == saving.newest()
    with pytest.raises(FencedError):
        store(tmp_path / "checkpoints", 2)


def test_a_full_disk_is_an_error_that_leaves_the_earlier_checkpoints(tmp_path: Path) -> None:
    script = """
import resource, signal, sys, torch
from pathlib import Path
from pollux_agent.errors import CheckpointError
from pollux_agent.torch.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1])); store.claim(1)
store.save({"x": torch.zeros(10)}, step=1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.save({"x": torch.zeros(100_000)}, step=2)
except CheckpointError as error:
    print("refused:", error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "refused: cannot write" in done.stdout, done.stderr
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.endswith("0000000001")
    assert not list(tmp_path.glob(".saving-*"))


def test_killed_at_random_points_of_saving_the_newest_one_is_always_whole(tmp_path: Path) -> None:
    """20 children save without pause until SIGKILL; each time what is there must verify and only grow."""
    rng = random.Random(7)
    last = -1
    for turn in range(20):
        pid = os.fork()
        if pid == 0:
            save_for_ever(tmp_path, turn + 1, start=last + 1)
        deadline = time.monotonic() + 60
        while not (tmp_path / f"began-{turn + 1}").exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        opened = store(tmp_path, turn + 1)
        newest = opened.newest()
        if newest is not None:
            state = opened.load(newest)
            assert state["step"] == int(newest[-10:]) >= last
            assert torch.equal(state["weights"], torch.full((20_000,), float(state["step"])))
            last = state["step"]
        assert not list(tmp_path.glob(".saving-*"))
    assert last >= 0


def save_for_ever(folder: Path, incarnation: int, start: int) -> None:
    torch.set_num_threads(1)
    saving = store(folder, incarnation)
    (folder / f"began-{incarnation}").touch()
    step = start
    while True:
        saving.save({"step": step, "weights": torch.full((20_000,), float(step))}, step=step)
        step += 1


def test_the_manifest_says_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / store(tmp_path).save({"step": 1}, step=1)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["bytes"] == (path / "state.pt").stat().st_size


@pytest.mark.parametrize("written", [False, True], ids=["before its manifest", "behind its manifest"])
def test_a_start_that_drops_what_another_is_writing_fences_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    older, write = CheckpointStore(tmp_path), places.write_atomic
    older.claim()

    def interrupted(path: Path, data: bytes) -> None:
        if written or path.name != places.MANIFEST:
            write(path, data)
        if path.name == places.MANIFEST:
            CheckpointStore(tmp_path).claim()
        if not written and path.name == places.MANIFEST:
            write(path, data)

    monkeypatch.setattr(places, "write_atomic", interrupted)
    with pytest.raises(FencedError, match="incarnation 2 has begun"):
        older.save({"a": 1}, step=1)

"""Checkpoints behind a URL keep what those in a folder keep: whole or absent, two of them, fenced."""

import errno
import io
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from elastic_runs import DriverRun, Line, linear_model
from forked import forked
from ftp_server import ftp_server
from s3_server import s3_server
from torch import nn

from pollux_agent.errors import CheckpointError, DocumentError, FencedError
from pollux_agent.protocol import JobSpec
from pollux_agent.torch import ElasticJob, checkpoint
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.places import Digesting, LocalPlace, open_place


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture(params=["memory", "dir in file", "ftp", "s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        yield f"memory://{tmp_path.name}/checkpoints"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    elif request.param == "dir in file":
        yield f"dir://checkpoints::file://{tmp_path}"
    elif request.param == "s3":
        yield f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    elif request.param == "file":
        yield f"file://{tmp_path}/checkpoints"
    else:
        with ftp_server(tmp_path) as address:
            yield address


def store(url: str, incarnation: int | None = 1) -> CheckpointStore:
    opened = CheckpointStore(url)
    opened.claim(incarnation)
    return opened


def test_what_was_saved_comes_back_and_the_newest_two_are_kept(url: str) -> None:
    saving = store(url)
    for step in (1, 2, 30):
        saving.save({"step": step, "weights": torch.full((100_000,), float(step))}, step=step)
    again = CheckpointStore(url)
    states = [again.load(name) for name in again.names()]
    assert [state["step"] for state in states] == [30, 2]
    assert torch.equal(states[0]["weights"], torch.full((100_000,), 30.0))
    left = [name for name in again.place.listing() if name.startswith("checkpoint-")]
    assert sorted(left, reverse=True) == again.names()


def test_an_older_incarnation_may_not_write_once_a_newer_one_has_begun(url: str) -> None:
    old = store(url, 4)
    old.save({"step": 1}, step=1)
    new = store(url, 5)
    fenced = r"incarnation 4 may not write .* another process, or a later start.* checkpoint_dir of its own"
    with pytest.raises(FencedError, match=fenced):
        old.save({"step": 2}, step=2)
    with pytest.raises(FencedError):
        store(url, 4)
    assert [new.load(name)["step"] for name in new.names()] == [1]
    assert store(url, None).incarnation == 6


@pytest.mark.parametrize("file", ["state.pt", "manifest.json"])
def test_a_damaged_newest_one_is_skipped_with_a_warning(
    url: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    saving = store(url)
    good, bad = (saving.save({"step": step}, step=step) for step in (1, 2))
    saving.place.write(f"{bad}/{file}", saving.place.read(f"{bad}/{file}")[:-9])
    with caplog.at_level(logging.WARNING):
        assert saving.newest() == good
    assert bad in caplog.text
    assert "sesame" not in caplog.text
    with pytest.raises(CheckpointError, match=bad):
        saving.load(bad)


def test_one_without_its_manifest_is_none_and_the_next_start_removes_it(url: str) -> None:
    saving = store(url)
    saving.save({"step": 1}, step=1)
    if isinstance(saving.place, LocalPlace):
        (saving.place.folder / ".saving-abc").mkdir()
        (saving.place.folder / ".saving-abc" / "state.pt").write_bytes(b"half")
    else:
        half = "checkpoint-000001-0000000002"
        saving.place._fs.makedirs(saving.place._path(half))
        saving.place.write(f"{half}/state.pt", b"half")
    newest = saving.newest()
    assert newest is not None
    assert newest.endswith("1")
    again = store(url, 2)
    assert [name for name in again.place.listing() if "incarnation" not in name] == again.names()


class Unwritable:
    """Fails in mid-save, as a network that goes away does."""

    def __reduce__(self) -> str:
        raise OSError("the network went away")


def test_a_save_that_fails_leaves_nothing_and_says_where(url: str) -> None:
    saving = store(url)
    first = saving.save({"step": 1}, step=1)
    with pytest.raises(CheckpointError, match=r"cannot write .*the network went away") as caught:
        saving.save({"ballast": torch.zeros(50_000), "step": Unwritable()}, step=2)
    assert "sesame" not in str(caught.value)
    assert [name for name in saving.place.listing() if name != "incarnation"] == [first]
    assert saving.newest() == first


def test_code_in_a_checkpoint_is_never_run(url: str, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return (Path.mkdir, (tmp_path / "ran",))

    saving = store(url)
    name = saving.save({"trap": Trap()}, step=1)
    with pytest.raises(CheckpointError, match="not safe to load"):
        saving.load(name)
    assert not (tmp_path / "ran").exists()


def test_what_is_kept_of_a_life_that_was_to_be_forgotten_is_not_taken_up(url: str) -> None:
    old = store(url, 3)
    old.save({"step": 50}, step=50)
    fresh = CheckpointStore(url, since=4)
    fresh.claim(4)
    assert fresh.newest() is None
    fresh.save({"step": 1}, step=1)
    assert [fresh.load(name)["step"] for name in fresh.names()] == [1]


PART_BYTES = 5 << 20
"""The least that S3 takes as a part of a larger object."""


def save_and_hang(environ: dict[str, str], url: str, hangs: Path) -> None:
    """Save a checkpoint of three parts, and stand still once its second part is on its way."""
    os.environ.update(environ)
    fsspec.config.conf["s3"] = {"default_block_size": PART_BYTES}
    write = Digesting.write

    def hang(digesting: Digesting, data: object) -> int:
        written = write(digesting, data)
        if digesting._bytes > 2 * PART_BYTES:
            hangs.touch()
            time.sleep(600)
        return written

    Digesting.write = hang  # type: ignore[method-assign]
    state = {str(number): torch.zeros(PART_BYTES // 8) for number in range(6)}
    CheckpointStore(url).save(state, step=2)


def test_a_save_of_several_parts_that_is_killed_is_none_on_s3(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART_BYTES})
    fsspec.filesystem("s3").clear_instance_cache()
    url, hangs = f"{bucket}/killed", tmp_path / "hangs"
    saving = store(url, 0)
    whole = torch.arange(3 * PART_BYTES // 4, dtype=torch.float32)
    first = saving.save({"weights": whole}, step=1)
    child = forked().Process(target=save_and_hang, args=(dict(os.environ), url, hangs))
    child.start()
    try:
        deadline = time.monotonic() + 120
        while not hangs.exists():
            assert child.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()
    again = store(url, 1)
    assert [name for name in again.place.listing() if name != "incarnation"] == [first]
    assert torch.equal(again.load(first)["weights"], whole)
    with pytest.raises(FencedError):
        saving.save({"step": 2}, step=2)


def train(address: str, epochs: int) -> ElasticJob:
    model = linear_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job = ElasticJob(model, optimizer, Line(), batch_size=4, max_batch_size=4, checkpoint_dir=address)
    for _ in job.epochs(epochs):
        for inputs, targets, _ in job.loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(job.model(inputs).squeeze(1), targets).backward()
            optimizer.step()
    return job


def test_a_training_goes_on_from_its_url(url: str) -> None:
    assert train(url, 1).step == 16
    more = train(url, 3)
    assert (more.step, more.steps_taken) == (48, 32)


def test_a_job_under_a_driver_keeps_its_checkpoints_behind_the_url_of_its_spec(tmp_path: Path) -> None:
    """Each job in a folder of its own; and a fresh start, which deletes the job's folder of checkpoints, is
    fresh there too."""
    (tmp_path / "remote").mkdir()
    with ftp_server(tmp_path / "remote") as address:
        run = DriverRun(tmp_path, checkpoint_url=address)
        run.terminate(run.start(0, "--wait-at", "21"))
        stopped = run.outcome(0)
        (kept,) = CheckpointStore(tmp_path / "remote" / "checkpoints" / "line-1").names()
        assert int(kept[-10:]) == stopped.step
        run.terminate(run.start(1, "--wait-at", "1"))
        resumed = next(event for event in run.events(1) if event.event == "resume")
        assert resumed.step == stopped.step

        for path in run.folder.checkpoints.iterdir():
            path.unlink()
        run.folder.checkpoints.rmdir()
        run.run(2)
        assert [event.event for event in run.events(2)][:2] == ["start", "step"]
        assert run.outcome(2).steps_taken == 48


@pytest.mark.parametrize(
    ("address", "wants"),
    [
        pytest.param("nosuch://bucket/x", ["nosuch", "Protocol not known"], id="an unknown protocol"),
        pytest.param("gs://bucket/x", ["gs://bucket/x", "install gcsfs"], id="a package that is missing"),
        pytest.param(Path("s3://bucket/x"), ["give it as a str"], id="a URL that became a Path"),
        pytest.param("check\0points", ["'check\\x00points'", "leave it out"], id="no path"),
    ],
)
def test_a_bad_address_is_named_with_the_fix(address: str | Path, wants: list[str]) -> None:
    with pytest.raises(DocumentError) as caught:
        open_place(address)
    for want in wants:
        assert want in str(caught.value)


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DocumentError, match=r"pip install 'pollux-agent\[fsspec\]'"):
        open_place("memory://x")


def test_a_server_that_is_not_there_or_refuses_is_an_error_without_the_password(tmp_path: Path) -> None:
    with ftp_server(tmp_path, rights="elr") as address, pytest.raises(CheckpointError) as refused:
        train(address, 1)
    with pytest.raises(CheckpointError) as away:
        train(address, 1)
    for caught in (refused, away):
        assert "127.0.0.1" in str(caught.value)
        assert "sesame" not in str(caught.value)


def test_a_spec_takes_a_url_alone() -> None:
    with pytest.raises(ValueError, match="checkpoint_url"):
        job_spec(checkpoint_url="folder/of/mine")
    assert job_spec(checkpoint_url="s3://bucket/a").checkpoint_url == "s3://bucket/a"


def job_spec(**spec: str) -> JobSpec:
    return JobSpec(
        name="line", script="x.py", initial_batch_size=4, max_local_batch_size=4, max_gpus=1, **spec
    )


@pytest.mark.parametrize("tries", [1, 2, 99], ids=["once", "twice", "for good"])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_a_damaged_one(
    url: str, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scratch folder is full, or the network gone: to begin anew would drop what is whole."""
    saving = store(url)
    for step in (1, 2):
        saving.save({"step": step}, step=step)
    monkeypatch.setattr(checkpoint, "_PAUSES_S", (0.01, 0.01))
    again, failed = store(url, 2), []
    fetch = again.place.fetch

    def refuse(name: str) -> BufferedIOBase:
        if len(failed) < tries:
            failed.append(name)
            raise OSError(errno.ENOSPC, "No space left on device", "/tmp")
        return fetch(name)

    monkeypatch.setattr(again.place, "fetch", refuse)
    if tries == 99:
        with pytest.raises(CheckpointError, match=r"0000000002 in .* cannot be read.*No space left"):
            again.newest()
    else:
        newest = again.newest()
        assert newest is not None and again.load(newest)["step"] == 2
    assert len(again.names()) == 2


def test_a_copy_that_was_cut_off_is_not_read_as_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place("memory://cut-off/checkpoints")
    saving = CheckpointStore(place)
    saving.claim(1)
    name = saving.save({"weights": torch.arange(1000)}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", _Full)
        with pytest.raises(CheckpointError, match="cannot be read"):
            saving.load(name)
    assert torch.equal(saving.load(name)["weights"], torch.arange(1000))
    fsspec.filesystem("memory").rm("/cut-off", recursive=True)


class _Full(io.BytesIO):
    def write(self, data: Any) -> int:
        super().write(bytes(data)[:100])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("password", ["secret", "p@ss", "a@b@c"])
def test_no_part_of_a_password_is_shown(password: str) -> None:
    assert open_place_shown(f"ftp://me:{password}@127.0.0.1:1/folder") == "ftp://127.0.0.1:1/folder"


def open_place_shown(url: str) -> str:
    """How a URL whose server does not answer is named."""
    with pytest.raises(CheckpointError) as refused:
        CheckpointStore(url).claim(1)
    found = re.search(r"ftp://\S+?(?=: )", str(refused.value))
    assert found
    return found[0]

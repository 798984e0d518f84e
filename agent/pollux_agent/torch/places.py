"""Where checkpoints lie: a folder, or behind an fsspec URL.

A place holds checkpoints by name, each a state file with a manifest of its size and SHA-256, and small files.
All methods raise OSError where the place refuses.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, Protocol, cast

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from pollux_agent.errors import DocumentError
from pollux_agent.records import FileNote, write_atomic

STATE, MANIFEST = "state.pt", "manifest.json"
_SAVING = ".saving-"
_REMOTE_NOTE_S = 30.0
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_CUT_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


class Place(Protocol):
    """``str()`` of a place names it for people, without passwords."""

    def prepare(self) -> None:
        """Make the place where there is none, and drop what interrupted saves have left."""
        ...

    def names(self) -> Sequence[str]:
        """All checkpoints that were published, whole or not, and nothing that was not; in no order."""
        ...

    def publish(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """Have ``write`` write a state, and let it appear as a checkpoint, all at once; nothing is left of
        one that failed."""
        ...

    def fetch(self, name: str) -> BufferedIOBase:
        """A file of the place, to be read and sought in, open until :meth:`forget` at the longest."""
        ...

    def forget(self) -> None:
        """What was fetched is needed no more."""
        ...

    def remove(self, name: str) -> None:
        """Remove a checkpoint or a folder of shards; one that cannot be removed stays."""
        ...

    def read(self, name: str) -> bytes:
        """A small file; raises FileNotFoundError if there is none."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all."""
        ...

    def listing(self, name: str = "") -> Sequence[str]:
        """Names of the files and folders in a folder of the place, or in the place itself."""
        ...

    def shard_writer(self, name: str) -> FileSystemWriter:
        """For torch.distributed.checkpoint, into a folder of the place."""
        ...

    def shard_reader(self, name: str, kind: type[FileSystemReader]) -> FileSystemReader: ...


class Digesting:
    """A file to write to that knows the size and SHA-256 of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._hash, self._bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hash.update(view)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def manifest(self) -> bytes:
        return json.dumps({"bytes": self._bytes, "sha256": self._hash.hexdigest()}).encode()


class LocalPlace:
    """A folder: a checkpoint is written aside and appears by a rename, so it is never half written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: BufferedIOBase | None = None

    def __str__(self) -> str:
        return str(self.folder)

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{_SAVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def names(self) -> list[str]:
        return self.listing()

    def publish(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        saving = Path(tempfile.mkdtemp(dir=self.folder, prefix=_SAVING))
        try:
            with (saving / STATE).open("wb") as file:
                digesting = Digesting(file)
                write(cast(IO[bytes], digesting))
                file.flush()
                os.fsync(file.fileno())
            write_atomic(saving / MANIFEST, digesting.manifest())
            saving.rename(self.folder / name)
            _sync_folder(self.folder)
        finally:
            shutil.rmtree(saving, ignore_errors=True)

    def fetch(self, name: str) -> BufferedIOBase:
        self.forget()
        self._open = (self.folder / name).open("rb")
        return self._open

    def forget(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        write_atomic(self.folder / name, data)

    def listing(self, name: str = "") -> list[str]:
        with suppress(FileNotFoundError):
            return [path.name for path in (self.folder / name).iterdir()]
        return []

    def shard_writer(self, name: str) -> FileSystemWriter:
        return FileSystemWriter(self.folder / name)

    def shard_reader(self, name: str, kind: type[FileSystemReader]) -> FileSystemReader:
        return kind(self.folder / name)


class PlaceNote:
    """A note in a place of checkpoints: seldom written where that means a call over a network."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._local = FileNote(place.folder / name) if isinstance(place, LocalPlace) else None
        self.every_s = _REMOTE_NOTE_S if self._local is None else self._local.every_s

    def __str__(self) -> str:
        return f"{self._name} in {self._place}"

    def read(self) -> bytes:
        return self._place.read(self._name)

    def write(self, data: bytes) -> None:
        if self._local is not None:
            self._local.write(data)
        else:
            self._place.write(self._name, data)

    def append(self, line: str) -> bool:
        return self._local is not None and self._local.append(line)


def open_place(address: str | Path, folder: str = "") -> Place:
    """The place at a local path, or at a URL that fsspec knows, or a ``folder`` in it; file:// is local too.

    Raises DocumentError naming the address and the fix: an unknown protocol, a package that is not installed.
    """
    text = str(address)
    if "\0" in text:
        raise DocumentError(f"checkpoints: {text!r} holds a NUL character, which no path can; leave it out")
    if isinstance(address, Path) and _CUT_URL.match(text):
        raise DocumentError(f"checkpoints: {text!r} was a URL before it became a Path; give it as a str")
    if text.startswith("file:///"):
        return LocalPlace(Path(text.removeprefix("file://"), folder))
    if isinstance(address, Path) or not is_url(text):
        return LocalPlace(Path(address, folder))
    from pollux_agent.torch.remote import open_remote

    return open_remote(text, folder)


def is_url(address: str) -> bool:
    """Whether an address is for fsspec; a chain of them, as in ``simplecache::s3://...``, is one too."""
    return _URL.match(address) is not None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

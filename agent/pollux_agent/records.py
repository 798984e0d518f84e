"""Files that a worker leaves for others to read: events, outcomes and the completion marker."""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from pollux_agent.protocol import JobFolder, Outcome, encode

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM_BYTES = 32_768
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC


def is_full(error: BaseException) -> bool:
    """Whether an error comes from a disk, or a quota, that is full; torch's say so in words alone."""
    links: list[BaseException] = [error]
    while (cause := links[-1].__cause__ or links[-1].__context__) is not None and cause not in links:
        links.append(cause)
    return any(
        (isinstance(link, OSError) and link.errno in _FULL) or "No space left" in str(link) for link in links
    )


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a whole file or nothing: a reader sees the old content or the new, also after a power cut if
    ``durable``, which costs milliseconds on a busy disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if not durable:
        return
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class Note(Protocol):
    """A small file that outlives the process; ``every_s`` is how often it may well be written."""

    every_s: float

    def read(self) -> bytes:
        """Raises OSError where there is none."""
        ...

    def write(self, data: bytes) -> None:
        """Whole or not at all; raises OSError."""
        ...

    def append(self, line: str) -> bool:
        """Add a line, which costs less than a write; False where there is no way to. Raises OSError."""
        ...


class FileNote:
    """A note on a disk, where a write costs next to nothing: it outlives the process, not the machine."""

    every_s = 0.0

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> bytes:
        return self._path.read_bytes()

    def write(self, data: bytes) -> None:
        write_atomic(self._path, data, durable=False)

    def append(self, line: str) -> bool:
        append_text(self._path, line)
        return True


def append_line(path: Path, document: object) -> None:
    """Append one document as a JSON line in a single write, so that lines of a killed process are whole.

    Raises OSError, and leaves no part of a line, where the disk has no room for it. A file has one writer.
    """
    append_text(path, encode(document))


def append_text(path: Path, text: str) -> None:
    """As :func:`append_line`, for a document that is text already."""
    line = text.encode() + b"\n"
    try:
        handle = os.open(path, _APPEND, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, _APPEND, 0o644)
    try:
        written = os.write(handle, line)
        if written < len(line):
            os.ftruncate(handle, os.fstat(handle).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raises OSError for anything else, such as a pipe, which may wait for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """All of a file; raises OSError as :func:`open_regular` does."""
    with open_regular(path) as file:
        return file.read()


class Room:
    """Space on a disk for one file of some kilobytes that is to be written also once the disk is full."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def reserve(self) -> None:
        """Where the disk is full already, there is none."""
        with suppress(OSError):
            write_atomic(self._path, b"0" * _ROOM_BYTES)

    def release(self) -> None:
        with suppress(OSError):
            self._path.unlink()

    def write(self, path: Path, data: bytes) -> None:
        """As :func:`write_atomic`, in the room that was reserved."""
        self.release()
        write_atomic(path, data)


def outcome_room(folder: JobFolder, incarnation: int, rank: int) -> Room:
    """For the outcome of a rank."""
    return Room(folder.outcomes / f".room-{incarnation}-{rank}")


def write_outcome(folder: JobFolder, outcome: Outcome) -> None:
    """Write a rank's outcome, once: the first one stands, since what follows it is only a consequence."""
    path = folder.outcome(outcome.incarnation, outcome.rank)
    room = outcome_room(folder, outcome.incarnation, outcome.rank)
    if path.exists():
        room.release()
    else:
        room.write(path, encode(outcome).encode())


def write_completion(folder: JobFolder, outcome: Outcome) -> None:
    """Write the completion marker, by which alone a job counts as done."""
    room = outcome_room(folder, outcome.incarnation, outcome.rank)
    room.write(folder.complete, encode(outcome).encode())

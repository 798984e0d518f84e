"""Files that a worker leaves for others to read: events, outcomes and the completion marker."""

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from pollux_agent.protocol import JobFolder, Outcome, encode


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: a reader sees the old content or the new, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def append_line(path: Path, document: object) -> None:
    """Append one document as a JSON line in a single write, so that lines of a killed process are whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, encode(document).encode() + b"\n")
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


def write_outcome(folder: JobFolder, outcome: Outcome) -> None:
    """Write a rank's outcome, once: the first one stands, since what follows it is only a consequence."""
    path = folder.outcome(outcome.incarnation, outcome.rank)
    if not path.exists():
        write_atomic(path, encode(outcome).encode())


def write_completion(folder: JobFolder, outcome: Outcome) -> None:
    """Write the completion marker, by which alone a job counts as done."""
    write_atomic(folder.complete, encode(outcome).encode())

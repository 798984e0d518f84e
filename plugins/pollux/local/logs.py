"""Workers' logs: written up to a limit, and read on from a cursor, whole lines only."""

import fcntl
import logging
import os
import re
from contextlib import suppress
from io import FileIO
from pathlib import Path

from pollux.cluster.base import LogChunk
from pollux.errors import Refused
from pollux_agent.protocol import JobFolder
from pollux_agent.records import open_regular

logger = logging.getLogger(__name__)

MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_READ_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
_MAX_READS = 8
"""A job that prints as fast as it is read must not hold up the service."""
_F_SETPIPE_SZ = 1031
_CURSOR = re.compile(r"(\d+)((?:;[a-z0-9-]+=\d+)*)")
_NOTE = b"[pollux] this log is full; what the workers print from here on is dropped\n"


class LogPipe:
    """The pipe that a launcher and its workers print into, and the file that it is copied to."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._read, self.write_end = os.pipe()
        os.set_blocking(self._read, False)
        try:
            fcntl.fcntl(self._read, _F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(path, "ab")
        except OSError as error:
            logger.error("%s cannot be written, so what is printed is lost: %s", path, error)
            self._file = FileIO(os.devnull, "ab")
        self._left = max_bytes
        self._ends_line = True

    def opened_by_child(self) -> None:
        """The child has its copy of the write end: close ours."""
        os.close(self.write_end)
        self.write_end = -1

    def drain(self) -> None:
        """Copy what was printed since the last call, some MiB at most."""
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._read, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            self._write(data)

    def note(self, text: str) -> None:
        """Write a line of our own."""
        self._write(f"[pollux] {text}\n".encode())

    def close(self) -> None:
        """The last of it; an unfinished line is finished."""
        self.drain()
        if not self._ends_line:
            self._write(b"\n")
        os.close(self._read)
        if self.write_end >= 0:
            os.close(self.write_end)
        self._file.close()

    def _write(self, data: bytes) -> None:
        """What the disk does not take is lost; the job goes on."""
        if self._left <= 0:
            return
        kept = data[: self._left]
        self._left -= len(kept)
        self._ends_line = kept.endswith(b"\n")
        if self._left <= 0:
            kept += (b"" if self._ends_line else b"\n") + _NOTE
            self._ends_line = True
        with suppress(OSError):
            self._file.write(kept)


def read_logs(folder: JobFolder, cursor: str) -> LogChunk:
    """What was printed since ``cursor``, some 256 KiB at most; ask again with the new cursor for the rest.

    A cursor is ``incarnation;node=offset;...``: everything of older incarnations was read. Raises Refused
    for anything else.
    """
    first, offsets = _parse(cursor)
    lines: list[str] = []
    left, more = _MAX_READ_BYTES, False
    files = sorted(_files(folder).items())
    for incarnation, nodes in files:
        if more or incarnation < first:
            continue
        if incarnation > first:
            first, offsets = incarnation, {}
        for node in sorted(nodes):
            begin = offsets.get(node, 0)
            is_over = incarnation < files[-1][0]
            data, rest = _read(folder.log(incarnation, node), begin, left, is_over=is_over)
            more = more or rest
            offsets[node] = begin + len(data)
            left -= len(data)
            if data:
                text = data.decode(errors="replace").removesuffix("\n")
                lines.extend(f"[{incarnation}/{node}] {line}" for line in text.split("\n"))
    position = "".join(f";{node}={offset}" for node, offset in sorted(offsets.items()))
    return LogChunk(lines=tuple(lines), cursor=f"{first}{position}")


def _parse(cursor: str) -> tuple[int, dict[str, int]]:
    if not cursor:
        return 0, {}
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise Refused(f"cursor: {cursor[:80]!r} is none of ours; begin with an empty one")
    pairs = (pair.split("=") for pair in match[2].split(";") if pair)
    return int(match[1]), {node: int(offset) for node, offset in pairs}


def _files(folder: JobFolder) -> dict[int, list[str]]:
    files: dict[int, list[str]] = {}
    for path in folder.logs.glob("*-*.log"):
        incarnation, _, node = path.stem.partition("-")
        if incarnation.isdecimal():
            files.setdefault(int(incarnation), []).append(node)
    return files


def _read(path: Path, begin: int, limit: int, *, is_over: bool) -> tuple[bytes, bool]:
    """Whole lines from ``begin``, and whether the limit left something behind.

    A line longer than ``_MAX_READ_BYTES`` comes in pieces, and where no more is written (``is_over``) the
    last line may be unfinished.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        logger.warning("output cannot be read: %s", error)
        return b"", False
    with file:
        file.seek(begin)
        data = file.read(max(limit, 0))
        cut = len(data) == max(limit, 0) and file.read(1) != b""
    end = data.rfind(b"\n") + 1
    if (is_over and not cut) or (end == 0 and len(data) == _MAX_READ_BYTES):
        end = len(data)
    return data[:end], cut

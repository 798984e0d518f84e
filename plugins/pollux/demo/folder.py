"""The demo's state folder: always fresh, one demo's at a time, and never one that no demo made."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pollux.errors import ConfigError
from pollux.stack.processes import is_alive
from pollux.stack.record import make_state_folder, read_record

MARKER = ".pollux-demo"
_TEXT = "Made by `pollux demo`, which deletes this folder when it runs again.\n"


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """An empty folder at ``path``, which a former demo may have used; no other demo gets it meanwhile.

    Raises ConfigError when it cannot be made, when something is there that no demo made, or when a demo or a
    stack still works in it.
    """
    path = path.absolute()
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"--state: {path} is no folder; name another")
    make_state_folder(path)
    if any(path.iterdir()) and not (path / MARKER).is_file():
        raise ConfigError(
            f"--state: {path} is not empty and was not made by a demo, so it is left alone; "
            "name another folder, or empty it"
        )
    with _held(path):
        record = read_record(path)
        if record is not None and is_alive(record.supervisor):
            raise ConfigError(
                f"--state: a stack runs in {path}; end it with `pollux stack down --state {path}`, or name "
                "another folder"
            )
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != MARKER:
                entry.unlink()
        yield path


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold the folder by a lock on its marker, which the kernel drops with the process."""
    handle = os.open(path / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--state: another demo is at work in {path}; wait for it, or name another folder"
            ) from None
        os.pwrite(handle, _TEXT.encode(), 0)
        yield
    finally:
        os.close(handle)

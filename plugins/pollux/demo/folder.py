"""The demo's state folder: always fresh, and never one that the demo did not make itself."""

import shutil
from pathlib import Path

from pollux.errors import ConfigError
from pollux.stack.processes import is_alive
from pollux.stack.record import read_record

MARKER = ".pollux-demo"
_TEXT = "Made by `pollux demo`, which deletes this folder when it runs again.\n"


def fresh_folder(path: Path) -> Path:
    """An empty folder at ``path``, which a former demo may have used.

    Raises ConfigError when something is there that no demo made, or that a stack still works in.
    """
    path = path.absolute()
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"--state: {path} is no folder; name another")
    if path.is_dir() and any(path.iterdir()):
        if not (path / MARKER).is_file():
            raise ConfigError(
                f"--state: {path} is not empty and was not made by a demo, so it is left alone; "
                "name another folder, or empty it"
            )
        record = read_record(path)
        if record is not None and is_alive(record.supervisor):
            raise ConfigError(
                f"--state: a stack runs in {path}; end it with `pollux stack down --state {path}`, or name "
                "another folder"
            )
        shutil.rmtree(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / MARKER).write_text(_TEXT)
    return path

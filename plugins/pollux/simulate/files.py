"""Results on disk: each file is whole or not there, whoever else writes it at the same time."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from pollux.errors import ConfigError


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON, the same bytes for the same document; raises OSError."""
    write_whole(path, json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or where a link leads; a reader sees the old content or the new. Raises OSError."""
    path = path.resolve()
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_file(option: str, path: Path) -> None:
    """Whether a file can be written there, before hours go into what is to be in it; raises ConfigError."""
    if path.is_dir() or not path.name:
        raise ConfigError(f"{option} {path}: is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {path}: is a device or a pipe, which a file would replace; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; name a folder that exists")
    _try(option, path, path.parent)


def check_folder(option: str, path: Path) -> None:
    """Whether files can be written into a folder, which need not be there yet; raises ConfigError."""
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"{option} {path}: {there} is a file; name a folder")
    _try(option, path, there)


def _try(option: str, path: Path, folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{option} {path}: cannot be written: {reason}; name a folder that you may write"
        ) from None

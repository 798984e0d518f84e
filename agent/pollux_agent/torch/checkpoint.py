"""Checkpoints: whole or absent, verified before use, and fenced against older incarnations.

::

    checkpoints/
        incarnation                           the newest incarnation that may write
        checkpoint-<incarnation>-<step>/      appears by a rename, so it is never half written
            state.pt                          one torch file
            manifest.json                     its size and SHA-256
        .saving-<random>/                     a save in progress, or what a killed one left
"""

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy._core.multiarray import scalar

from pollux_agent.errors import CheckpointError, FencedError
from pollux_agent.records import write_atomic

logger = logging.getLogger(__name__)

KEPT = 2
_NAME = re.compile(r"checkpoint-(\d{6,})-(\d{10,})")
_SAVING = ".saving-"
_STATE, _MANIFEST = "state.pt", "manifest.json"
_NUMBERS = [type(np.dtype(kind)) for kind in ("bool", "i4", "i8", "f2", "f4", "f8")]


class CheckpointStore:
    """The checkpoints of one job, in one folder that all ranks can read; rank 0 alone claims and saves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._incarnation = 0

    @property
    def incarnation(self) -> int:
        """The one that was claimed, 0 before."""
        return self._incarnation

    @property
    def _fence(self) -> Path:
        return self.folder / "incarnation"

    def claim(self, incarnation: int | None = None) -> int:
        """Become the incarnation that may write (None: the next free one), and fence off older ones.

        Raises FencedError if a newer incarnation has claimed the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        claimed = self._claimed()
        if incarnation is None:
            incarnation = claimed + 1
        if claimed > incarnation:
            raise FencedError(
                f"incarnation {incarnation} may not write to {self.folder}: incarnation {claimed} has begun"
            )
        write_atomic(self._fence, str(incarnation).encode())
        for leftover in self.folder.glob(f"{_SAVING}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._incarnation = incarnation
        return incarnation

    def save(self, state: Mapping[str, Any], *, step: int) -> Path:
        """Write one checkpoint and drop all but the newest two; a folder that was deleted is made again.

        Raises FencedError if a newer incarnation has begun, and CheckpointError if the disk refuses; the
        earlier checkpoints are untouched then.
        """
        self._check_fence()
        target = self.folder / f"checkpoint-{self._incarnation:06d}-{step:010d}"
        if target.exists():
            return target
        saving: Path | None = None
        try:
            if not self._fence.exists():
                self.claim(self._incarnation)
            saving = Path(tempfile.mkdtemp(dir=self.folder, prefix=_SAVING))
            _write_state(saving, state)
            self._check_fence()
            saving.rename(target)
            _sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot write {target}: {error}; free some space there") from error
        finally:
            if saving is not None:
                shutil.rmtree(saving, ignore_errors=True)
        for old in self.paths()[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def paths(self) -> list[Path]:
        """All checkpoints, newest first, verified or not."""
        if not self.folder.is_dir():
            return []
        named = [(match, path) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named, key=lambda pair: _order(pair[0]), reverse=True)]

    def newest(self) -> Path | None:
        """The newest checkpoint that is whole, or None; each one that is not is named in a warning."""
        for path in self.paths():
            problem = verify(path)
            if problem is None:
                return path
            logger.warning("skipping checkpoint %s: %s", path, problem)
        return None

    def _claimed(self) -> int:
        try:
            return int(self._fence.read_text())
        except (FileNotFoundError, ValueError):
            newest = self.paths()[:1]
            return _order(_NAME.fullmatch(newest[0].name))[0] if newest else 0

    def _check_fence(self) -> None:
        claimed = self._claimed()
        if claimed > self._incarnation:
            raise FencedError(
                f"incarnation {self._incarnation} may not write to {self.folder}: "
                f"incarnation {claimed} has begun"
            )


def load(path: Path, *, map_location: torch.device | str = "cpu") -> dict[str, Any]:
    """The state saved at ``path``; only tensors, plain values and numpy's numbers are read, never code.

    Raises CheckpointError if it is not whole, or holds anything else.
    """
    problem = verify(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")
    try:
        state: dict[str, Any] = read_state(path / _STATE, map_location=map_location)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which is not safe to load: {error}"
        ) from error
    return state


def read_state(file: Path | BinaryIO, *, map_location: torch.device | str = "cpu") -> Any:
    """What torch saved to ``file``: a learning rate that a schedule made with numpy is a number too.

    Raises pickle.UnpicklingError for anything that could be code.
    """
    with torch.serialization.safe_globals([scalar, np.dtype, *_NUMBERS]):
        return torch.load(file, map_location=map_location, weights_only=True)


def verify(path: Path) -> str | None:
    """What is wrong with the checkpoint at ``path``, or None if it is as it was written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        size, digest = manifest["bytes"], manifest["sha256"]
        found = (path / _STATE).stat().st_size
        if found != size:
            return f"{_STATE} has {found} bytes instead of {size}"
        if _sha256(path / _STATE) != digest:
            return f"the SHA-256 of {_STATE} is not that of {_MANIFEST}"
    except OSError as error:
        return f"cannot be read: {error}"
    except (ValueError, KeyError, TypeError):
        return f"{_MANIFEST} is malformed"
    return None


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    with (folder / _STATE).open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    manifest = {"bytes": (folder / _STATE).stat().st_size, "sha256": _sha256(folder / _STATE)}
    write_atomic(folder / _MANIFEST, json.dumps(manifest).encode())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _order(match: re.Match[str] | None) -> tuple[int, int]:
    assert match is not None
    return int(match[1]), int(match[2])

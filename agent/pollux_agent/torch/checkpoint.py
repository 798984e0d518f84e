"""Checkpoints: whole or absent, verified before use, and fenced against older incarnations.

::

    checkpoints/
        incarnation                           the newest incarnation, and the process that may write as it
        checkpoint-<incarnation>-<step>/      appears at once, so it is never half written
            state.pt                          one torch file
            manifest.json                     its size and SHA-256
        .saving-<random>/                     a save in progress, or what a killed one left
"""

import hashlib
import json
import logging
import pickle
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import BufferedIOBase
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from numpy._core.multiarray import scalar

from pollux_agent.errors import CheckpointError, FencedError
from pollux_agent.protocol import JobFolder
from pollux_agent.records import is_full, write_atomic
from pollux_agent.torch.places import MANIFEST, STATE, Place, open_place

logger = logging.getLogger(__name__)

KEPT = 2
_PAUSES_S = (0.5, 1.0, 2.0)
"""Before a checkpoint that cannot be read is tried again."""
_NAME = re.compile(r"checkpoint-(\d{6,})-(\d{10,})")
_INCARNATION, _SINCE = "incarnation", "since"
_NUMBERS = [type(np.dtype(kind)) for kind in ("bool", "i4", "i8", "f2", "f4", "f8")]


class CheckpointStore:
    """The checkpoints of one job, in a place that all ranks can read; rank 0 alone claims and saves.

    The place is a folder, or a URL of an fsspec file system. Those of incarnations below ``since`` are
    another life's, which was to be forgotten.
    """

    def __init__(self, place: Place | Path | str, *, since: int = 0) -> None:
        self.place = open_place(place) if isinstance(place, Path | str) else place
        self._since, self._incarnation, self._fenced_off = since, 0, False
        self._owner = secrets.token_hex(8)
        self._skipped: frozenset[str] = frozenset()

    @property
    def incarnation(self) -> int:
        """The one that was claimed, 0 before."""
        return self._incarnation

    def claim(self, incarnation: int | None = None) -> int:
        """Become the incarnation that may write (None: the next free one), and fence off older ones.

        Of several processes that claim one incarnation, it belongs to the last. Where there is no room to
        write that down, a warning says so and the next save does it. Raises FencedError if a newer
        incarnation has claimed the place, CheckpointError if it cannot be used.
        """
        try:
            self.place.prepare()
            claimed, _ = self._claimed()
        except OSError as error:
            raise CheckpointError(f"checkpoints cannot be kept in {self.place}: {error}") from error
        if incarnation is None:
            incarnation = claimed + 1
        if claimed > incarnation:
            raise self._fenced(incarnation, f"incarnation {claimed} has begun")
        self._incarnation = incarnation
        try:
            self._fence_off()
        except OSError as error:
            if not is_full(error):
                raise CheckpointError(f"checkpoints cannot be kept in {self.place}: {error}") from error
            logger.warning("%s is full; training goes on from what is there: %s", self.place, error)
        return incarnation

    def save(self, state: Mapping[str, Any], *, step: int) -> str:
        """Write one checkpoint and give its name; a folder that was deleted is made again.

        Once there are two that can be gone on from, which newer ones than what was loaded could not be, all
        others are dropped.

        Raises FencedError if a newer incarnation has begun, and CheckpointError if the place refuses; the
        newest of the earlier checkpoints is untouched then, and nothing of this one is left.
        """
        name = f"checkpoint-{self._incarnation:06d}-{step:010d}"
        try:
            if self.check_fence() < self._incarnation:
                self._fenced_off = False
                self.place.prepare()
            if name in self.names():
                return name
            self._publish(name, state)
            self.check_fence()
            there = self._all()
            kept = [each for each in there if each not in self._skipped][:KEPT]
            for old in there if len(kept) == KEPT else ():
                if old not in kept:
                    self.place.remove(old)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):  # a newer start drops what this one was writing
                self.check_fence()
            full = "; free some space there" if is_full(error) else ""
            raise CheckpointError(f"cannot write {name} to {self.place}: {error}{full}") from error
        return name

    def names(self) -> list[str]:
        """All checkpoints of this life, newest first, verified or not."""
        return [name for name in self._all() if _order(name)[0] >= self._since]

    def newest(self, more: Callable[[str], str | None] = lambda name: None) -> str | None:
        """The newest checkpoint that is whole, or None; each one that is not is named in a warning.

        ``more`` says what else is wrong with one, as :meth:`verify` does. Raises CheckpointError for one that
        cannot be read: it may be whole, and who trained on without it would drop it.
        """
        for name in self.names():
            problem = self._read_patiently(name, more)
            if problem is None:
                return name
            logger.warning("skipping checkpoint %s in %s: %s", name, self.place, problem)
        return None

    def _read_patiently(self, name: str, more: Callable[[str], str | None]) -> str | None:
        for pause_s in (*_PAUSES_S, None):
            try:
                return self.verify(name) or more(name)
            except OSError as error:
                if pause_s is None:
                    raise CheckpointError(
                        f"{name} in {self.place} cannot be read, so that nobody knows whether it is whole: "
                        f"{error}; mend that, or remove this checkpoint to go on from an earlier one"
                    ) from error
                logger.warning("%s in %s cannot be read for now: %s", name, self.place, error)
                time.sleep(pause_s)
        raise AssertionError

    def load(self, name: str, *, map_location: torch.device | str = "cpu") -> dict[str, Any]:
        """The state saved as ``name``; only tensors, plain values and numpy's numbers are read, never code.

        Raises CheckpointError if it is not whole, or holds anything else.
        """
        try:
            problem = self.verify(name)
            if problem is not None:
                raise CheckpointError(f"{name} in {self.place}: {problem}")
            state: dict[str, Any] = read_state(self.place.fetch(f"{name}/{STATE}"), map_location=map_location)
            self._skipped = frozenset(takewhile(lambda newer: newer != name, self.names()))
        except OSError as error:
            raise CheckpointError(f"{name} in {self.place} cannot be read: {error}") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{name} in {self.place} holds more than tensors and plain values, which is not safe to "
                f"load: {error}"
            ) from error
        finally:
            self.place.forget()
        return state

    def verify(self, name: str) -> str | None:
        """What is wrong with the checkpoint ``name``, or None if it is as it was written.

        Raises OSError where that cannot be told, since it cannot be read.
        """
        try:
            manifest = json.loads(self.place.read(f"{name}/{MANIFEST}"))
            size, digest = manifest["bytes"], manifest["sha256"]
            file = self.place.fetch(f"{name}/{STATE}")
            found = file.seek(0, 2)
            if found != size:
                return f"{STATE} has {found} bytes instead of {size}"
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"the SHA-256 of {STATE} is not that of {MANIFEST}"
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            return f"is not complete: {error}"
        except (ValueError, KeyError, TypeError):
            return f"{MANIFEST} is malformed"
        return None

    def check_fence(self) -> int:
        """The newest incarnation that the place knows of.

        Raises FencedError if that is a newer one, or another process has claimed the same one after this
        one did, OSError where the place cannot be read.
        """
        claimed, owner = self._claimed()
        if claimed > self._incarnation:
            raise self._fenced(self._incarnation, f"incarnation {claimed} has begun")
        if claimed == self._incarnation and self._fenced_off and owner not in ("", self._owner):
            raise self._fenced(claimed, "it has begun a second time")
        return claimed

    def _fenced(self, own: int, why: str) -> FencedError:
        return FencedError(
            f"incarnation {own} may not write to {self.place}: {why}, which is another process, or a later "
            "start, that uses the same checkpoints; let one alone train there, and give a training that is "
            "another one a checkpoint_dir of its own"
        )

    def _publish(self, name: str, state: Mapping[str, Any]) -> None:
        """Where two checkpoints and a new one find no room, the older of the two makes way."""
        try:
            self._fence_off()
            self.place.publish(name, lambda file: torch.save(dict(state), file))
        except (OSError, RuntimeError) as error:
            kept = self._all()
            if not is_full(error) or len(kept) < KEPT or self.verify(kept[0]) is not None:
                raise
            for old in kept[1:]:
                self.place.remove(old)
            self.place.publish(name, lambda file: torch.save(dict(state), file))

    def _fence_off(self) -> None:
        if not self._fenced_off:
            self.place.write(_INCARNATION, f"{self._incarnation} {self._owner}".encode())
            self._fenced_off = True

    def _claimed(self) -> tuple[int, str]:
        """The newest incarnation and which process has claimed it, "" where that is not known."""
        try:
            number, _, owner = self.place.read(_INCARNATION).decode().partition(" ")
            return int(number), owner
        except (FileNotFoundError, ValueError):
            newest = self._all()[:1]
            return (_order(newest[0])[0] if newest else 0), ""

    @property
    def skipped(self) -> frozenset[str]:
        """The checkpoints that are newer than the one that was loaded, and so were not whole."""
        return self._skipped

    def _all(self) -> list[str]:
        named = (name for name in self.place.names() if _NAME.fullmatch(name))
        return sorted(named, key=_order, reverse=True)


def first_incarnation(folder: JobFolder, incarnation: int) -> int:
    """The first incarnation whose checkpoints behind a URL are this life's: that of the last fresh start.

    Who starts a job afresh deletes its folder of checkpoints, which holds a note of this number even where
    the checkpoints are elsewhere. Raises CheckpointError if the note cannot be written.
    """
    note = folder.checkpoints / _SINCE
    with suppress(FileNotFoundError, ValueError):
        return int(note.read_text())
    began = any(folder.events(earlier, 0).exists() for earlier in range(incarnation))
    since = incarnation if began else 0
    try:
        write_atomic(note, str(since).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {note}: {error}; free some space there") from error
    return since


def read_state(file: Path | BinaryIO | BufferedIOBase, *, map_location: torch.device | str = "cpu") -> Any:
    """What torch saved to ``file``: a learning rate that a schedule made with numpy is a number too.

    Raises pickle.UnpicklingError for anything that could be code.
    """
    if not isinstance(file, Path):
        file.seek(0)
    with torch.serialization.safe_globals([scalar, np.dtype, *_NUMBERS]):
        return torch.load(cast(IO[bytes], file), map_location=map_location, weights_only=True)


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2])

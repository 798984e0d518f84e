"""Checkpoints behind a URL that fsspec knows: an object store, FTP, SFTP, ...

::

    <url>/
        incarnation                           the newest incarnation that may write
        checkpoint-<incarnation>-<step>/
            state.pt
            manifest.json                     size and SHA-256 of state.pt, written last

Most such stores cannot rename a folder, so what publishes a checkpoint is its manifest.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from typing import IO, Any, cast

from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)

from pollux_agent.errors import CheckpointError, DocumentError
from pollux_agent.torch.places import MANIFEST, STATE, Digesting, Place

_CHUNK_BYTES = 4 << 20
_PASSWORD = re.compile(r"(?<=://)[^/\s]*@")


def open_remote(url: str, folder: str = "") -> Place:
    """The place at ``url``, or a folder in it; raises DocumentError as :func:`places.open_place` does."""
    shown = _PASSWORD.sub("", url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise DocumentError(
            f"checkpoints: {shown!r} is a URL, for which fsspec is needed; pip install 'pollux-agent[fsspec]'"
        ) from None
    try:
        fs, root = url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:
        raise DocumentError(
            f"checkpoints: {shown!r} cannot be used ({_PASSWORD.sub('', str(error))}); give a local path, or "
            "a URL of a protocol that fsspec knows and whose package is installed"
        ) from error
    except Exception as error:
        raise CheckpointError(f"checkpoints: {_refusal(shown, error)}") from error
    return RemotePlace(fs, f"{root.rstrip('/')}/{folder}" if folder else root, shown)


class RemotePlace:
    """A folder of an fsspec file system; what the file system raises is an OSError with the URL in it."""

    def __init__(self, fs: Any, root: str, shown: str) -> None:
        self._fs, self._root, self._shown = fs, root.rstrip("/"), shown
        self._fetched: tuple[str, BufferedIOBase] | None = None

    def __str__(self) -> str:
        return self._shown

    def prepare(self) -> None:
        with self._translated():
            self._fs.makedirs(self._root, exist_ok=True)
        for name in self._folders():
            if not self._published(name):
                self.remove(name)

    def names(self) -> list[str]:
        return [name for name in self._folders() if self._published(name)]

    def publish(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        try:
            with self._translated():
                self._fs.makedirs(self._path(name), exist_ok=True)
                with self._fs.open(self._path(name, STATE), "wb") as file:
                    digesting = Digesting(file)
                    write(cast(IO[bytes], digesting))
                self._put(self._path(name, MANIFEST), digesting.manifest())
        except BaseException:
            self.remove(name)
            raise

    def fetch(self, name: str) -> BufferedIOBase:
        """A copy in an unnamed temporary file, made once for calls in a row."""
        if self._fetched is not None and self._fetched[0] == name:
            self._fetched[1].seek(0)
            return self._fetched[1]
        self.forget()
        copy = cast(BufferedIOBase, tempfile.TemporaryFile())  # noqa: SIM115 - closed by forget
        try:
            with self._translated(), self._fs.open(self._path(name), "rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    copy.write(chunk)
        except BaseException:
            copy.close()
            raise
        self._fetched = (name, copy)
        copy.seek(0)
        return copy

    def forget(self) -> None:
        if self._fetched is not None:
            self._fetched[1].close()
            self._fetched = None

    def remove(self, name: str) -> None:
        """The manifest goes first, so that a checkpoint is whole for as long as it is one."""
        with suppress(OSError), self._translated():
            self._fs.invalidate_cache()
            if self._fs.exists(self._path(name, MANIFEST)):
                self._fs.rm_file(self._path(name, MANIFEST))
            self._fs.rm(self._path(name), recursive=True)

    def read(self, name: str) -> bytes:
        with self._translated():
            self._fs.invalidate_cache()
            return bytes(self._fs.cat_file(self._path(name)))

    def write(self, name: str, data: bytes) -> None:
        with self._translated():
            self._put(self._path(name), data)

    def listing(self, name: str = "") -> list[str]:
        with suppress(FileNotFoundError), self._translated():
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path(name) if name else self._root, detail=False)
            return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]
        return []

    def shard_writer(self, name: str) -> FileSystemWriter:
        writer = FileSystemWriter(self._path(name), sync_files=False)
        writer.fs, writer.path = cast(FileSystem, _ShardFiles(self._fs)), self._path(name)
        return writer

    def shard_reader(self, name: str, kind: type[FileSystemReader]) -> FileSystemReader:
        reader = kind(self._path(name))
        reader.fs, reader.path = cast(FileSystem, _ShardFiles(self._fs)), self._path(name)
        return reader

    def _folders(self) -> list[str]:
        return [name for name in self.listing() if name.startswith("checkpoint-")]

    def _published(self, name: str) -> bool:
        with self._translated():
            return bool(self._fs.exists(self._path(name, MANIFEST)))

    def _put(self, path: str, data: bytes) -> None:
        with self._fs.open(path, "wb") as file:
            file.write(data)

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Every file system has errors of its own, besides those of its network."""
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _refusal(self._shown, error) from error


class _ShardFiles(FileSystemBase):
    """An fsspec file system for torch.distributed.checkpoint."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._fs.open(os.fspath(path), mode) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path)}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._fs.mv(os.fspath(path), os.fspath(new_path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """All ranks make it at once, and some file systems check first and create then."""
        try:
            self._fs.makedirs(os.fspath(path), exist_ok=True)
        except Exception:
            self._fs.invalidate_cache()
            if not self._fs.isdir(os.fspath(path)):
                raise

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._fs.exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm_file(os.fspath(path))

    def ls(self, path: str) -> list[str]:
        return [str(name) for name in self._fs.ls(path, detail=False)]


def _refusal(shown: str, error: Exception) -> OSError:
    said = _PASSWORD.sub("", f"{type(error).__name__}: {error}")
    return OSError(getattr(error, "errno", None) or 0, f"{shown}: {said}")

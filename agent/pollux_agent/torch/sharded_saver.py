"""Checkpoints of a sharded model: each rank writes its own shards, and any number of ranks reads them.

::

    checkpoints/
        checkpoint-<incarnation>-<step>/      as ever, but state.pt names its shards and their SHA-256
        shards-<incarnation>-<step>/          torch.distributed.checkpoint's files: tensors alone

Shards are written first and the checkpoint last, so one that is there is whole.
"""

import hashlib
import logging
import pickle
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from pollux_agent.errors import CheckpointError
from pollux_agent.records import is_full
from pollux_agent.torch.checkpoint import CheckpointStore
from pollux_agent.torch.places import Place
from pollux_agent.torch.saver import Saver

logger = logging.getLogger(__name__)

_SHARDS, _REST = "shards", "optimizers"
_FOLDER = re.compile(rf"{_SHARDS}-(\d+)-\d+")


class ShardedSaver(Saver):
    """A Saver in whose :meth:`save` all ranks take part."""

    collective = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own: dict[str, Any] = {}

    def save(self) -> bool:
        """Write the shards on all ranks, then the checkpoint on rank 0; whether this rank wrote one."""
        self.saved_s = time.monotonic()
        store, world = self._store, self._world
        if store is None:
            return False
        step = self._trained.history.step
        there = world.rank == 0 and _is_saved(store, step)
        incarnation, skip = world.broadcast((store.incarnation, int(there)))
        if skip:
            return False
        folder = f"{_SHARDS}-{incarnation:06d}-{step:010d}"
        tensors, rest = self._tensors()
        try:
            digests = _gather_digests(store.place, folder, _written(store.place, folder, tensors))
            self._own = {_SHARDS: {"folder": folder, "files": digests}, _REST: rest}
            return super().save()
        finally:
            if world.rank == 0:
                with suppress(OSError):
                    _drop_unused(store)
            world.broadcast((0,))
            self.saved_s = time.monotonic()

    def _newest(self, store: CheckpointStore) -> str | None:
        """The newest checkpoint that is whole, shards and all."""
        return store.newest(partial(_shards_problem, store))

    def _trained_state(self) -> dict[str, Any]:
        return self._own

    def _apply_trained(self, state: Mapping[str, Any], store: CheckpointStore) -> None:
        tensors, _ = self._tensors()
        try:
            dcp_load(tensors, storage_reader=store.place.shard_reader(state[_SHARDS]["folder"], _SafeReader))
        except CheckpointException as error:
            raise ValueError(str(error)) from error
        model = self._trained.model
        set_model_state_dict(model, tensors["model"])
        for number, optimizer in enumerate(self._trained.optimizers):
            rest = state[_REST][number]
            own: dict[str, Any] = {name: dict(values) for name, values in rest["state"].items()}
            for name, values in tensors["optimizers"][str(number)].items():
                own.setdefault(name, {}).update(values)
            set_optimizer_state_dict(model, optimizer, {"state": own, "param_groups": rest["param_groups"]})

    def _tensors(self) -> tuple[dict[str, Any], list[Any]]:
        """Model and optimizers as tensors by name, and what of the optimizers is none."""
        model = self._trained.model
        tensors: dict[str, Any] = {"model": dict(get_model_state_dict(model)), "optimizers": {}}
        rest: list[Any] = []
        for number, optimizer in enumerate(self._trained.optimizers):
            state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
            own, others = _split(state["state"])
            tensors["optimizers"][str(number)] = own
            rest.append({"state": others, "param_groups": state["param_groups"]})
        return tensors, rest


class _SafeReader(FileSystemReader):
    """Reads metadata as data: only the classes that describe tensors and files are known to it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Of torch.distributed.checkpoint's metadata alone."""

    _MODULES = frozenset(
        {
            "torch.distributed.checkpoint.metadata",
            "torch.distributed.checkpoint.filesystem",
            "torch.serialization",
            "collections",
        }
    )
    _NAMES = frozenset(
        {"TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata"}
    ) | {
        "MetadataIndex",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "StorageMeta",
        "_StorageInfo",
        "OrderedDict",
        "_get_layout",
    }

    def find_class(self, module: str, name: str) -> Any:
        known = module in self._MODULES and name in self._NAMES
        if known or (module, name) in (("torch", "Size"), ("pathlib", "PosixPath")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _is_saved(store: CheckpointStore, step: int) -> bool:
    with suppress(OSError):
        return any(name.endswith(f"-{step:010d}") and name not in store.skipped for name in store.names())
    return False


def _shards_problem(store: CheckpointStore, name: str) -> str | None:
    """What is wrong with the shards of a checkpoint, None if they are as they were written.

    Raises OSError where that cannot be told.
    """
    shards = store.load(name).get(_SHARDS)
    if shards is None:
        return None
    if not shards["files"]:
        return "it names no shards"
    for file, digest in shards["files"].items():
        try:
            found = _sha256(store.place, f"{shards['folder']}/{file}")
        except (FileNotFoundError, IsADirectoryError):
            return f"{file} of {shards['folder']} is missing"
        if found != digest:
            return f"{file} of {shards['folder']} is damaged"
    return None


def _split(state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state by parameter: its tensors, and its plain values."""
    tensors, others = {}, {}
    for name, values in state.items():
        tensors[name] = {key: value for key, value in values.items() if isinstance(value, Tensor)}
        others[name] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    return tensors, others


def _written(place: Place, folder: str, tensors: dict[str, Any]) -> str:
    """Write the shards on all ranks; what went wrong, in words, or nothing."""
    try:
        dcp_save(tensors, storage_writer=place.shard_writer(folder))
    except (OSError, RuntimeError, CheckpointException) as error:
        return f"{error}{'; free some space there' if is_full(error) else ''}"
    return ""


def _gather_digests(place: Place, folder: str, problem: str) -> dict[str, str]:
    """SHA-256 of every file of the shards, each computed by the rank that wrote it; known on all ranks.

    Raises CheckpointError on all ranks if one of them could not write.
    """
    rank = dist.get_rank()
    mine: dict[str, str] = {}
    try:
        for name in place.listing(folder) if not problem else ():
            if name.startswith(f"__{rank}_") or (name == ".metadata" and rank == 0):
                mine[name] = _sha256(place, f"{folder}/{name}")
        if rank == 0 and not problem and ".metadata" not in mine:
            problem = "what was written is not there"
    except OSError as error:
        problem = f"what was written cannot be read: {error}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (problem, mine))
    for said, _ in every:
        if said:
            raise CheckpointError(f"cannot write {folder} to {place}: {said}")
    return {name: digest for _, digests in every for name, digest in digests.items()}


def _drop_unused(store: CheckpointStore) -> None:
    """Remove the shards of checkpoints that are gone, and of saves that never ended; not those of a newer
    incarnation, which may be writing them."""
    kept = {name.replace("checkpoint", _SHARDS, 1) for name in store.names()}
    for name in store.place.listing():
        written = _FOLDER.fullmatch(name)
        if written and int(written[1]) <= store.incarnation and name not in kept:
            store.place.remove(name)


def _sha256(place: Place, name: str) -> str:
    """Raises OSError where the file cannot be read."""
    try:
        return hashlib.file_digest(place.fetch(name), "sha256").hexdigest()
    finally:
        place.forget()

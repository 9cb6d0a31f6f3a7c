"""Whole tensors out of a training checkpoint, one at a time, in one process and without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoint.folder import verify_checkpoint
from paceline.checkpoint.index import TensorEntry, read_index
from paceline.checkpoint.manifest import FileEntry, read_manifest
from paceline.checkpoint.shards import ShardReader, TensorToWrite, write_plain
from paceline.checkpoint.state import MODEL
from paceline.durable import PARTIAL, publish
from paceline.errors import StorageError


class WholeTensors(Mapping[str, torch.Tensor]):
    """The whole tensors of a complete checkpoint by name, without `prefix`; each is built when asked for, not kept."""

    def __init__(self, path: Path, prefix: str = MODEL) -> None:
        self._shards = ShardReader(path)
        index = read_index(path, read_manifest(path))
        self._entries = {name.removeprefix(prefix): entry for name, entry in index.items() if name.startswith(prefix)}

    def __getitem__(self, name: str) -> torch.Tensor:
        return _whole(self._shards, self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def full_tensors(path: Path, prefix: str = MODEL) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name without the prefix, whole tensor on the host) for each stored name that begins with `prefix`.

    Only one tensor is built at a time. Raises StorageError where the checkpoint is not complete.
    """
    yield from WholeTensors(path, prefix).items()


def consolidate(path: Path, out: Path, prefix: str = MODEL, *, verify: bool = True) -> FileEntry:
    """Write the tensors whose names begin with `prefix` to one safetensors file, without the prefix.

    Memory stays at one tensor. `out` appears when it is complete, replacing a file of that name. Returns its length
    and digest. Raises StorageError where the checkpoint is damaged, holds no such tensor, or `out` cannot be written.
    """
    manifest = verify_checkpoint(path) if verify else read_manifest(path)
    shards = ShardReader(path)
    entries = [
        TensorToWrite(name.removeprefix(prefix), entry.dtype, entry.shape, partial(_whole, shards, entry))
        for name, entry in read_index(path, manifest).items()
        if name.startswith(prefix)
    ]
    if not entries:
        raise StorageError(f"{path} holds no '{prefix}' tensors", "nothing to write", "choose another checkpoint")
    unfinished = out.with_name(f"{PARTIAL}{out.name}-{os.getpid()}")
    try:
        written = write_plain(unfinished, entries, {"format": "pt"})
        publish(unfinished, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "free space or choose another place") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return written


def _whole(shards: ShardReader, entry: TensorEntry) -> torch.Tensor:
    tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for chunk in entry.chunks:
        target = tensor
        for dimension, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dimension, at, size)
        target.copy_(shards.read(chunk, entry.dtype, [0] * len(entry.shape), chunk.sizes))
    return tensor

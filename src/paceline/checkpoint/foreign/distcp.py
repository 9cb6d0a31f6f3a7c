"""torch's distributed checkpoints, written and read in one process, one tensor at a time.

The format has no check of what is read, and its `.metadata` is a pickle, which may run any code where it is loaded by
`torch.distributed.checkpoint` itself. Here nothing but the format's own classes is taken from it, and of tensors torch
reads values alone.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from paceline.durable import make_folder, sync_all
from paceline.errors import StorageError

METADATA_NAME = ".metadata"
ALONE = "torch.distributed is disabled, unavailable or uninitialized"  # which is what is meant: one process
_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    *((_METADATA, name) for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
}  # fmt: skip
# Where it was saved. Python 3.13 alone names another module for these classes, which no other version has.
PATH_MODULES = ("pathlib", "pathlib._local")
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath")


class _Restricted(pickle.Unpickler):
    """Unpickles what the metadata of a distributed checkpoint is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class of the format, or a dtype. Raises UnpicklingError for anything else."""
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        if module in PATH_MODULES and name in PATHS:  # a name, which opens nothing
            return PurePath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which the format does not need")


class _Reader(FileSystemReader):
    """Reads a distributed checkpoint without trusting its metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path = path
        self._known: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the metadata. Raises StorageError where it is missing or not what the format has."""
        if self._known is None:
            self._known = _metadata(self._path)
        return self._known


def _metadata(path: Path) -> Metadata:
    try:
        with (path / METADATA_NAME).open("rb") as file:
            found = _Restricted(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        for info in (found.storage_data or {}).values():
            name = Path(info.relative_path)
            if name.is_absolute() or ".." in name.parts:
                raise pickle.UnpicklingError(f"'{name}' leaves the folder")
    except OSError as error:
        raise StorageError(
            f"{path} is not a distributed checkpoint of torch", str(error), "the folder that holds `.metadata`"
        ) from error
    except Exception as error:  # a pickle of another making may fail in any way
        raise StorageError(
            f"{path / METADATA_NAME} is refused", f"{type(error).__name__}: {error}",
            "save it anew with torch.distributed.checkpoint",
        ) from error  # fmt: skip
    return found


class DistributedTensors(Mapping[str, torch.Tensor]):
    """The whole tensors of torch's distributed checkpoint by name; each is read when asked for, not kept.

    `others` names what it holds beside tensors: pickled objects, which are not read. Raises StorageError.
    """

    def __init__(self, path: Path) -> None:
        self._reader, self._path = _Reader(path), path
        entries = self._reader.read_metadata().state_dict_metadata
        self._entries = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.others = tuple(name for name in entries if name not in self._entries)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the dtype and the shape of a tensor."""
        entry = self._entries[name]
        return entry.properties.dtype, tuple(entry.size)

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape = self.kind(name)
        whole = torch.empty(shape, dtype=dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ALONE)
                dcp.load({name: whole}, storage_reader=self._reader, no_dist=True)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise StorageError(
                f"'{name}' cannot be read from {self._path}", f"{type(error).__name__}: {error}"[:500],
                "another checkpoint: this one is cut short or damaged",
            ) from error  # fmt: skip
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _OneByOne(DefaultSavePlanner):
    """Gives the writer each tensor when its turn comes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor of an item."""
        return self._tensors[write_item.index.fqn]


def write_distributed(tensors: Mapping[str, torch.Tensor], kinds: Mapping[str, Any], out: Path) -> list[Path]:
    """Write tensors as torch's distributed checkpoint into the new folder `out`, and return its files.

    `kinds` has dtype and shape of each. Memory stays at one tensor. Raises StorageError where it cannot be written.
    """
    empty = {
        name: torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device="meta") for name, kind in kinds.items()
    }
    try:
        make_folder(out)
        writer = FileSystemWriter(out, single_file_per_rank=True, thread_count=1, sync_files=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ALONE)
            dcp.save(empty, storage_writer=writer, planner=_OneByOne(tensors), no_dist=True)
        sync_all(out)  # torch flushes its list of tensors before it is written, and never the folder
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | StorageError):
            raise
        raise StorageError(
            f"cannot write {out}", f"{type(error).__name__}: {error}"[:500], "a new folder with room to write"
        ) from error
    return sorted(path for path in out.iterdir() if path.is_file())

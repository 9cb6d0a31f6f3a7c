"""What `paceline checkpoint` does: finds checkpoints, shows, checks, compares and converts them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.durable import make_folder, publish
from paceline.errors import ConfigError, StorageError
from paceline.session.verbs.weights import (
    RUN,
    Chosen,
    check_folder_name,
    choose_checkpoint,
    what_it_is,
    write_weights,
)  # fmt: skip
from paceline.spec.layout import Layout
from paceline.spec.plan import plan_from_dict
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.survive.contract import Change, changes_between

if TYPE_CHECKING:
    from paceline.checkpoint import Manifest, TensorKind
    from paceline.checkpoint.inspect.differ import CheckpointChange
    from paceline.checkpoint.inspect.sound import Soundness

FORMATS = ("weights", "distributed", "safetensors")
REMOVE = "resuming takes an older one that is sound; remove the folder where it is in the way"
WARNING = (
    "the file `.metadata` of torch's format is a pickle: whoever loads it with torch.distributed.checkpoint runs the"
    " code that it names, and torch checks no byte of the rest"
)


@dataclass(frozen=True)
class Listed:
    """One checkpoint of a folder: its progress, what saved it, and its size."""

    path: Path
    step: int
    sequence: int
    created: str
    layout: str
    ranks: int
    bytes: int


@dataclass(frozen=True)
class Shown:
    """What a checkpoint holds beyond its files."""

    listed: Listed
    position: int
    plan: str
    task: str
    versions: Mapping[str, str]
    fingerprint: str  # of the data
    bytes_of: Mapping[str, int]  # "model" (weights and buffers), "optim", ... -> bytes of the whole tensors
    tensors: Mapping[str, str]  # name -> dtype and shape


@dataclass(frozen=True)
class CheckpointPair:
    """How two checkpoints differ: in their tensors and in the options of their specs."""

    first: Path
    second: Path
    options: tuple[str, ...]
    tensors: CheckpointChange


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote, from what, and what was left out."""

    source: Path
    out: Path
    files: tuple[Path, ...]
    left_out: tuple[str, ...]
    warning: str = ""


def list_at(path: Path) -> tuple[list[Listed], list[str]]:
    """Return the complete checkpoints of a run's directory or of a folder, newest first, and why others are not.

    Raises ConfigError where it holds none at all.
    """
    from paceline.checkpoint import list_checkpoints

    own = checkpoints_folder(path)
    root = own if own.is_dir() else path
    found = list_checkpoints(root)
    if not found.complete and not found.skipped:
        because, fix = what_it_is(path, own.name) if not own.is_dir() else (f"{own} has no folder `step-...`", RUN)
        raise ConfigError(f"'{path}' holds no checkpoint", because, fix)
    return [_listed(one.path, one.manifest) for one in found.complete], list(found.skipped)


def checkpoint_at(path: Path, step: int | None = None) -> Path:
    """Return the checkpoint folder that a path means: itself, or the newest sound one of a run, or that of a step.

    Raises ConfigError where there is none, and StorageError where none is sound.
    """
    if _is_checkpoint(path):
        _refuse_step(path, step)
        return path
    return choose_checkpoint(path, step).path


def _refuse_step(path: Path, step: int | None) -> None:
    if step is not None:
        raise ConfigError(
            f"--step {step} of '{path}'", "that is one checkpoint", "give the run's directory, or no --step"
        )


def show(path: Path) -> Shown:
    """Return what a checkpoint holds. Only the manifest and the index are read. Raises StorageError."""
    from paceline.checkpoint import IndexReader, read_manifest

    manifest = read_manifest(path)
    kinds = IndexReader(path, manifest).kinds
    extra = manifest.extra
    sizes: dict[str, int] = {}
    for name, kind in kinds.items():
        family = name.partition(".")[0]
        sizes[family] = sizes.get(family, 0) + _bytes_of(kind)
    return Shown(
        listed=_listed(path, manifest),
        position=int(extra.get("progress", {}).get("position", 0)),
        plan=str(plan_from_dict(dict(extra["plan"]))) if "plan" in extra else "",
        task=str(extra.get("spec", {}).get("task", {}).get("name", "")),
        versions=extra.get("versions", {}),
        fingerprint=str(extra.get("data_fingerprint", "")),
        bytes_of=sizes,
        tensors={name: f"{kind.dtype}{list(kind.shape)}" for name, kind in kinds.items()},
    )


def check(path: Path, step: int | None = None) -> list[tuple[Path, Soundness | StorageError]]:
    """Return for each checkpoint that a path means, all of a run's or those of a step, whether it is sound.

    Every byte is read, and the values of every tensor. Raises ConfigError where there is none.
    """
    from paceline.checkpoint.inspect.sound import check_sound

    paths, passed_over = [path], list[str]()
    if _is_checkpoint(path):
        _refuse_step(path, step)
    else:
        listed, passed_over = list_at(path)
        paths = [one.path for one in listed if step in (None, one.step)]
    if not paths and not passed_over:
        raise ConfigError(f"'{path}' holds no checkpoint of step {step}", "see `paceline checkpoint ls`", "--step")
    found: list[tuple[Path, Soundness | StorageError]] = []
    for one in paths:
        try:
            found.append((one, check_sound(one)))
        except StorageError as error:
            found.append((one, error))
    refused = (StorageError(f"{path} holds one that is not complete", reason, REMOVE) for reason in passed_over)
    return [*found, *((path, error) for error in refused)]


def compare(first: Path, second: Path, prefix: str = "") -> CheckpointPair:
    """Return how two checkpoints differ. Raises StorageError where one of them is not complete."""
    from paceline.checkpoint import read_manifest
    from paceline.checkpoint.inspect.differ import compare_checkpoints

    specs = [read_manifest(path).extra.get("spec", {}) for path in (first, second)]
    return CheckpointPair(
        first, second, tuple(map(_told, changes_between(*specs))), compare_checkpoints(first, second, prefix)
    )


def convert(source: Path, out: Path, to: str, step: int | None = None, prefix: str = "") -> Converted:
    """Write a checkpoint in another format into the new folder `out`.

    `weights`: safetensors, in Hugging Face's names where the model is built in, as `paceline export` does.
    `distributed`: all tensors as torch's distributed checkpoint. `safetensors`: one file of a distributed checkpoint
    of torch, from whatever program, by its own names: those that begin with `prefix`. Memory stays at one tensor.
    Raises ConfigError, StorageError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"'{out}' is there already", "a conversion writes a new folder", "another OUT")
    check_folder_name(out)
    if to == "safetensors":
        return _from_distributed(source, out, prefix)
    if prefix:
        raise ConfigError(f"--prefix '{prefix}' with --to {to}", "such a conversion writes what it says", "no --prefix")
    from paceline.checkpoint import IndexReader, WholeTensors, verify_checkpoint
    from paceline.checkpoint.foreign.distcp import write_distributed

    path = checkpoint_at(source, step)
    manifest = verify_checkpoint(path)
    if to == "weights":
        run_dir = path.parent.parent
        written = write_weights(run_dir, Chosen(path, manifest, ()), out)[1]
        return Converted(
            path, out, tuple(written), ("all but weights: the optimizer's state, progress, spec and plan",)
        )
    kinds = IndexReader(path, manifest).kinds
    if out.is_dir():
        out.rmdir()
    files = write_distributed(WholeTensors(path, prefix=""), kinds, out)
    return Converted(path, out, tuple(files), ("what is no tensor: progress, spec and plan",), WARNING)


def _from_distributed(source: Path, out: Path, prefix: str) -> Converted:
    from paceline.checkpoint.foreign.distcp import DistributedTensors
    from paceline.checkpoint.shards import DTYPES, TensorToWrite, dtype_name, write_plain

    tensors = DistributedTensors(source)
    kinds = {name: tensors.kind(name) for name in tensors if name.startswith(prefix)}
    unknown = [f"'{name}' of {dtype}" for name, (dtype, _) in kinds.items() if dtype_name(dtype) not in DTYPES]
    if unknown:
        raise StorageError(f"{source} cannot be converted", f"safetensors hold no {unknown[0]}", "cast it first")
    entries = [
        TensorToWrite(name, dtype_name(dtype), shape, lambda name=name: tensors[name])  # type: ignore[misc]
        for name, (dtype, shape) in kinds.items()
    ]
    if not entries:
        named = f" whose name begins with '{prefix}'" if prefix and tensors else ""
        has = f"the first is '{next(iter(tensors))}'" if named else "there is nothing to write"
        raise StorageError(
            f"{source} holds no tensor{named}", has, "another --prefix" if named else "another checkpoint"
        )
    try:
        make_folder(out)
        write_plain(out / "model.safetensors.part", entries, {"format": "pt"})
        publish(out / "model.safetensors.part", out / "model.safetensors")
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "a folder with room to write") from error
    others = (f"{len(tensors) - len(kinds):,} tensors of other names",) if len(kinds) < len(tensors) else ()
    return Converted(source, out, (out / "model.safetensors",), (*tensors.others, *others), WARNING)


def _told(change: Change) -> str:
    return f"{change.option}: {change.before!r} and {change.after!r} ({change.clause.on_resume} on resume)"


def _is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file() or path.name.startswith("step-")


def _listed(path: Path, manifest: Manifest) -> Listed:
    layout = manifest.extra.get("plan", {}).get("layout", {})
    return Listed(
        path, manifest.step, manifest.sequence, manifest.created, str(Layout(**layout)) if layout else "",
        manifest.world_size, manifest.total_bytes,
    )  # fmt: skip


def _bytes_of(kind: TensorKind) -> int:
    from paceline.checkpoint.shards import DTYPES

    return math.prod(kind.shape) * DTYPES[kind.dtype][1]

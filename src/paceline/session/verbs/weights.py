"""The weights of a run as safetensors: which checkpoint is taken, and in which form it is written. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, StorageError, suggestion
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_records
from paceline.spec.load import spec_from_dict
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.sizes import DecoderConfig, is_named, resolve_decoder

BRIDGE = "bridge.weight"  # of task/adapt/distill.py

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint import Manifest


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that is sound in every byte, and why newer ones were passed over."""

    path: Path
    manifest: Manifest
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """Weights that were written.

    `format` is "huggingface" (with config.json), "safetensors" (the module's names), or "peft" (adapters alone).
    """

    checkpoint: Path
    step: int
    out: Path
    format: str
    files: tuple[Path, ...]
    bytes: int
    skipped: tuple[str, ...]


def export_run(run_dir: Path, out: Path, step: int | None = None, *, merge: bool = False) -> Exported:
    """Write the weights of a run's newest sound checkpoint, or of the one of `step`, into the folder `out`.

    Of a run with adapters these alone are written, as peft reads them, or with `merge` whole weights with the adapters
    added to them.
    Raises as `choose_checkpoint`, and StorageError where `out` cannot be written.
    """
    chosen = choose_checkpoint(run_dir, step)
    kind, files = write_weights(run_dir, chosen, out, merge=merge)
    size = sum(file.stat().st_size for file in files)
    return Exported(chosen.path, chosen.manifest.step, out, kind, tuple(files), size, chosen.skipped)


def choose_checkpoint(run_dir: Path, step: int | None = None) -> Chosen:
    """Return the newest checkpoint that is sound in every byte, or the one of a step.

    Raises ConfigError where the run has none, or none of `step`; StorageError where there are some and none is sound.
    """
    from paceline.checkpoint import list_checkpoints, verify_checkpoint
    from paceline.run.loop.resume import checkpoint_root

    root = checkpoint_root(run_dir)
    if not root.is_dir():
        raise ConfigError(
            f"'{run_dir}' holds no checkpoints", "it has no folder `checkpoints`", "paceline train SPEC makes one"
        )
    listing = list_checkpoints(root)
    skipped = list(listing.skipped)
    for found in listing.complete:
        if step is not None and found.manifest.step != step:
            continue
        try:
            return Chosen(found.path, verify_checkpoint(found.path), tuple(skipped))
        except StorageError as error:
            skipped.append(f"{error.what}: {error.because}")
    steps = [str(found.manifest.step) for found in listing.complete]
    if step is not None and str(step) not in steps:
        fix = suggestion(str(step), steps) if steps else "leave --step out once there is a checkpoint"
        raise ConfigError(f"'{run_dir}' holds no checkpoint of step {step}", f"it holds {', '.join(steps)}", fix)
    if skipped:
        raise StorageError(f"no checkpoint in {root} is sound", "; ".join(skipped), "another --step, or another run")
    raise ConfigError(f"'{run_dir}' holds no checkpoint", f"{root} is empty", "let the run reach a checkpoint")


def write_weights(run_dir: Path, chosen: Chosen, out: Path, *, merge: bool = False) -> tuple[str, list[Path]]:
    """Write the weights of a checkpoint into `out` and return their format and the files.

    Memory stays at one file of the export for a built-in model, and at one tensor for another.
    """
    from paceline.checkpoint import WholeTensors, consolidate
    from paceline.task.models.huggingface.weights import export_safetensors

    tensors: Mapping[str, Tensor] = WholeTensors(chosen.path)
    decoder = decoder_of(run_dir, chosen.manifest.extra["spec"], tensors)
    task = spec_from_dict(chosen.manifest.extra["spec"], origin="the checkpoint").task
    if task.adapter.is_none and merge:
        raise ConfigError(f"'{run_dir}' has no adapter to merge", "task.adapter.kind is 'none'", "leave --merge out")
    if not task.adapter.is_none:
        from paceline.task.adapt.merge import MergedTensors

        if not merge:
            return "peft", _write_adapter(task, tensors, out, is_decoder=decoder is not None)
        tensors = MergedTensors(tensors, task.adapter)
    if decoder is not None:
        export_safetensors(_of_decoder(tensors), decoder, out)
        weights = {file for file in out.glob("model*.safetensors*") if file.suffix != ".part"}
        return "huggingface", sorted({*weights, out / "config.json"})
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write to {out}", str(error), "a folder with room to write") from error
    if merge:
        _write_whole(tensors, out / "model.safetensors")
    else:
        consolidate(chosen.path, out / "model.safetensors", verify=False)  # verified when it was chosen
    return "safetensors", [out / "model.safetensors"]


def _write_adapter(task: Task, tensors: Mapping[str, Tensor], out: Path, *, is_decoder: bool) -> list[Path]:
    """Write the adapters of a run, and what is trained beside them, in peft's format."""
    from paceline.task.adapt.peft import write_adapter
    from paceline.task.adapt.trained import named

    base = task.model.weights if isinstance(task.model, ModelSpec) else ""
    trained = named(list(tensors), task.train)
    return write_adapter(tensors, task.adapter, trained, out, base=base, is_decoder=is_decoder)


def _write_whole(tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write tensors to one file, one at a time in memory."""
    from paceline.checkpoint.shards import TensorToWrite, dtype_name, write_shard
    from paceline.durable import publish

    entries = []
    for name in tensors:
        tensor = tensors[name]
        entries.append(
            TensorToWrite(name, dtype_name(tensor.dtype), tuple(tensor.shape), partial(tensors.__getitem__, name))
        )
    part = out.with_name(out.name + ".part")
    try:
        write_shard(part, entries, {"format": "pt"})
        publish(part, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "free space or choose another place") from error


def _of_decoder(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a decoder's tensors without what stands beside a student: its way to a teacher's hidden states."""
    if BRIDGE not in tensors:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != BRIDGE}


def decoder_of(run_dir: Path, spec: dict[str, Any], tensors: Mapping[str, Tensor]) -> DecoderConfig | None:
    """Return the shape of a run's built-in model, or None for a user's own."""
    task = spec_from_dict(spec, origin="the checkpoint").task
    model = task.model
    if isinstance(model, ModelSpec) and model.name.startswith("paceline.task.adapt.distill:"):
        from paceline.task.adapt.distill import student_of

        model = student_of(model)
    if not isinstance(model, ModelSpec) or not is_named(model.name):
        return None
    seq_len = task.data.seq_len if isinstance(task.data, DataSpec) else 0
    for record in read_records(run_dir):  # data given as an object state their length nowhere else
        if isinstance(record, RunStarted):
            seq_len = int(record.facts.get("items_per_sample", seq_len))
    return resolve_decoder(model, tensors["embed_tokens.weight"].shape[0], seq_len)

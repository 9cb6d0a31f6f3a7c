"""Writes a run's weights as safetensors: for the built-in models in Hugging Face's layout, with config.json.

The newest checkpoint that is sound in every byte is taken, or the one of --step. A built-in model is then loaded by
`LlamaForCausalLM.from_pretrained(OUT)`; one of your own is in OUT/model.safetensors under its own names, tied weights
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.output import print_json
from paceline.cli.parser import whole
from paceline.errors import ConfigError, StorageError, suggestion

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.run.checkpoint import Manifest
    from paceline.task.models.sizes import DecoderConfig

EXAMPLE = "paceline export runs/stdlib-code weights"
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline export`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one with `checkpoints`")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; it is made where there is none")
    parser.add_argument("--step", metavar="N", type=whole, help="the checkpoint of this step instead of the newest")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline export`."""
    path, manifest, skipped = choose_checkpoint(options.run_dir, options.step)
    kind, files = write_weights(options.run_dir, path, manifest, options.out)
    size = sum(file.stat().st_size for file in files)
    if options.json:
        print_json({
            "run_dir": str(options.run_dir), "checkpoint": str(path), "step": manifest.step, "out": str(options.out),
            "format": kind, "files": [file.name for file in files], "bytes": size, "skipped": skipped,
        })  # fmt: skip
        return 0
    for reason in skipped:
        print(f"skipped  {reason}")
    loads = "LlamaForCausalLM.from_pretrained loads it" if kind == "huggingface" else "by the module's own names"
    print(f"export   step {manifest.step} to {options.out} ({size:,} bytes; {loads})")
    return 0


def choose_checkpoint(run_dir: Path, step: int | None) -> tuple[Path, Manifest, list[str]]:
    """Return the newest checkpoint that is sound in every byte, its manifest, and why newer ones were passed over.

    Raises ConfigError where the run has none, or none of `step`; StorageError where there are some and none is sound.
    """
    from paceline.run.checkpoint import list_checkpoints, verify_checkpoint
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
            return found.path, verify_checkpoint(found.path), skipped
        except StorageError as error:
            skipped.append(f"{error.what}: {error.because}")
    steps = [str(found.manifest.step) for found in listing.complete]
    if step is not None and str(step) not in steps:
        fix = suggestion(str(step), steps) if steps else "leave --step out once there is a checkpoint"
        raise ConfigError(f"'{run_dir}' holds no checkpoint of step {step}", f"it holds {', '.join(steps)}", fix)
    if skipped:
        raise StorageError(f"no checkpoint in {root} is sound", "; ".join(skipped), "another --step, or another run")
    raise ConfigError(f"'{run_dir}' holds no checkpoint", f"{root} is empty", "let the run reach a checkpoint")


def write_weights(run_dir: Path, path: Path, manifest: Manifest, out: Path) -> tuple[str, list[Path]]:
    """Write the weights of a checkpoint into `out` and return their format and the files.

    Memory stays at one file of the export for a built-in model, and at one tensor for another.
    """
    from paceline.run.checkpoint import WholeTensors, consolidate
    from paceline.task.models.huggingface.weights import export_safetensors

    tensors = WholeTensors(path)
    decoder = decoder_of(run_dir, manifest.extra["spec"], tensors)
    if decoder is not None:
        export_safetensors(tensors, decoder, out)
        weights = {file for file in out.glob("model*.safetensors*") if file.suffix != ".part"}
        return "huggingface", sorted({*weights, out / "config.json"})
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write to {out}", str(error), "a folder with room to write") from error
    consolidate(path, out / "model.safetensors", verify=False)  # verified when it was chosen
    return "safetensors", [out / "model.safetensors"]


def decoder_of(run_dir: Path, spec: dict[str, Any], tensors: Mapping[str, Tensor]) -> DecoderConfig | None:
    """Return the shape of a run's built-in model, or None for a user's own."""
    from paceline.run.record.journal import read_records
    from paceline.spec.journal.kinds import RunStarted
    from paceline.spec.load import spec_from_dict
    from paceline.spec.task import DataSpec, ModelSpec
    from paceline.task.models.sizes import is_named, resolve_decoder

    task = spec_from_dict(spec, origin="the checkpoint").task
    if not isinstance(task.model, ModelSpec) or not is_named(task.model.name):
        return None
    seq_len = task.data.seq_len if isinstance(task.data, DataSpec) else 0
    for record in read_records(run_dir):  # data given as an object state their length nowhere else
        if isinstance(record, RunStarted):
            seq_len = int(record.facts.get("items_per_sample", seq_len))
    return resolve_decoder(task.model, tensors["embed_tokens.weight"].shape[0], seq_len)

"""The weights of a run as safetensors: which checkpoint is taken, and in which form it is written. Torch-free."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.durable import make_folder
from paceline.errors import ConfigError, StorageError, suggestion
from paceline.session.verbs.adapted import merged_tensors, of_student, without_teacher, write_adapters, write_whole
from paceline.spec.adapt.adapter import TURNED
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_records
from paceline.spec.load import spec_from_dict
from paceline.spec.model_folder import CONFIG, KEPT, THEIRS, TOKENIZER, folder_of, is_model_folder
from paceline.spec.run_files import is_run
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.huggingface.road import read_config
from paceline.task.models.shape import DecoderConfig
from paceline.task.models.sizes import is_named, resolve_decoder

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint import Manifest

RUN = "the directory of a run, which paceline train SPEC makes"  # is what to name
BEST = "best"  # in the place of a step: that of the best evaluation
FILE_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")  # of one file, where a folder is written


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
    architecture: str  # the class of transformers that loads it, "" of the module's own names
    files: tuple[Path, ...]
    bytes: int
    skipped: tuple[str, ...]


def export_run(run_dir: Path, out: Path, step: int | str | None = None, *, merge: bool = False) -> Exported:
    """Write the weights of a run's newest sound checkpoint, or of the one of `step`, into the folder `out`.

    `step` may be BEST. Of a run with adapters these alone are written, as peft reads them, or with `merge` whole
    weights with the adapters added to them.

    Raises as `choose_checkpoint`, ConfigError where `out` is a run's directory, and StorageError where it cannot be
    written.
    """
    if is_run(out):
        raise ConfigError(
            f"cannot export weights to {out}", "it is a run's directory, among whose files they would lie",
            f"a folder of their own, such as {out.resolve().name}-weights",
        )  # fmt: skip
    check_folder_name(out)
    chosen = choose_checkpoint(run_dir, step)
    kind, files = write_weights(run_dir, chosen, out, merge=merge)
    size = sum(file.stat().st_size for file in files)
    architecture = str(read_config(out)["architectures"][0]) if kind == "huggingface" else ""
    return Exported(chosen.path, chosen.manifest.step, out, kind, architecture, tuple(files), size, chosen.skipped)


def check_folder_name(out: Path) -> None:
    """Raise ConfigError where the name of a new folder is that of a file, which whoever gave it will look for."""
    if out.suffix.lower() in FILE_ENDINGS and not out.is_dir():
        what = f"'{out}' has the name of a file"
        raise ConfigError(what, "a folder is written, with files of its own names in it", f"'{out.with_suffix('')}'")


def choose_checkpoint(run_dir: Path, step: int | str | None = None) -> Chosen:
    """Return the newest checkpoint that is sound in every byte, the one of a step, or for BEST that of the best
    evaluation, of those that were saved after one.

    Raises ConfigError where the run has none, or none of `step`; StorageError where there are some and none is sound.
    """
    from paceline.checkpoint import list_checkpoints, verify_checkpoint
    from paceline.checkpoint.tiers.retention import best_first
    from paceline.spec.run_files import checkpoints_folder

    root = checkpoints_folder(run_dir)
    if not root.is_dir():
        raise ConfigError(f"'{run_dir}' holds no checkpoints", *what_it_is(run_dir, root.name))
    listing = list_checkpoints(root)
    skipped, complete = list(listing.skipped), list(listing.complete)
    if step == BEST:
        complete = [complete[place] for place in best_first([found.manifest for found in complete])]
        step = None
        if not complete:
            raise ConfigError(
                f"'{run_dir}' holds no checkpoint that was evaluated",
                "of a checkpoint that was not saved after an evaluation nobody knows how good it is",
                "run.checkpoints.save_best = true, or run.evaluate_every and run.checkpoint_every of equal length",
            )
    for found in complete:
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


def what_it_is(path: Path, name: str) -> tuple[str, str]:
    """Return what a folder without checkpoints is, and what to name in its place."""
    if run := next((each for each in (path, *path.absolute().parents) if each.name == name), None):
        return f"it is a part of the run {run.absolute().parent}", f"name the run: {run.absolute().parent}"
    if any((path / file).is_file() for file in (CONFIG, "model.safetensors", "adapter_config.json")):
        return "it holds weights for other programs", "name the directory of the run that they came from"
    if not path.exists():
        return "there is no such folder", RUN
    runs = sorted(each.parent for each in path.glob(f"*/{name}")) if path.is_dir() else []
    if runs:
        return "it is a folder of runs", f"one of: {', '.join(str(each) for each in runs[:8])}"
    return f"it has no folder `{name}`", RUN


def write_weights(run_dir: Path, chosen: Chosen, out: Path, *, merge: bool = False) -> tuple[str, list[Path]]:
    """Write the weights of a checkpoint into `out` and return their format and the files.

    Memory stays at one file of the export for a built-in model, and at one tensor for another.
    """
    from paceline.checkpoint import WholeTensors, consolidate
    from paceline.session.verbs.classes import write_classes
    from paceline.task.models.huggingface.weights import export_safetensors

    named = write_classes(chosen.manifest.extra, out)
    tensors: Mapping[str, Tensor] = WholeTensors(chosen.path)
    task = without_teacher(spec_from_dict(chosen.manifest.extra["spec"], origin="the checkpoint").task)
    base = task.model.starts_from if isinstance(task.model, ModelSpec) else ""  # the kept folder has no weights
    task = with_kept_folder(run_dir, task)
    decoder = decoder_of(run_dir, task, tensors)
    if task.adapter.is_none and merge:
        raise ConfigError(f"'{run_dir}' has no adapter to merge", "task.adapter.kind is 'none'", "leave --merge out")
    if not task.adapter.is_none:
        turned = chosen.manifest.extra.get(TURNED, ())
        if not merge:
            is_decoder = decoder is not None
            return "peft", [*write_adapters(task, base, tensors, out, is_decoder=is_decoder, turned=turned), *named]
        tensors = merged_tensors(task, tensors, turned)
    if isinstance(task.model, ModelSpec) and folder_of(task.model.name) is not None:
        return "huggingface", _write_as_its_folder(task.model, decoder, tensors, out)
    if decoder is not None:
        export_safetensors(of_student(tensors), decoder, out)
        return "huggingface", _written(out)
    try:
        make_folder(out)
    except OSError as error:
        raise StorageError(f"cannot write to {out}", str(error), "a folder with room to write") from error
    if merge:
        write_whole(tensors, out / "model.safetensors")
    else:
        consolidate(chosen.path, out / "model.safetensors", verify=False)  # verified when it was chosen
    return "safetensors", [out / "model.safetensors", *named]


def _written(out: Path) -> list[Path]:
    weights = {file for file in out.glob("model*.safetensors*") if file.suffix != ".part"}
    return sorted({*weights, out / CONFIG})


def with_kept_folder(run_dir: Path, task: Task) -> Task:
    """Return a run's task with the model's folder that the run has kept a copy of, where it has, and its tokenizer.

    What was trained knows the tokens of that copy, whatever has become of the folder.
    """
    model, kept = task.model, run_dir / KEPT
    if not isinstance(model, ModelSpec) or folder_of(model.name) is None or not is_model_folder(str(kept)):
        return task
    scheme = THEIRS if model.name.startswith(THEIRS) else ""
    data, words = task.data, kept.absolute() / TOKENIZER
    its_own = Path(model.name.removeprefix(THEIRS)).expanduser()
    theirs = isinstance(data, DataSpec) and Path(data.tokenizer).expanduser() in (its_own, its_own / TOKENIZER)
    if theirs and words.is_file():
        assert isinstance(data, DataSpec)
        task = dataclasses.replace(task, data=dataclasses.replace(data, tokenizer=str(words)))
    return dataclasses.replace(task, model=dataclasses.replace(model, name=f"{scheme}{kept.absolute()}"))


def _write_as_its_folder(
    model: ModelSpec, decoder: DecoderConfig | None, tensors: Mapping[str, Tensor], out: Path
) -> list[Path]:
    """Write weights as the folder that the model came from: its names, its config.json, what lies beside."""
    from paceline.task.models.huggingface.export import copy_beside, write_folder
    from paceline.task.models.huggingface.weights import config_of_folder, our_state, their_state

    folder = folder_of(model.name)
    assert folder is not None
    state = our_state(tensors, decoder) if decoder is not None else their_state(tensors, model)
    write_folder(state, config_of_folder(model, decoder), out)
    return sorted([*_written(out), *copy_beside(folder, out)])


def decoder_of(run_dir: Path, task: Task, tensors: Mapping[str, Tensor]) -> DecoderConfig | None:
    """Return the shape of a run's built-in model, or None for a user's own."""
    if not isinstance(task.model, ModelSpec) or not is_named(task.model.name):
        return None
    seq_len = task.data.seq_len if isinstance(task.data, DataSpec) else 0
    for record in read_records(run_dir):  # data given as an object state their length nowhere else
        if isinstance(record, RunStarted):
            seq_len = int(record.facts.get("items_per_sample", seq_len))
    return resolve_decoder(task.model, tensors["embed_tokens.weight"].shape[0], seq_len)

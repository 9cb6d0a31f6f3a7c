"""Writes a folder that from_pretrained loads: weights in files of a size, their index, config.json, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from paceline.durable import make_folder, publish, write_text
from paceline.errors import StorageError
from paceline.spec.model_folder import CONFIG, KEPT, folder_of
from paceline.spec.task import ModelSpec
from paceline.task.models.huggingface.files import INDEX

SHARD_BYTES = 5 * 10**9  # as in transformers' save_pretrained up to version 4
# What a folder holds besides config.json and weights, and generation needs: of tokenizers, templates and defaults.
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
          "chat_template.jinja", "chat_template.json", "preprocessor_config.json")  # fmt: skip


class Renamed(Mapping[str, Tensor]):
    """Tensors under other names: `names` says which of them each name stands for."""

    def __init__(self, state: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._state, self._names = state, dict(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._state[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_folder(
    state: Mapping[str, Tensor], config: Mapping[str, object], folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write whole tensors and a config.json into a folder, which is made where there is none; return the folder.

    `state` may be lazy: no more than one file's tensors are held at a time. Above `shard_bytes` the weights go to
    several files and an index. Every file is complete or absent, and on the disk before it has its name. Raises
    StorageError where the folder cannot be written.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    sizes, dtypes = {}, set()
    for name, tensor in state.items():
        sizes[name] = tensor.nbytes
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    parts = _parts(sizes, shard_bytes)
    try:
        make_folder(folder)
        for file, names in parts.items():
            held = {name: state[name].detach().cpu().contiguous() for name in names}
            save_file(held, folder / (file + ".part"), metadata={"format": "pt"})
            publish(folder / (file + ".part"), folder / file)
        if len(parts) > 1:
            weight_map = {name: file for file, names in parts.items() for name in names}
            _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
        else:
            (folder / INDEX).unlink(missing_ok=True)  # of an earlier export, and would take precedence
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
        _write_json(folder / CONFIG, {**config, "dtype": dtype, "torch_dtype": dtype})
    except OSError as error:
        raise StorageError(f"cannot export weights to {folder}", str(error), "a folder with room to write") from error
    return folder


def copy_beside(source: Path, folder: Path, names: tuple[str, ...] = BESIDE) -> list[Path]:
    """Copy what of a model's folder lies beside its weights into another; return the copies.

    Raises StorageError where one cannot be read or written.
    """
    copies = []
    for name in names:
        if (source / name).is_file():
            try:
                make_folder(folder)
                shutil.copyfile(source / name, folder / (name + ".part"))
                publish(folder / (name + ".part"), folder / name)
            except OSError as error:
                raise StorageError(f"cannot copy {source / name} to {folder}", str(error), "room to write") from error
            copies.append(folder / name)
    return copies


def keep_folder(model: object, run_dir: Path) -> None:
    """Keep in a run's directory what of its model's folder is not weights: an export needs no other place."""
    folder = folder_of(model.name) if isinstance(model, ModelSpec) else None
    if folder is not None:
        copy_beside(folder, run_dir / KEPT, (CONFIG, *BESIDE))


def _parts(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Return file name to tensor names, in order, each file at most `shard_bytes` unless one tensor is larger."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")

"""Files of weights: a single .safetensors, or the files of an index, which must lie in the folder of the index.

What tensors there are is read from the files' headers, without torch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")  # as torch.save writes: reading them may run code


class LazyTensors(Mapping[str, "Tensor"]):
    """Tensors of one or more safetensors files by name; each is read when it is asked for, and not kept."""

    def __init__(self, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._files, self._shapes = dict(files), dict(shapes)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as opened:  # maps the file, reads one tensor
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def part(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        """Return the part of a tensor that begins at `offsets` and has the shape `sizes`; the rest is not read."""
        if not sizes:
            return self[name]
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as opened:
            found: Tensor = opened.get_slice(name)[
                tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            ]
            return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from its file's header."""
        return self._shapes[name]

    @property
    def files(self) -> list[Path]:
        """The files, in order of their names."""
        return sorted(set(self._files.values()))


def read_safetensors(path: str | Path) -> LazyTensors:
    """Return the tensors of a .safetensors file, or of a folder with one, or with an index and several.

    Raises ConfigError where there is none, StorageError where a file is missing or broken.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"no weights at {path}", "there is no such file or folder", "a safetensors file or folder")
    if path.is_file():
        return _of_one(path)
    if (path / INDEX).is_file():
        return _of_index(path)
    found = sorted(path.glob("model.safetensors")) or sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise _none_in(path, len(found))
    return _of_one(found[0])


def _of_one(file: Path) -> LazyTensors:
    shapes = header(file)
    return LazyTensors(dict.fromkeys(shapes, file), shapes)


def _of_index(folder: Path) -> LazyTensors:
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): file_inside(folder, file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{folder / INDEX} cannot be read", f"{type(error).__name__}: {error}", "a fresh copy"
        ) from error
    if absent := sorted({file.name for file in files.values() if not file.exists()}):
        raise StorageError(
            f"{len(absent)} of {len(set(files.values()))} files of weights are not in {folder}",
            f"{INDEX} names {', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}", "download or copy them again",
        )  # fmt: skip
    held = {file: header(file) for file in set(files.values())}
    for name, file in files.items():
        if name not in held[file]:
            raise StorageError(f"{file} has no tensor '{name}'", f"{INDEX} says it has", "a fresh copy")
    return LazyTensors(files, {name: held[file][name] for name, file in files.items()})


def _none_in(folder: Path, found: int) -> ConfigError:
    if found:
        because = f"it holds {found} files and no {INDEX}"
        return ConfigError(f"no weights in {folder}", because, "the path of one .safetensors file")
    other = sorted(file.name for kind in ("*.bin", "*.pth", "*.gguf") for file in folder.glob(kind))
    if other:
        if other[0].endswith(".gguf"):
            because = f"it holds no .safetensors file; {other[0]} is of quantised weights, for inference"
            return ConfigError(f"no weights in {folder}", because, "the folder that it was made from")
        because = f"it holds no .safetensors file; {other[0]} is of another format, which may run code when it is read"
        write = f"from transformers import AutoModel as M; M.from_pretrained('{folder}').save_pretrained('NEW')"
        hint = f'python -c "{write}", with AutoModelForCausalLM for a model with a head; NEW is then the folder'
        return ConfigError(f"no weights in {folder}", because, hint)
    because = "it holds no .safetensors file"
    return ConfigError(f"no weights in {folder}", because, "the path of one .safetensors file, or model.weights = "
                       "\"none\" to start fresh")  # fmt: skip


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file. Raises StorageError where it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StorageError(
            f"{file} cannot be read as safetensors",
            f"{type(error).__name__}: {error}",
            converting(file) if file.suffix in PICKLED else "a fresh copy of the file",
        ) from error


def converting(file: Path) -> str:
    """Return the command that writes as safetensors what `torch.save` wrote: a state_dict, or a checkpoint with one."""
    out = file.with_suffix(".safetensors")
    program = (
        "import sys, torch; from safetensors.torch import save_file; "
        "found = torch.load(sys.argv[1], weights_only=True); "
        "found = next((found[k] for k in ('state_dict', 'model_state_dict', 'model') if k in found), found); "
        "save_file({n: v.clone().contiguous() for n, v in found.items()}, sys.argv[2])"
    )
    return f'python -c "{program}" {shlex.quote(str(file))} {shlex.quote(str(out))}, and then model.weights = "{out}"'


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file that `folder`'s index names. Raises StorageError where it leaves the folder.

    An index is downloaded with its weights, so a name may be anybody's: neither an absolute path, nor "..", nor a link
    leads out. Links of the Hugging Face cache are followed: they lead from a snapshot to the blobs beside it.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise _leaves(folder, name, "a file of an index lies beside it or below")
    home, real = folder.resolve(), _resolved(folder, name)
    if not real.is_relative_to(home) and real.parent not in _blobs_of(home):
        raise _leaves(folder, name, f"it is a link to {real}")
    return folder / name


def _resolved(folder: Path, name: str) -> Path:
    try:
        return (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # links in a circle: which of the two depends on Python's version
        raise _leaves(folder, name, str(error)) from error


def _blobs_of(home: Path) -> list[Path]:
    """Return where the files of a snapshot of the Hugging Face cache are kept, for a folder that is one."""
    return [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]


def _leaves(folder: Path, name: str, because: str) -> StorageError:
    return StorageError(
        f"the index of {folder} names a file outside of the folder: '{name}'", because,
        "a folder with the files themselves, from a source that you trust",
    )  # fmt: skip

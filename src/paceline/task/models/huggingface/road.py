"""Which model a folder of Hugging Face becomes: the built-in decoder, or the folder's own class. Imports no torch.

The built-in decoder stands for a config.json only where every entry of it is known here and computed alike. An entry
that is not known counts as a difference: nothing is left out in silence.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, StorageError
from paceline.spec.model_folder import CONFIG, THEIRS, folder_of
from paceline.task.models.huggingface.likeness import Likeness, likeness_of
from paceline.task.models.shape import DecoderConfig

AS_GIVEN = "the spec asks for the folder's own class (hf:)"


@dataclass(frozen=True)
class Road:
    """What a folder's config.json is, and what is built for it."""

    folder: Path
    architecture: str  # the class in transformers
    decoder: DecoderConfig | None  # the built-in decoder that computes the same; None: transformers' class is built
    differences: tuple[str, ...]  # why it is not the built-in decoder
    forced: bool = False  # whether the spec chose transformers' class

    @property
    def chosen(self) -> str:
        """What is built, in words."""
        return "the built-in decoder" if self.decoder is not None else f"transformers' {self.architecture}"

    @property
    def because(self) -> str:
        """Why."""
        if self.decoder is not None:
            return "every entry of its config.json is computed alike"
        return AS_GIVEN if self.forced else "the built-in decoder differs: " + "; ".join(self.differences)

    def __str__(self) -> str:
        return f"{self.architecture} from {self.folder}, as {self.chosen}: {self.because}"


def road_of(name: str) -> Road:
    """Return what is built for a model's name that is the path of a folder.

    Raises ConfigError where there is no such folder, or its config.json names no model; StorageError where it cannot be
    read.
    """
    folder = folder_of(name)
    assert folder is not None, name
    try:
        found = (folder / CONFIG).stat()
    except OSError as error:
        raise ConfigError(
            f"there is no model at '{name}'",
            f"no file {(folder / CONFIG).absolute()}" if not isinstance(error, PermissionError) else str(error),
            _what_to_name(name, folder),
        ) from error
    return _road(folder, name.startswith(THEIRS), found.st_mtime_ns, found.st_size)


def _what_to_name(name: str, folder: Path) -> str:
    """Return what to name instead of a folder that is not there: one that is fetched first, where it is of the hub."""
    there = "a folder that save_pretrained or paceline export wrote"
    repository = name.removeprefix(THEIRS)
    if re.fullmatch(r"[\w-]+/[\w.-]+", repository) and not folder.parent.exists():
        fetched = f"hf download {repository} --local-dir {folder.name}"
        return f"{there}; one of the hub is fetched before: {fetched}, and named './{folder.name}'"
    return f"{there}, or a clone of a repository of the hub"


@functools.lru_cache(maxsize=64)
def _road(folder: Path, forced: bool, changed: int, size: int) -> Road:
    config = read_config(folder)
    like = Likeness("", None, ()) if forced else likeness_of(config, folder.name)
    return Road(folder, _architecture(config, folder), like.decoder, like.differences, forced)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. Raises StorageError where it cannot be read, or holds no table."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read", str(error), "a fresh copy of the file") from error
    if not isinstance(config, Mapping):
        raise StorageError(f"{path} cannot be read", "it holds no table of options", "a fresh copy of the file")
    return dict(config)


def _architecture(config: Mapping[str, object], folder: Path) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return str(named[0])
    raise ConfigError(
        f"{folder / CONFIG} does not say which model it is of", "it has no entry `architectures`",
        'the name of its class: "architectures": ["LlamaForCausalLM"]',
    )  # fmt: skip

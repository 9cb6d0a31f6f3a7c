"""How a spec names a folder of Hugging Face as its model: by a path, which has a "/" in it. Reads no weights."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
THEIRS = "hf:"  # before the path: the folder's own class is built, whatever the built-in decoder could compute
KEPT = "model"  # in a run's directory: what it keeps of the folder, without the weights
FRESH = "none"  # of task.model.weights: the folder's architecture, and no weights of it


def folder_of(name: str) -> Path | None:
    """Return the folder that a model's name is the path of, None for a named size and for an import path."""
    path = name.removeprefix(THEIRS)
    return Path(path).expanduser() if "/" in path else None


def is_model_folder(path: str) -> bool:
    """Return whether there is a folder with a config.json at a path."""
    return (Path(path).expanduser() / CONFIG).is_file()


def tokenizer_of(name: str) -> Path | None:
    """Return the tokenizer.json of a model's folder, None where there is none."""
    folder = folder_of(name)
    return folder / TOKENIZER if folder is not None and (folder / TOKENIZER).is_file() else None


def weights_of(name: str, weights: str) -> str:
    """Return the file or folder of weights that a model starts from: those stated, or its folder's; "" for none."""
    if weights:
        return "" if weights == FRESH else weights
    folder = folder_of(name)
    return "" if folder is None else str(folder)

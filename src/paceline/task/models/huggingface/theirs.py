"""A folder's own class of transformers, built from its config.json with fresh weights; its files are read later."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from paceline.cluster.here.collector import collector_at_rest
from paceline.errors import ConfigError, MissingExtra
from paceline.task.models.huggingface.road import Road, read_config

EXTRA = "transformers"
ARCHITECTURE = "architecture"  # of task.model.arguments: another class than config.json names


def build_theirs(road: Road, **changes: object) -> object:
    """Return the module that a folder's config.json describes.

    `changes` replace entries of it; `architecture` among them is another class of transformers: one with another head.
    Raises MissingExtra without transformers, ConfigError for a folder whose class is not part of it, or whose weights
    are quantised.
    """
    architecture = str(changes.get(ARCHITECTURE, road.architecture))
    with collector_at_rest():  # in a first start planning has imported it so; in a later one, which traces nothing, not
        try:
            import transformers
        except ImportError as error:
            raise MissingExtra("transformers", EXTRA, f"building {architecture} from {road.folder}") from error
        kind = getattr(transformers, architecture, None)  # which imports it
        configs = transformers.AutoConfig
    refuse_foreign(road.folder, road.architecture)
    if kind is None:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {architecture}",
            f"task.model.arguments.{ARCHITECTURE} names it" if ARCHITECTURE in changes
            else f"the config.json of {road.folder} names it",
            "a release of transformers that has it",
        )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of entries that its class does not know
        config = configs.from_pretrained(str(road.folder), **_entries(changes))
    return kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)


def changed_config(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return what `task.model.arguments` change of a folder's config.json."""
    entries = _entries(arguments)
    return {**entries, "architectures": [arguments[ARCHITECTURE]]} if ARCHITECTURE in arguments else entries


def _entries(arguments: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if name != ARCHITECTURE}


def refuse_foreign(folder: Path, architecture: str) -> None:
    """Raise ConfigError where a folder's model needs code of its own, or its weights are quantised."""
    config = read_config(folder)
    if config.get("auto_map"):
        raise ConfigError(
            f"{architecture} of {folder} is not part of transformers", "its config.json names code of the folder",
            "a factory of your own that builds it, and model.weights with the folder: package.module:factory",
        )  # fmt: skip
    if config.get("quantization_config"):
        raise ConfigError(
            f"the weights of {folder} are quantised", "its config.json has a quantization_config",
            "the model before it was quantised: training needs whole weights",
        )  # fmt: skip

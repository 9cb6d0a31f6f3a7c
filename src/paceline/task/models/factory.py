"""Factories of models: what a task's `model` names or is, and what comes of calling it."""

from __future__ import annotations

import contextlib
import functools
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.cluster.here.collector import collector_at_rest
from paceline.errors import ConfigError
from paceline.spec.import_paths import load_object
from paceline.spec.model_folder import folder_of
from paceline.spec.task import ModelSpec
from paceline.task.models.huggingface.road import road_of
from paceline.task.models.huggingface.theirs import build_theirs

Model = ModelSpec | nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Factory:
    """What builds a model: a callable with its arguments, and its name for messages."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    name: str

    def call(self) -> Any:
        """Return what the factory returns."""
        return self.function(**self.arguments)


def factory_of(model: Model) -> Factory | None:
    """Return the factory that a task's `model` is or names, None for a module. Raises ConfigError for neither."""
    if isinstance(model, nn.Module):
        return None
    if not isinstance(model, ModelSpec):
        return Factory(_callable(model), {}, getattr(model, "__qualname__", repr(model)))
    _refuse_overrides(model)
    if folder_of(model.name) is not None:
        road = road_of(model.name)
        return Factory(functools.partial(build_theirs, road), model.arguments, f"{road.architecture} of {road.folder}")
    with collector_at_rest():
        factory = load_object(model.name, "task.model.name")
    if isinstance(factory, nn.Module):
        return None
    if not callable(factory):
        raise ConfigError(
            f"task.model = '{model.name}' is of type {type(factory).__name__}",
            "it is neither a module nor can it be called", "a function that returns an nn.Module",
        )  # fmt: skip
    return Factory(factory, model.arguments, model.name)


def gives_weights(model: Model) -> bool:
    """Return whether a task's `model` names a file or folder of weights."""
    return isinstance(model, ModelSpec) and bool(model.starts_from)


def _callable(model: object) -> Callable[..., object]:
    if not callable(model):
        raise ConfigError(
            f"task.model is of type {type(model).__name__}", "it must be a ModelSpec, an nn.Module or a factory",
            'for example "llama-11m"',
        )  # fmt: skip
    return model


def call_factory(factory: Factory, seed: int, device: str) -> nn.Module:
    """Return what a factory builds, its random numbers seeded. Raises ConfigError where it fails."""
    try:
        with _seeded(seed), torch.device(device):
            built = factory.call()
    except Exception as error:  # a user's factory may raise anything; the message says what and where
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"the model factory '{factory.name}' failed",
            f"{type(error).__name__} in {frame.filename}:{frame.lineno}: {error}",
            "call it in Python with the same arguments: " + (repr(factory.arguments) if factory.arguments else "none"),
        ) from error
    if not isinstance(built, nn.Module):
        raise ConfigError(
            f"the model factory '{factory.name}' returned {type(built).__name__}", "it must return a torch.nn.Module",
            "return the module itself, not its class or a pair",
        )  # fmt: skip
    return built


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch, numpy and Python, and put them back: what a factory draws is the same in every process."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)


def _refuse_overrides(spec: ModelSpec) -> None:
    names = ("hidden", "layers", "heads", "kv_heads", "ffn", "experts", "top_k", "scoring", "balance", "vocab")
    given = [name for name in names if getattr(spec, name)]
    given += [name for name in ("tied", "balance_weight") if getattr(spec, name) is not None]
    if given:
        raise ConfigError(
            f"model.{given[0]} cannot change the model '{spec.name}'", "overrides apply to named sizes only",
            f"task.model.arguments.{given[0]}, if the factory takes it",
        )  # fmt: skip

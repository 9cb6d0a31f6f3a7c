"""Objectives where the batch is: the tensors that an objective holds itself, such as the weights of classes.

A task knows nothing of devices, so its objective is written with tensors on the CPU. What can be reached from it is
moved; a tensor that cannot, one of a module's globals say, gives an error that names the ways out.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_map

from paceline.errors import ConfigError
from paceline.foreign_errors import is_of_two_devices
from paceline.task.coupling import GatheringObjective
from paceline.task.objective import BUILT_IN, Objective


@dataclass(frozen=True)
class PlacedObjective:
    """An objective whose own tensors are where its batches are; it says of itself what the objective says."""

    objective: Callable[..., tuple[Tensor, Any]]

    def __call__(self, model: nn.Module, batch: Any, **more: Any) -> tuple[Tensor, Any]:
        """Return (loss_sum, weight). Raises ConfigError where tensors of two devices meet."""
        try:
            return self.objective(model, batch, **more)
        except RuntimeError as error:
            if not is_of_two_devices(error):
                raise
            raise ConfigError(
                "tensors on two devices meet in the objective, or in the model",
                f"one of them stayed on the CPU: {str(error).splitlines()[0]}",
                "a function that closes over its tensors, an object or a module that has them as attributes, all of "
                "which are moved, or tensor.to(labels.device) where it is used; in a model self.register_buffer",
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name == "objective" or (name.startswith("__") and name != "__name__"):
            raise AttributeError(name)
        return getattr(self.objective, name)


def objective_on(objective: Objective, device: torch.device) -> Objective:
    """Return the objective with the tensors that it holds on the device; on a CPU, and if built in, the same object.

    Reached are attributes of a callable object, arguments of a functools.partial, and what a function closes over or
    has as default values; there in lists, tuples and dicts. Modules move themselves, so they stay who they are.
    """
    if device.type == "cpu" or objective in BUILT_IN.values():
        return objective
    if isinstance(objective, GatheringObjective):
        return GatheringObjective(PlacedObjective(_moved(objective.objective, device)), objective.gather_rows)
    return PlacedObjective(_moved(objective, device))


def _moved(held: Any, device: torch.device) -> Any:
    """Return what holds tensors with these on the device, as a copy if it is no module."""
    if isinstance(held, nn.Module):
        return held.to(device)
    if isinstance(held, functools.partial):
        args, keywords = _tree_moved((held.args, held.keywords), device)
        return functools.partial(_moved(held.func, device), *args, **keywords)
    if isinstance(held, types.MethodType):
        return types.MethodType(held.__func__, _moved(held.__self__, device))
    if isinstance(held, types.FunctionType):
        return _function_moved(held, device)
    if not _holds_tensors(getattr(held, "__dict__", None)):
        return held
    other = copy.copy(held)
    vars(other).update(_tree_moved(vars(held), device))
    return other


def _function_moved(function: types.FunctionType, device: torch.device) -> types.FunctionType:
    cells = function.__closure__ or ()
    held = [_content(cell) for cell in cells]
    if not _holds_tensors([held, function.__defaults__, function.__kwdefaults__]):
        return function
    closure = tuple(
        types.CellType(_tree_moved(content, device)) if _holds_tensors(content) else cell
        for cell, content in zip(cells, held, strict=True)
    )
    defaults, keywords = _tree_moved((function.__defaults__, function.__kwdefaults__), device)
    other = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    other.__kwdefaults__ = keywords
    other.__dict__.update(function.__dict__)
    return other


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the variable is not set yet
        return None


def _is_movable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | nn.Module)


def _holds_tensors(tree: Any) -> bool:
    return tree is not None and tree_any(_is_movable, tree)


def _tree_moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if _is_movable(leaf) else leaf, tree)

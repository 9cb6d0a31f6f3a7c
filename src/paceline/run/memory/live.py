"""The largest tensors that are alive in this process, each with the object that keeps the tensor alive."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.task.models.held import local_of

NODES = 20_000  # of a graph, that are looked through at most
SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class LiveTensors:
    """Tensors of one shape that the same kind of thing holds, and the bytes of all of them together."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}{self.what} {self.dtype} {list(self.shape)}"


def largest_live(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    most: int,
    looks_into_graph: bool,
) -> list[LiveTensors]:
    """Return the `most` groups of tensors on a device that take most memory, the largest first.

    Each storage is counted once, by the first name that it goes by: a weight, a gradient, state of the optimizer, what
    a graph has saved for the backward pass, or what anything else in Python holds. A graph is left out where hooks
    would compute again what it has saved.
    """
    in_python = list(_in_python())
    graph = _saved(each for each in in_python if each.grad_fn is not None) if looks_into_graph else ()
    known: set[int] = set()
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for what, tensor in (*_named(model, optimizer), *graph, *(("tensor", each) for each in in_python)):
        local = local_of(tensor)
        try:
            storage = local.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own
            continue
        if local.device.type == device.type and size and place not in known:
            known.add(place)
            dtype = SHORT.get(local.dtype, str(local.dtype).removeprefix("torch."))
            groups.setdefault((what, dtype, tuple(local.shape)), []).append(size)
    found = [LiveTensors(*key, count=len(sizes), bytes=sum(sizes)) for key, sizes in groups.items()]
    return sorted(found, key=lambda each: (-each.bytes, each.what))[:most]


def _named(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights, gradients and state, by names that those of equal blocks have in common."""
    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters() if model is not None else ():
        names[parameter] = re.sub(r"\b\d+\b", "*", name)
        yield f"weight {names[parameter]}", parameter.detach()
        if parameter.grad is not None:
            yield f"gradient of {names[parameter]}", parameter.grad
    for owner, slots in optimizer.state.items() if optimizer is not None else ():
        for slot, value in slots.items():
            if isinstance(value, torch.Tensor):
                yield f"{slot} of {names.get(owner, 'a parameter')}", value


def _in_python() -> Iterator[torch.Tensor]:
    """Yield the tensors that Python knows, those in the frames of an error included."""
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not isinstance(each, nn.Parameter):
            yield each


def _saved(roots: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the graphs behind some tensors have saved for the backward pass."""
    waiting: list[Any] = [each.grad_fn for each in roots]
    seen: set[object] = set()
    fields: dict[type, list[str]] = {}
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions if before is not None]
        for field in fields.setdefault(type(node), [name for name in dir(node) if name.startswith("_saved_")]):
            try:
                value = getattr(node, field)
            except RuntimeError:  # the backward pass has come by, and what was saved is gone
                continue
            if isinstance(value, torch.Tensor):
                yield f"saved by {type(node).__name__}", value

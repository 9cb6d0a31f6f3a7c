"""What a hook of a callback writes of the state that all ranks train: weights, buffers, optimizer state, settings.

A weight that is changed on one rank alone makes copies apart, and a part of a weight that is changed alone is a model
that no single device would have; neither is known from losses. So the operators that write are noted, each by the
weight and by what it was given but for tensors, and ranks compare the notes after the hook. What numpy writes into
the memory of a tensor is not seen.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.task.models.held import is_spread, local_of

MOST_TOLD = 5  # of the writes, in words; all of them are compared
PLAIN = (bool, int, float, str, type(None))


class WrittenState:
    """Notes what is written from `begin` to `told`. Keeps no model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._weights = [weakref.ref(weight) for weight in model.parameters()]
        self._optimizer: torch.optim.Optimizer | None = None
        self._names: dict[int, str] | None = None  # by the address of their memory; found at the first write
        self._writes: list[str] = []
        self._before: dict[str, object] = {}

    def is_of(self, model: nn.Module) -> bool:
        """Return whether this is the model whose state is watched."""
        return self._model() is model

    def begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note nothing that was written before."""
        self._optimizer, self._names, self._writes = optimizer, None, []
        self._before = self._settings()

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note what an operator that writes is about to write, where that is of the run's state."""
        held, found = self._held(), list[str]()
        for place, name in written_arguments(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            leaves = (value,) if isinstance(value, torch.Tensor) else tree_leaves(value)
            found += [held[at] for leaf in leaves if isinstance(leaf, torch.Tensor) and (at := _address(leaf)) in held]
        if found:
            with_what = [repr(leaf) for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, PLAIN)]
            self._writes += [f"{func.overloadpacket.__name__}({', '.join(with_what)}) of {name}" for name in found]

    def told(self) -> str:
        """Return what was written, in words that differ where it does."""
        after = self._settings()
        changed = (name for name in {**self._before, **after} if self._before.get(name) != after.get(name))
        writes = [*self._writes, *(f"{name} is {after.get(name, 'no more')}" for name in changed)]
        self._optimizer, self._names = None, None
        if not writes:
            return ""
        more = f" and {len(writes) - MOST_TOLD} more ({digest_of(*writes)})" if len(writes) > MOST_TOLD else ""
        return "writes " + ", ".join(writes[:MOST_TOLD]) + more

    def holds(self) -> str:
        """Return a name of the weights that this rank holds: stages of a pipeline hold others."""
        model = self._model()
        return digest_of(*(name for name, _ in model.named_parameters())) if model is not None else ""

    def _held(self) -> Mapping[int, str]:
        if self._names is None:
            tensors = reversed(list(self._tensors()))  # the first name of what has several
            self._names = {_address(tensor): name for name, tensor in tensors if not _has_empty_parts(tensor)}
            self._names.pop(0, None)
        return self._names

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self._model()
        assert model is not None, "a hook has it"
        names: dict[torch.Tensor, str] = {weight: name for name, weight in model.named_parameters()}
        yield from model.named_parameters()
        yield from model.named_buffers()
        for weight, own in self._optimizer.state.items() if self._optimizer is not None else ():
            name = names.get(weight, "a weight")
            for key, value in own.items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", value

    def _settings(self) -> dict[str, object]:
        """Return which weights are trained, and the numbers of the optimizer's groups."""
        trained = [weight is not None and weight.requires_grad for weight in (each() for each in self._weights)]
        found: dict[str, object] = {"requires_grad of the weights": trained}
        for number, group in enumerate(self._optimizer.param_groups if self._optimizer is not None else ()):
            plain = {key: value for key, value in group.items() if isinstance(value, (*PLAIN, tuple))}
            found[f"the optimizer's group {number}"] = plain
        return found


def digest_of(*texts: str) -> str:
    """Return a short name of texts."""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=6).hexdigest()


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return place and name of each argument that an operator of torch writes to."""
    declared = enumerate(func._schema.arguments)
    return tuple((place, each.name) for place, each in declared if each.alias_info and each.alias_info.is_write)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies in memory; 0 where it lies in no one place: sparse ones, and what wraps others."""
    if is_spread(tensor):
        with torch.no_grad():
            tensor = local_of(tensor)
    try:
        return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _has_empty_parts(tensor: torch.Tensor) -> bool:
    """Return whether some rank may hold nothing of a tensor: it writes nothing where the others do."""
    if not is_spread(tensor):
        return False
    from torch.distributed.tensor import Shard

    parts = dict.fromkeys(range(tensor.dim()), 1)
    for axis, place in enumerate(tensor.placements):
        if isinstance(place, Shard):
            parts[place.dim % max(1, tensor.dim())] *= tensor.device_mesh.size(axis)
    return any(math.ceil(tensor.shape[dim] / count) * (count - 1) >= tensor.shape[dim]
               for dim, count in parts.items() if count > 1)  # fmt: skip

"""What a model holds beside weights and buffers: tensors, arrays and numbers in plain attributes of its modules.

Nobody saves them and nobody sends them: they are what the factory makes of them, on every rank and in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError

_OF_TORCH = frozenset(vars(nn.Module()))  # what every module has
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_REAL = (int, float, np.integer, np.floating)
_MANY = (list, tuple, dict, np.ndarray, Tensor)
NO_VALUES = "no values"  # of a tensor on the meta device


def values_beside(model: nn.Module) -> dict[str, str]:
    """Return a digest of each plain attribute that holds tensors, arrays, numbers or texts, by its name.

    Lists and dictionaries of such are digested whole. What is a parameter or a buffer too is left out, and so is an
    object of any other class. A tensor without values has the digest NO_VALUES.
    """
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {name: _digest(value) for name, value in _attributes(model, known)}


def numbers_beside(model: nn.Module) -> dict[str, object]:
    """Return the real numbers that modules hold in plain attributes, by their names."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH and isinstance(value, _REAL) and type(value) is not bool
    }


def refuse_other_values(gathered: list[dict[str, str]]) -> None:
    """Raise ConfigError where ranks hold other tensors or arrays beside their weights; `gathered` is of all ranks."""
    names = dict.fromkeys(name for one in gathered for name in one)
    other = next((name for name in names if len({one.get(name) for one in gathered}) > 1), None)
    if other is None:
        return
    raise ConfigError(
        f"'{other}' of the model is another on every rank",
        "it is neither a parameter nor a buffer, so no rank is sent what rank 0 has: ranks would train other models",
        "register_buffer; or the same seed wherever the model is made, as for a factory that is given as task.model",
    )


def arrays_beside(model: nn.Module) -> dict[str, str]:
    """Return the digests of plain attributes that hold several values: a single number may well be a rank's own."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {name: _digest(value) for name, value in _attributes(model, known) if isinstance(value, _MANY)}


def _attributes(model: nn.Module, known: set[int]) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH and _is_plain(value, known):
                yield f"{path}.{name}".lstrip("."), value


def _is_plain(value: object, known: set[int]) -> bool:
    """Return whether a value is made of plain ones alone, of which one at least is no weight.

    A tensor with a graph is computed of weights and has their values: hooks make it anew in each pass.
    """
    if isinstance(value, Tensor):
        return id(value) not in known and value.layout == torch.strided and value.is_leaf
    if isinstance(value, np.ndarray):
        return value.dtype != object
    if isinstance(value, list | tuple):
        return all(_is_plain(one, known) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(one, known) for key, one in value.items())
    return isinstance(value, _PLAIN)


def _digest(value: object) -> str:
    whole = hashlib.blake2b(digest_size=16)
    parts = list(_parts(value))
    for part in parts:
        whole.update(part)
    return NO_VALUES if NO_VALUES.encode() in parts else whole.hexdigest()


def _parts(value: object) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield NO_VALUES.encode() if value.is_meta else _bytes(value)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}".encode() + value.tobytes()
    elif isinstance(value, list | tuple):
        yield f"{len(value)} of".encode()
        for one in value:
            yield from _parts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield repr(key).encode()
            yield from _parts(one)
    else:
        yield repr(value).encode()


def _bytes(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    real = torch.view_as_real(plain).reshape(-1) if plain.is_complex() else plain
    return real.view(torch.uint8).numpy().tobytes()

"""A look at a program: which dimension of each random tensor counts samples.

The objective runs twice without gradients, on two samples and on three. What grows with them belongs to them; what
does not is shared by all. No shape alone could tell: with one sample, or where two lengths are equal, all look alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.shares import Pattern, SampleRows, Share
from paceline.run.numerics.randomness.sites import Site, site_of_caller, where
from paceline.task.reading import tried_reading

FEW, MORE = 2, 3  # samples of the two looks


class _Observer(SampleRandomness):
    """Notes the shapes of random tensors by site, whatever they are, and what is drawn past it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(0, device, Survey())
        self.shapes: dict[Site, list[tuple[int, ...]]] = {}
        self.strays: dict[str, str] = {}
        self.modules: set[type] = set()

    def stray(self, name: str, because: str) -> None:
        self.strays.setdefault(name, because)

    def _share(self, shape: tuple[int, ...], device: torch.device) -> Share:
        modules: list[Any] = []
        site = site_of_caller(modules.append)
        self.shapes.setdefault(site, []).append(shape)
        self.modules.update(type(module) for module in modules if isinstance(module, nn.Module))
        if modules == [None]:
            self.stray(where(site), "a function that is run again in the backward pass, and no module in it, draws")
        return Share(None, shape, None)


def survey(model: nn.Module, objective: Callable[[nn.Module, Any], Any], batch: Any, device: torch.device) -> Survey:
    """Return what two looks at `objective(model, batch)` tell of its random numbers; only one, where it draws none.

    The first dimension of the batch's tensors counts samples. Buffers and random states are left as they were. A
    program that cannot take two samples is not looked at: shapes alone must then tell.
    """
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            few, unread = tried_reading(objective, lambda what: _look(model, what, batch, device, FEW))
            more = _look(model, objective, batch, device, MORE) if few.shapes else few
    except Exception:  # whatever a program says to other samples than its own: its first step will say it again
        return Survey()
    finally:
        with torch.no_grad():
            for module, name, buffer, kept in buffers:
                setattr(module, name, buffer.copy_(kept))
            for parameter, grad in grads:  # an objective may go backward itself
                parameter.grad = grad
    return replace(_concluded(few, more, length_of(batch)), unread=unread)


def survey_all(
    model: nn.Module, objectives: Iterable[Callable[[nn.Module, Any], Any]], batch: Any, device: torch.device
) -> Survey:
    """Return what looks at several objectives of one model tell together."""
    found = [survey(model, objective, batch, device) for objective in objectives]
    sites = dict.fromkeys(site for one in found for site in one.patterns)
    patterns = {site: tuple(dict.fromkeys(p for one in found for p in one.patterns.get(site, ()))) for site in sites}
    strays = dict.fromkeys(stray for one in found for stray in one.strays)
    modules = dict.fromkeys(kind for one in found for kind in one.modules)
    unread = [name for name in found[0].unread if all(name in one.unread for one in found)]
    return Survey(patterns, tuple(strays), tuple(modules), tuple(unread))


def _look(model: nn.Module, objective: Any, batch: Any, device: torch.device, count: int) -> _Observer:
    observer = _Observer(device)
    others = _other_states()
    with observer.during(SampleRows(np.arange(count), 0)):
        objective(model, repeated(batch, count))
    for name, state in _other_states().items():
        if state != others[name]:
            observer.stray(name, "its numbers are not torch's")
    return observer


def _other_states() -> dict[str, Any]:
    """Return where random numbers stand that are not torch's."""
    state: Any = np.random.get_state()
    return {"Python's module random": random.getstate(), "numpy.random": (state[1].tobytes(), state[2])}


def repeated(batch: Any, count: int) -> Any:
    """Return a batch of `count` samples: the first one again and again."""
    rows = rows_of_batch(batch)
    return tree_map(
        lambda leaf: (
            leaf[:1].expand(count, *leaf.shape[1:]).clone()
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
            else leaf
        ),
        batch,
    )


def rows_of_batch(batch: Any) -> int:
    """Return the rows of a batch: the first dimension of its tensors."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def length_of(batch: Any) -> int | None:
    """Return the second dimension of a batch's first tensor that has one."""
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1)
    return next((leaf.shape[1] for leaf in leaves), None)


def _concluded(few: _Observer, more: _Observer, length: int | None) -> Survey:
    patterns: dict[Site, tuple[Pattern, ...]] = {}
    strays = {**few.strays, **more.strays}
    for site in few.shapes | more.shapes:
        pairs = few.shapes.get(site, []), more.shapes.get(site, [])
        if len(pairs[0]) != len(pairs[1]):
            strays[where(site)] = "how often it draws depends on how many samples there are"
            continue
        found = [_pattern(one, other, length) for one, other in zip(*pairs, strict=True)]
        if None in found:
            at = found.index(None)
            strays[where(site)] = (
                f"a random tensor of shape {list(pairs[0][at])} for {FEW} samples is {list(pairs[1][at])} for {MORE}"
            )
        patterns[site] = tuple(dict.fromkeys(pattern for pattern in found if pattern is not None))
    modules = sorted(few.modules | more.modules, key=lambda kind: kind.__qualname__)
    return Survey(patterns, tuple(f"{name}: {because}" for name, because in strays.items()), tuple(modules))


def _pattern(few: tuple[int, ...], more: tuple[int, ...], length: int | None) -> Pattern | None:
    """Return the pattern of which these are instances for two samples and for three, None if there is none."""
    if len(few) != len(more):
        return None
    grown = [dim for dim, (one, other) in enumerate(zip(few, more, strict=True)) if one != other]
    if not grown:
        return Pattern(few, FEW, None, length)
    if len(grown) > 1 or few[grown[0]] * MORE != more[grown[0]] * FEW:
        return None
    return Pattern(few, FEW, grown[0], length)

"""Nested arguments: what torch's pytree does, by a short way for what they mostly are.

A step passes through its batch, and through the inputs and outputs of every unit of the model. Nearly all of them are
tensors and None in tuples and dictionaries. torch's pytree makes a specification of each tree first, which takes longer
than a small unit's products. What is not of these plain types goes torch's way: named tuples, dictionaries and
tensors of classes of their own, records, and whatever a program has registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

# Of exactly these types: torch takes each for a leaf, and nobody can register one otherwise.
LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


def each_leaf(made: Callable[[Any], object], tree: Any) -> Any:
    """Return nested arguments with what is made of each leaf in its place, as `tree_map` of torch's pytree does."""
    kind = type(tree)
    if kind in LEAVES:
        return made(tree)
    if kind is tuple:
        return tuple([each_leaf(made, part) for part in tree])
    if kind is dict:
        return {key: each_leaf(made, part) for key, part in tree.items()}
    if kind is list:
        return [each_leaf(made, part) for part in tree]
    return tree_map(made, tree)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of nested arguments in their order, as `tree_leaves` of torch's pytree does."""
    kind = type(tree)
    if kind in LEAVES:
        return [tree]
    if kind is dict:
        return [leaf for part in tree.values() for leaf in leaves_of(part)]
    if kind is tuple or kind is list:
        return [leaf for part in tree for leaf in leaves_of(part)]
    return tree_leaves(tree)

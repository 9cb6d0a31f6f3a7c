"""Nested arguments by the short way are what torch's pytree makes of them, containers and order included."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from paceline.run.numerics.nested import each_leaf, leaves_of

Pair = namedtuple("Pair", "left right")


class Own(dict):  # type: ignore[type-arg]
    """A dictionary that torch does not know."""


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


class Box:
    """A container that a program has made known to torch."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and other.inside == self.inside

    def __repr__(self) -> str:
        return f"Box({self.inside})"


register_pytree_node(Box, lambda box: ([box.inside], None), lambda parts, _: Box(next(iter(parts))))

TREES: list[Any] = [
    None, 3, 2.5, True, "text", b"bytes", (), [], {}, ((), [{}]),
    (1, [2, {"b": 3, "a": (4, None)}], Pair(5, [6])),
    {"z": 1, "a": {2: 3, (1, 2): 4}},
    OrderedDict(z=1, a=[2]), defaultdict(list, z=1, a=(2,)), deque([1, (2, 3)], maxlen=4),
    [Box((1, {"x": 2})), {"in": Box(Own(x=1))}], torch.Size([2, 3]), range(3), {1, 2}, slice(1, 2), torch.float32,
    torch.return_types.max((torch.ones(1), torch.zeros(1))),
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=[repr(tree)[:40] for tree in TREES])
def test_trees_are_torchs(tree: object) -> None:
    ours, theirs = each_leaf(lambda leaf: ("made", leaf), tree), tree_map(lambda leaf: ("made", leaf), tree)
    assert type(ours) is type(theirs) and ours == theirs and repr(ours) == repr(theirs)
    assert repr(leaves_of(tree)) == repr(tree_leaves(tree))
    assert each_leaf(lambda leaf: leaf, tree) == tree


def test_containers_are_new_and_tensors_of_all_classes_are_leaves() -> None:
    tensors = [
        torch.ones(1),
        nn.Parameter(torch.ones(1)),
        torch.ones(1).as_subclass(Tagged),
        torch.ones(1, device="meta"),
    ]
    given = {"batch": tensors, "more": (tensors[0],)}
    found = each_leaf(lambda leaf: leaf, given)
    assert found is not given and found["batch"] is not tensors
    assert [id(leaf) for leaf in leaves_of(found)] == [id(leaf) for leaf in tree_leaves(given)]

"""Which of a step's candidates are trained on, and with which weights: written from the definition.

Candidate i of K has the chance pi_i = min(1, c (even / K + (1 - even) |l_i| / sum |l|)), with the c for which the
chances add up to n. With the chances end to end on a line, those are drawn that hold one of the points u, u + 1, ...;
the loss of each counts (items of those drawn) / (items of all) / pi_i times. Losses are the objective's on a candidate
alone, in evaluation mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.spec.steps.selection import LARGEST, SelectionSpec
from paceline.task.models.build import evaluating


@dataclass(frozen=True)
class Selected:
    """What a step trains on: places among its candidates, rising, and the weight of each one's loss.

    `loss` is the mean over all candidates per item, before the update.
    """

    places: tuple[int, ...]
    weights: tuple[float, ...]
    loss: float


@torch.no_grad()
def selected(
    spec: SelectionSpec, count: int, start: float, model: nn.Module, scores: Sequence[Callable[[], tuple[float, float]]]
) -> Selected:
    """Return the `count` candidates of a step. `scores` give loss sum and items of each; `start` is u, from 0 to 1."""
    with evaluating(model):
        found = [score() for score in scores]
    losses, items = [loss for loss, _ in found], [item for _, item in found]
    mean = sum(losses) / sum(items)
    if spec.by == LARGEST:
        each = [loss / item if item else 0.0 for loss, item in found]
        order = sorted(range(len(each)), key=lambda at: (-each[at], at))[:count]
        return Selected(tuple(sorted(order)), (1.0,) * count, mean)
    chances = chances_of(losses, count, spec.even)
    places = drawn(chances, start)
    share = sum(items[at] for at in places) / sum(items)
    return Selected(tuple(places), tuple(share / chances[at] for at in places), mean)


def chances_of(losses: Sequence[float], count: int, even: float) -> list[float]:
    """Return the chance of each candidate, of which `count` are drawn. Losses that are no numbers have even chances."""
    total = sum(abs(loss) for loss in losses)
    if not 0 < total < math.inf:
        return [count / len(losses)] * len(losses)
    parts = [even / len(losses) + (1 - even) * abs(loss) / total for loss in losses]
    falling = sorted(parts, reverse=True)
    for certain in range(count):  # so many of the largest are drawn for sure, and the others share the rest
        scale = (count - certain) / sum(falling[certain:])
        if scale * falling[certain] <= 1:
            break
    return [min(1.0, scale * part) for part in parts]


def drawn(chances: Sequence[float], start: float) -> list[int]:
    """Return the candidates that hold one of the points `start`, `start` + 1, ... of the line of chances."""
    ends = [0.0, *itertools.accumulate(chances)]
    ends[-1] = float(round(ends[-1]))
    points = [math.ceil(end - start) for end in ends]  # before each end
    return [at for at in range(len(chances)) if points[at + 1] > points[at]]

"""How full the batches of plans are, where rows differ in length: read off what was counted of some ranks and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plan.cost.columns import Floats, Ints
from paceline.spec.profile import Fill

PARTS = ("tokens", "pairs", "passes")


def fullness(fills: Sequence[Fill], ranks: Ints, micro_batch: Ints) -> dict[str, Floats]:
    """Return the parts of a Fill of plans with so many data ranks and such micro-batches: 1 where nothing was counted.

    Between two micro-batches that were counted a part is read off a line over their logarithms, and so between two
    numbers of ranks; beyond the first and the last it stays as it is there.
    """
    found = {part: np.ones(len(ranks)) for part in PARTS}
    known = sorted({each.ranks for each in fills})
    for count in np.unique(ranks).tolist() if known else ():
        here = ranks == count
        below = max([each for each in known if each <= count], default=known[0])
        above = min([each for each in known if each >= count], default=known[-1])
        share = np.log2(count / below) / np.log2(above / below) if above > below else 0.0
        for part in PARTS:
            if any(getattr(each, part) is None for each in fills):
                continue  # as planned
            low, high = (_at(fills, part, each, micro_batch[here]) for each in (below, above))
            found[part][here] = low + share * (high - low)
    return found


def _at(fills: Sequence[Fill], part: str, ranks: int, micro_batch: Ints) -> Floats:
    counted = [each for each in fills if each.ranks == ranks]
    sizes = np.log2([each.micro_batch for each in counted])
    return np.interp(np.log2(micro_batch), sizes, [getattr(each, part) for each in counted])

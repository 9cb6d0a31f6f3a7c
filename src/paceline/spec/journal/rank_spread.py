"""RankSpread: how one quantity is spread over the ranks: least, median and most, with the ranks that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.spec.journal.record import number


@dataclass(frozen=True)
class RankSpread:
    """The least, the median and the most of one quantity over the ranks, and the lowest rank that has the most."""

    least: float
    median: float
    most: float
    rank: int

    @classmethod
    def read(cls, values: object) -> RankSpread | None:
        """Return the spread that a record says, as `told` has written it; None where it says none in numbers."""
        if not isinstance(values, Mapping):
            return None
        least, median, most = (number(values.get(name)) for name in ("min", "median", "max"))
        if least is None or median is None or most is None or not all(map(math.isfinite, (least, median, most))):
            return None
        return cls(least, median, most, int(number(values.get("rank")) or 0))

    def told(self) -> dict[str, float]:
        """Return what a record says of it."""
        return {"min": self.least, "median": self.median, "max": self.most, "rank": self.rank}

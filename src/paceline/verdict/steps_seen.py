"""StepsSeen: where a run's steps spent their time, on all ranks, read from the run's journal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.spec.journal.kinds import RanksRecord
from paceline.spec.journal.rank_spread import RankSpread


@dataclass(frozen=True)
class StepsSeen:
    """Means of one step over all ranks, in seconds; `ready` is a share of the batches. What is not known is absent.

    `steps` is how many steps they are of, `ranks` how many ranks there were. `whole` is False where rank 0 alone is
    known: of the others nothing is on record.
    """

    spreads: Mapping[str, RankSpread]
    steps: int
    ranks: int
    device: str
    whole: bool = True

    @property
    def step_seconds(self) -> float:
        """How long a step takes."""
        return self.most("total")

    @property
    def whole_seconds(self) -> float:
        """How long a step takes with what lies between two steps.

        Of an older journal the longest parts of all ranks are added up, which may be those of different ranks.
        """
        if self.knows("whole"):
            return self.most("whole")
        return self.step_seconds + self.most("saving") + self.most("evaluating") + self.most("between")

    def most(self, name: str) -> float:
        """Return the most that a rank spends in something; 0 where it is not known."""
        return self.spreads[name].most if name in self.spreads else 0.0

    def least(self, name: str) -> float:
        """Return the least that a rank spends in something; 0 where it is not known."""
        return self.spreads[name].least if name in self.spreads else 0.0

    def knows(self, *names: str) -> bool:
        """Return whether all of these are on record."""
        return all(name in self.spreads for name in names)


def seen_of(told: Sequence[RanksRecord], rank_0: Mapping[str, float], steps: int, ranks: int) -> StepsSeen | None:
    """Return where the steps of one start spent their time; None where no step is on record.

    `told` are its records of all ranks. Where there are none, what is known are rank 0's own means, `rank_0`, of so
    many steps of so many ranks.
    """
    return _of_ranks(told) or _of_rank_0(rank_0, steps, ranks)


def _of_ranks(told: Sequence[RanksRecord]) -> StepsSeen | None:
    """Return the means of the newest world that the records know: one of as many ranks as the last."""
    known = [each for each in told if each.steps and each.ranks == told[-1].ranks]
    if not known:
        return None
    weights = [float(each.steps or 0) for each in known]
    spreads = {}
    for name in known[-1].spreads:
        parts = [(each.spread(name), weight) for each, weight in zip(known, weights, strict=True)]
        found = [(spread, weight) for spread, weight in parts if spread is not None]
        if found:
            spreads[name] = _mean(found)
    if "total" not in spreads or spreads["total"].most <= 0:
        return None
    return StepsSeen(spreads, int(sum(weights)), known[-1].ranks or 1, known[-1].device)


def _mean(found: list[tuple[RankSpread, float]]) -> RankSpread:
    """Return the mean over the records, each by its steps; the rank is that of the highest."""
    weight = sum(own for _, own in found)
    return RankSpread(
        least=sum(each.least * own for each, own in found) / weight,
        median=sum(each.median * own for each, own in found) / weight,
        most=sum(each.most * own for each, own in found) / weight,
        rank=max(found, key=lambda pair: pair[0].most)[0].rank,
    )


def _of_rank_0(means: Mapping[str, float], steps: int, ranks: int) -> StepsSeen | None:
    known = {name: value for name, value in means.items() if math.isfinite(value)}
    if not steps or not known.get("total", 0.0) > 0:
        return None
    spreads = {name: RankSpread(value, value, value, rank=0) for name, value in known.items()}
    return StepsSeen(spreads, steps, ranks, "cpu" if "waiting" in known else "cuda", whole=ranks == 1)

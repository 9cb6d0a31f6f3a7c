"""Which checkpoints of a folder stay: the newest ones, for a time, and those of the best evaluation."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manifest import Manifest

# In a manifest's `extra`, of an evaluation of the very weights: its "step" and "loss", and the "score" by the "metric"
# that says which is the best. Less of a score is better; without one it is the loss.
HELD_OUT = "held_out"


@dataclass(frozen=True)
class Retention:
    """The `last` newest stay, for `seconds` where that is said; and the `best` of those that were evaluated.

    The newest one always stays.
    """

    last: int
    seconds: float | None = None
    best: int = 0

    def doomed(self, newest_first: Sequence[tuple[Path, Manifest]], now: datetime.datetime) -> list[Path]:
        """Return the checkpoints that go."""
        kept = {path for path, manifest in newest_first[: self.last] if not self._is_old(manifest, now)}
        kept |= {path for path, _ in newest_first[:1]}
        best = best_first([manifest for _, manifest in newest_first])[: self.best]
        kept |= {newest_first[place][0] for place in best}
        return [path for path, _ in newest_first if path not in kept]

    def _is_old(self, manifest: Manifest, now: datetime.datetime) -> bool:
        if self.seconds is None:
            return False
        try:
            made = datetime.datetime.fromisoformat(manifest.created)
            return (now - made).total_seconds() > self.seconds
        except (ValueError, TypeError):  # no time, or one without a zone: nobody knows its age
            return False


def best_first(newest_first: Sequence[Manifest]) -> list[int]:
    """Return the places of the checkpoints that were evaluated, the best one first, of equal ones the newest.

    They are compared by the metric of the newest of them: numbers of another metric say nothing.
    """
    evaluated = [(place, manifest.extra.get(HELD_OUT)) for place, manifest in enumerate(newest_first)]
    known = [(place, found) for place, found in evaluated if isinstance(found, dict)]
    metric = known[0][1].get("metric") if known else None
    scores = [(_score(found), place) for place, found in known if found.get("metric") == metric]
    return [place for score, place in sorted(scores) if math.isfinite(score)]


def _score(held_out: dict[str, object]) -> float:
    """Return the score of an evaluation, infinite where it is not known."""
    score = held_out.get("score", held_out.get("loss"))
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else math.inf

"""Which checkpoints of a folder stay: the newest ones, for a time, and those of the least held-out loss."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manifest import Manifest

HELD_OUT = "held_out"  # in a manifest's `extra`: {"step", "loss"} of an evaluation of the very weights


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
        losses = sorted((held_out_loss(manifest), number) for number, (_, manifest) in enumerate(newest_first))
        kept |= {newest_first[number][0] for loss, number in losses[: self.best] if math.isfinite(loss)}
        return [path for path, _ in newest_first if path not in kept]

    def _is_old(self, manifest: Manifest, now: datetime.datetime) -> bool:
        if self.seconds is None:
            return False
        try:
            made = datetime.datetime.fromisoformat(manifest.created)
            return (now - made).total_seconds() > self.seconds
        except (ValueError, TypeError):  # no time, or one without a zone: nobody knows its age
            return False


def held_out_loss(manifest: Manifest) -> float:
    """Return the held-out loss of a checkpoint's weights, infinite where it is not known."""
    held_out = manifest.extra.get(HELD_OUT)
    loss = held_out.get("loss") if isinstance(held_out, dict) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf

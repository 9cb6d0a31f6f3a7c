"""CheckpointsSpec: the `[run.checkpoints]` table of a spec. How checkpoints are written and kept."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.fields import option


@dataclass(frozen=True)
class CheckpointsSpec:
    """How a run saves: beside training or while it waits, and for how long it goes on without."""

    asynchronous: str = option(
        "auto",
        "write checkpoints beside training, which then waits only for a copy to host memory"
        " (auto: where that has room for the copy)",
        choices=("auto", "on", "off"),
    )
    hanging_after: float = option(
        600.0,
        "a save that takes longer counts as hanging: training goes on without it, and the process ends without it",
        quantity="duration",
        above=0.0,
    )
    most_failures: int = option(
        5,
        "saves in a row that may fail before the run stops with exit code 75 (74 where it has no checkpoint)",
        minimum=1,
    )

"""Selection during training: of a step's candidates some are trained on, by their losses at the step's own weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError

NOTHING, LOSS, LARGEST = "nothing", "loss", "largest"


@dataclass(frozen=True)
class SelectionSpec(Declared, table="task.selection"):
    """The `[task.selection]` table: whether a step reads more samples than it trains on, and which it chooses."""

    by: str = option(
        NOTHING,
        "which of a step's candidates are trained on: all (nothing); as many as the global batch has, drawn by their"
        " losses and weighted so that the expected gradient is that of all candidates (loss); or those of the largest"
        " loss, unweighted, which is another objective (largest)",
        choices=(NOTHING, LOSS, LARGEST),
    )
    candidates: int = option(4, "candidates that are read and scored for each sample that is trained on", minimum=2)
    even: float = option(
        0.2,
        "loss: the part of the chance to be drawn that is the same for every candidate; the inverse bounds the weights",
        above=0.0,
        maximum=1.0,
    )

    @property
    def selects(self) -> bool:
        """Whether a step chooses among candidates at all."""
        return self.by != NOTHING

    @property
    def scored(self) -> int:
        """How many candidates are scored for each sample that is trained on; 0 where none are."""
        return self.candidates if self.selects else 0

    def candidates_of(self, samples: int) -> int:
        """Return how many samples a step reads that trains on so many."""
        return samples * self.candidates if self.selects else samples


def check_selection(task: Any) -> None:
    """Raise ConfigError where a task's selection meets what would make candidates or objectives another number."""
    if not task.selection.selects:
        return
    met = {
        "task.turns": bool(task.turns),
        f"task.growth.by = '{task.growth.by}'": task.growth.grows,
        f"task.batch_rows = '{task.batch_rows}'": task.batch_rows != "fixed",
    }
    for what in (what for what, is_met in met.items() if is_met):
        raise ConfigError(
            f"task.selection.by = '{task.selection.by}' with {what}",
            "candidates are scored by one objective, and are so many times the global batch",
            'task.selection.by = "nothing", or the other one left out',
        )

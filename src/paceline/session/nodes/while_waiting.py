"""What ends a run while its nodes are waited for: no rank is there then that would look for notices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.run.survive.budget import RunBudgets, budget_of
from paceline.run.survive.notice import Notices
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.run import RunSpec


@contextlib.contextmanager
def looked_for(
    run: RunSpec, run_dir: Path, planned: PlannedRecord | None = None, devices: int = 0
) -> Iterator[Callable[[], str]]:
    """Look for the notices of this machine, the end of the hours and that of the budget while a block runs.

    Yields what returns why the run is to end, or "". `planned` is what was recorded of the world that was lost, and
    `devices` how many of it are held while others are waited for; a run that was not planned yet has no price, so its
    budgets say nothing. Limits of time and money are counted elsewhere (`SpentSoFar`).
    """
    budgets: RunBudgets | None = budget_of(run, run_dir, planned, devices) if planned is not None else None
    notices = Notices(run)
    notices.enter(math.nan, is_first=True, budget=budgets)
    try:
        yield notices.look
    finally:
        notices.close()

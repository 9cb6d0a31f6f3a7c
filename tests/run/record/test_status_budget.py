"""The status line says what the rest of a budget buys: steps, and the loss that they lead to."""

from __future__ import annotations

import io
from typing import Any

from paceline.run.record.status import StatusLine
from paceline.spec.journal.kinds import StepRecord


class ABrief:
    """What a status line reads of a run's brief."""

    steps, redraws, unit = 10_000, False, "tokens"
    step_seconds, peak_flops, model_flops_per_step, usd_per_second = 1.0, float("inf"), 0.0, float("inf")

    @staticmethod
    def items_of_step(samples: int, weight: float) -> float:
        """As a brief without a forecast has it."""
        return weight


def lines_of(steps_left: Any, steps: int) -> list[str]:
    stream, brief = io.StringIO(), ABrief()
    status = StatusLine(brief, 50, steps_left, stream)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        status.write(StepRecord(step, step, step + 1, 2 + 3 * step**-0.5, 10.0, 1.0, 1e-3, {"total": 1.0}, 10.0, 0))
    return stream.getvalue().splitlines()


def test_a_budget_is_in_the_line_with_a_loss_as_soon_as_the_curve_bears_it() -> None:
    early, *_, late = lines_of(lambda: 500.0, 500)
    assert early.endswith("budget buys 500 steps"), "one step foretells nothing"
    assert "budget buys 500 steps, to a loss of about 2.09 (" in late or "a loss of about 2.1 (" in late


def test_without_a_budget_nothing_is_said_of_one() -> None:
    assert not [line for line in lines_of(lambda: None, 300) if "budget" in line]

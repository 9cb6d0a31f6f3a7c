"""The status line says what the rest of a budget buys, what bounds the steps that it is of, and how losses went."""

from __future__ import annotations

import io
from typing import Any

from paceline.run.record.status import KEPT, Outline, StatusLine, sparkline
from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import StepRecord


class ABrief:
    """What a status line reads of a run's brief."""

    steps, redraws, unit = 10_000, False, "tokens"
    step_seconds, peak_flops, model_flops_per_step, usd_per_second = 1.0, float("inf"), 0.0, float("inf")

    @staticmethod
    def items_of_step(samples: int, weight: float) -> float:
        """As a brief without a forecast has it."""
        return weight


def a_step(step: int) -> StepRecord:
    return StepRecord(step, step, step + 1, 2 + 3 * step**-0.5, 10.0, 1.0, 1e-3, {"total": 1.0}, 10.0, 0)


def lines_of(steps_left: Any, steps: int) -> list[str]:
    stream, brief = io.StringIO(), ABrief()
    status = StatusLine(brief, 50, steps_left, stream)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        status.write(a_step(step))
    return stream.getvalue().splitlines()


def test_a_budget_is_in_the_line_with_a_loss_as_soon_as_the_curve_bears_it() -> None:
    early, *_, late = lines_of(lambda: 500.0, 500)
    assert early.endswith("budget buys 500 steps"), "one step foretells nothing"
    assert "budget buys 500 steps, to a loss of about 2.09 (" in late or "a loss of about 2.1 (" in late


def test_what_bounds_steps_is_said_as_long_as_it_was_looked_at() -> None:
    """`host-bound 53%` of the first nine steps stood in the lines of the ninety after them."""
    stream = io.StringIO()
    status = StatusLine(ABrief(), 10, stream=stream)  # type: ignore[arg-type]
    for step in range(1, 151):
        status.write(a_step(step))
        if step in (10, 100):
            told = {10: ("host", {"host": 0.53}, 9), 100: ("compute", {}, 90)}[step]
            status.write(VerdictRecord(step, told[0], step == 100, "", told[1], (), "", "", 1.0, told[2]))
    lines = {int(line.split()[1].partition("/")[0]): line for line in stream.getvalue().splitlines()}
    said = {step: "host-bound 53%" in line for step, line in lines.items() if step <= 100}
    assert [step for step, is_said in said.items() if is_said] == [20]
    assert ["compute-bound, healthy" in lines[step] for step in (100, 110, 150)] == [False, True, True]


def test_a_line_costs_as_much_after_a_million_steps_as_after_a_thousand() -> None:
    outline, values = Outline(), [3 + 1e5 / (1e5 + at) for at in range(10_000)]
    for value in values:
        outline.add(value)
        outline.add(float("nan"))
    assert len(outline.values()) <= 2 * KEPT and sparkline(outline.values()) == sparkline(values)
    few = Outline()
    for value in (1.0, 2.0, 3.0):
        few.add(value)
    assert few.values() == [1.0, 2.0, 3.0] and Outline().values() == []


def test_without_a_budget_nothing_is_said_of_one() -> None:
    assert not [line for line in lines_of(lambda: None, 300) if "budget" in line]

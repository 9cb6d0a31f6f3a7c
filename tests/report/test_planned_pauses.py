"""A pause that was planned is no interruption: in words, in phases, in goodput, on the live page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_journals import write

from paceline.account.timeline import held_devices
from paceline.history.goodput import goodput_text
from paceline.history.phases import BETWEEN, PAUSED
from paceline.history.records import gather
from paceline.observe.live.run import LiveRun
from paceline.observe.live.spent import spent_so_far
from paceline.report.html import render_html
from paceline.report.summary import summarise

BEGAN = 1_000_000.0
NIGHT = 36_000.0


def paused(moved: float = 0.0, late: float = 0.0, **end: Any) -> list[dict[str, Any]]:
    """Ten steps of a second, a pause until `NIGHT` and, where it is late, longer; and ten more.

    The clock is set by `moved` after the fifth step.
    """
    lines: list[dict[str, Any]] = []
    for attempt, begins, first in ((1, 0.0, 1), (2, NIGHT + late, 11)):
        began = BEGAN + begins + (moved if attempt == 2 else 0.0)
        lines.append({"kind": "run_started", "attempt": attempt, "time": began, "world_size": 1, "step": first - 1})
        for number in range(10):
            if attempt == 1 and number == 5 and moved:
                began += moved
                lines.append({"kind": "clock", "attempt": 1, "time": began + number, "moved": moved})
            lines.append({"kind": "step", "attempt": attempt, "step": first + number, "time": began + number + 1,
                          "loss": 1.0, "weight": 1.0, "seconds": {"total": 1.0, "data": 0.0}})  # fmt: skip
        if attempt == 1 and end:
            end = {name: value + moved if name == "goes_on" else value for name, value in end.items()}
            lines.append({"kind": "run_ended", "attempt": 1, "time": began + 10, **end})
    return [*lines, {"kind": "run_ended", "attempt": 2, "time": began + 10, "status": "complete", "exit_code": 0}]


@pytest.mark.parametrize("moved", [0.0, 7200.0, -7200.0])
@pytest.mark.parametrize(
    ("end", "late", "between", "pause"),
    [
        ({"status": "requeue", "exit_code": 75, "goes_on": BEGAN + NIGHT}, 0.0, 0.0, NIGHT - 10),
        ({"status": "requeue", "exit_code": 75, "goes_on": BEGAN + NIGHT}, 600.0, 600.0, NIGHT - 10),
        ({"status": "complete", "exit_code": 0}, 0.0, 0.0, NIGHT - 10),
        ({"status": "stopped", "exit_code": 0}, 0.0, 0.0, NIGHT - 10),
        ({"status": "requeue", "exit_code": 75}, 0.0, NIGHT - 10, 0.0),
        ({"status": "failed", "exit_code": 1}, 0.0, NIGHT - 10, 0.0),
        ({}, 0.0, NIGHT - 10, 0.0),
    ],
)  # fmt: skip
def test_who_asked_for_a_pause_is_not_interrupted(
    tmp_path: Path, end: dict[str, Any], late: float, between: float, pause: float, moved: float
) -> None:
    lines = paused(moved, late, **end)
    found = summarise(lines)
    phases = {phase.kind: phase.seconds for phase in found.phases}
    assert phases.get(BETWEEN, 0.0) == pytest.approx(between, abs=1e-6)
    assert phases.get(PAUSED, 0.0) == pytest.approx(pause, abs=1e-6)
    page = render_html(found)
    assert ("Interruptions cost" in page) is (between > 0) and ("Planned pauses took" in page) is (pause > 0)
    assert (found.goodput.wall_seconds, found.goodput.paused_seconds) == pytest.approx((20 + between, pause))
    assert ("planned pauses" in goodput_text(found.goodput)) is (pause > 0)
    live = LiveRun(write(tmp_path / "run", lines))
    live.refresh()
    hours = sum(held.seconds for held in held_devices(gather(lines))) / 3600
    assert [each.spent for each in spent_so_far(live) if each.name == "device_hours"] == [pytest.approx(hours)]
    seen = {phase.kind: phase.seconds for phase in live.phases()}
    assert {kind: seen.get(kind, 0.0) for kind in (BETWEEN, PAUSED)} == pytest.approx(
        {kind: phases.get(kind, 0.0) for kind in (BETWEEN, PAUSED)}
    )

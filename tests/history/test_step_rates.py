"""A step's rate is of all tokens that it computed, also where an older version wrote that of its loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.history.rates import forecast_items
from paceline.history.records import gather
from paceline.observe.live.run import LiveRun
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import read

ROW, BATCH = 128, 16  # tokens of a row, rows of a step
ANSWERED = 300.0  # tokens of a step that its loss counts


def start(attempt: int = 1, task: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    forecast = {"tokens_per_second": ROW * BATCH / 0.5, "step_seconds": {"value": 0.5}}
    return {"kind": "run_started", "time": 10.0 * attempt, "attempt": attempt, "world_size": 1, "spec": {"task": task},
            "plan": {"batch_samples": BATCH}, "facts": {"unit": "tokens"}, "forecast": forecast, **changes}  # fmt: skip


def step(rate: object, attempt: int = 1, number: int = 1, samples: int = BATCH, seconds: float = 2.0) -> dict[str, Any]:
    return {"kind": "step", "time": 10.0 * attempt + number, "attempt": attempt, "step": number, "loss": 1.0,
            "position_before": 0, "position_after": samples, "weight": ANSWERED, "tokens_per_second": rate,
            "seconds": {"total": seconds}}  # fmt: skip


@pytest.mark.parametrize(
    ("begun", "made", "rate"),
    [
        (start(), step(ANSWERED / 2), ROW * BATCH / 2),  # of a version before
        (start(), step(ROW * BATCH / 2), ROW * BATCH / 2),  # of now
        (start(), step(ANSWERED / 2, samples=4), ROW * 4 / 2),  # a last step, or a batch that grows
        (start(task={"batch_rows": "by_length"}), step(ANSWERED / 2, samples=40), ROW * BATCH / 2),
        (start(task={"selection": {"by": "loss"}}), step(ANSWERED / 2), ANSWERED / 2),  # how many it read is not known
        (start(facts={"unit": "samples"}), step(ANSWERED / 2), ANSWERED / 2),
        (start(forecast={}), step(ANSWERED / 2), ANSWERED / 2),
        (start(), step(ANSWERED / 2, seconds=0.0), ANSWERED / 2),
        (start(), step("much"), None),
    ],
)
def test_a_rate_of_the_loss_is_read_as_one_of_all_tokens(
    begun: dict[str, Any], made: dict[str, Any], rate: float | None, tmp_path: Path
) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0001.jsonl").write_text(f"{json.dumps(begun)}\n{json.dumps(made)}\n")
    live = LiveRun(tmp_path)
    live.refresh()
    told = gather(read_journal(tmp_path)).steps.column("tokens_per_second").tolist()
    assert told == pytest.approx([float("nan") if rate is None else rate], nan_ok=True)
    assert live.steps.last("rate") == pytest.approx(told[0], nan_ok=True)


def test_a_run_with_starts_of_both_versions_has_one_rate(tmp_path: Path) -> None:
    """The page and `compare` mixed the two: a run looked seven times as fast after an update."""
    lines = [start(1), step(ANSWERED / 2, 1, 1), start(2, step=1), step(ROW * BATCH / 2, 2, 2)]
    assert gather(lines).steps.column("tokens_per_second").tolist() == [ROW * BATCH / 2] * 2


@pytest.mark.parametrize("damage", [{"forecast": {"tokens_per_second": 10**400, "step_seconds": {"value": [1]}}},
                                    {"plan": {"batch_samples": 0}}, {"spec": {"task": 3}}, {"facts": []}])  # fmt: skip
def test_a_damaged_start_costs_nothing(damage: dict[str, Any]) -> None:
    items = forecast_items(read(RunStarted, start(**damage)))
    assert items.rate(150.0, 16.0, ANSWERED, 2.0) in (150.0, ROW * BATCH / 2)

"""What is left of a budget that runs share: the report and the page count what all of them have spent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import report_journals as journals

from paceline.account.budget_left import BudgetLeft
from paceline.observe.dash.watched import WatchedRun
from paceline.observe.live import shared_spending
from paceline.report.summary import summarise
from paceline.spec.journal.reading import read_journal

SPEC = {"tags": {"team": "speech"}, "budget": {"usd": 10.0}, "shared_budget": {"usd": 20.0, "shared_by": "team"}}


def run_at(folder: Path, **run: object) -> Path:
    """Return the directory of a run of 300 steps whose newest start has these options."""
    (folder / "journal").mkdir(parents=True)
    records = journals.complete()
    records[0] = {**records[0], "spec": {**records[0]["spec"], "run": run}}
    (folder / "journal" / "0001.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def lefts_in(run_dir: Path) -> dict[str, BudgetLeft]:
    return {each.shared_by: each for each in summarise(read_journal(run_dir), str(run_dir)).budgets}


def test_a_report_counts_what_all_have_spent_of_a_budget_that_they_share(tmp_path: Path) -> None:
    mine = run_at(tmp_path / "mine", **SPEC)
    run_at(tmp_path / "others", tags={"team": "vision"})
    alone = lefts_in(mine)
    assert alone[""].spent == pytest.approx(alone["team"].spent) and alone[""].spent > 0
    run_at(tmp_path / "theirs", tags={"team": "speech"})
    found = lefts_in(mine)
    assert found[""] == alone[""] and found["team"].spent == pytest.approx(2 * alone["team"].spent)
    # A step of this run costs what it has cost: the rest of what all share buys so many of its own.
    assert found["team"].steps == pytest.approx(300 * found["team"].left / found[""].spent)
    assert "$20.00 that all runs of the same team share is left" in found["team"].text
    assert {each.shared_by for each in summarise(read_journal(mine)).budgets} == {"", "team"}, "without a directory too"


def test_the_page_shows_both_budgets_and_what_is_spent_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = run_at(tmp_path / "mine", **SPEC)
    watched = WatchedRun("mine", mine)
    (own, shared) = (each.text for each in lefts_in(mine).values())
    html = watched.look()["spent"].html
    # The page's pace is of all starts with what lies between, so the amounts are compared and not the steps.
    assert own.split(",")[0] in html and shared.split(",")[0] in html
    works: list[Callable[[], None]] = []

    class Later:
        """A thread that does its work when the test says so."""

        def __init__(self, target: Callable[..., None], args: tuple[str], **_: object) -> None:
            self._work = lambda: target(*args)

        def start(self) -> None:
            works.append(self._work)

    monkeypatch.setattr(shared_spending.time, "monotonic", lambda: 1e12)
    monkeypatch.setattr(shared_spending.threading, "Thread", Later)
    run_at(tmp_path / "theirs", tags={"team": "speech"})
    spending = watched._others
    assert [spending.of("team")["usd"] for _ in range(3)] == [0.0] * 3 and len(works) == 1, "one look at a time"
    works.pop()()
    assert spending.of("team")["usd"] == pytest.approx(lefts_in(mine)[""].spent) and not works, "and then a rest"

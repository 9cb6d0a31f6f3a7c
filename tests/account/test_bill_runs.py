"""Which runs a bill is of, each once by whatever names it is reached, and under names that tell them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals

from paceline.account.bill import make_bill, runs_in
from paceline.account.prices import BookPrice, PriceBook
from paceline.account.texts import table_of
from paceline.errors import ConfigError
from paceline.observe.dash.watched import RunSet
from paceline.report.compare import MONEY
from paceline.report.summary import summarise
from paceline.spec.journal.reading import read_journal

SHARED = {"tags": {"team": "speech"}, "shared_budget": {"usd": 20.0, "shared_by": "team"}}


def run_at(folder: Path, **run: Any) -> Path:
    """Return the directory of a run of 300 steps with these options."""
    (folder / "journal").mkdir(parents=True)
    records = journals.complete()
    records[0] = {**records[0], "spec": {**records[0]["spec"], "run": run}}
    (folder / "journal" / "0001.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def test_a_link_to_the_newest_run_is_no_further_run(tmp_path: Path) -> None:
    """It doubled the bill, and a budget that runs share was used up at half of it: the run was its own neighbour."""
    run = run_at(tmp_path / "runs" / "a", **SHARED)
    once = make_bill([tmp_path / "runs"])
    (own,) = summarise(read_journal(run), str(run)).budgets
    (tmp_path / "runs" / "latest").symlink_to("a")
    (tmp_path / "runs" / "far").symlink_to(run_at(tmp_path / "elsewhere"))  # no other name of a run in the folder
    assert [path.name for path in runs_in([tmp_path / "runs"])] == ["a", "far"]
    assert list(RunSet([tmp_path / "runs"]).scan()) == ["a", "elsewhere"]
    (tmp_path / "runs" / "far").unlink()
    assert make_bill([tmp_path / "runs"]) == once
    (shared,) = summarise(read_journal(run), str(run)).budgets
    assert shared.spent == own.spent > 0


def test_a_run_that_is_named_in_several_ways_is_paid_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_at(tmp_path / "runs" / "a")
    once = make_bill([tmp_path / "runs" / "a"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("runs")
    ways = ["runs", "runs/a", "link/a", "runs/../runs/a", str(tmp_path / "runs")]
    assert make_bill([Path(way) for way in ways]) == once
    monkeypatch.chdir(tmp_path / "runs" / "a")
    assert [row.group for row in make_bill([Path()]).rows] == ["a"], "a run that is `.` has a name"


def test_runs_of_one_name_in_two_folders_are_two_runs(tmp_path: Path) -> None:
    """They made one row, and the page said "1 run"."""
    paths = [run_at(tmp_path / folder / "base") for folder in ("monday", "tuesday")]
    bill = make_bill(paths)
    assert [row.group for row in bill.rows] == [str(path) for path in paths] and bill.runs == 2


@pytest.mark.parametrize(
    ("book", "words"),
    [
        (None, "there is no price book"),
        (PriceBook((BookPrice("*", "", 1.0),)), "the book's prices have no class"),
        (PriceBook((BookPrice("*", "contract", 1.0), BookPrice("*", "spot", 0.5))), "did you mean 'contract'?"),
    ],
)
def test_a_class_that_no_price_has_is_refused(tmp_path: Path, book: PriceBook | None, words: str) -> None:
    """The runs' own prices were taken in its place, in silence."""
    run = run_at(tmp_path / "a")
    with pytest.raises(ConfigError) as refused:
        make_bill([run], book=book, price_class="contracts")
    assert words in str(refused.value)
    if book is not None and book.prices[0].price_class:
        assert make_bill([run], book=book, price_class="contract").total.usd == pytest.approx(
            make_bill([run]).total.device_hours
        )


def test_the_report_and_the_bill_are_of_the_same_device_seconds(tmp_path: Path) -> None:
    """A run that lost half of its devices on the way was billed for one and reported with both to its end."""
    run = run_at(tmp_path / "a")
    records = [json.loads(line) for line in (run / "journal" / "0001.jsonl").read_text().splitlines()]
    middle = next(at for at, each in enumerate(records) if each.get("step") == 150)
    recovery = {"kind": "recovery", "time": records[middle]["time"], "from_world": 2, "to_world": 1, "step": 149,
                "steps_lost": 0, "rung": "reform", "seconds": {"total": 2.0, "step": 1.9}}  # fmt: skip
    records = [{**records[0], "began": records[0]["time"] - 30}, *records[1 : middle + 1], recovery,
               *records[middle + 1 :]]  # fmt: skip
    (run / "journal" / "0001.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    summary, bill = summarise(read_journal(run), str(run)), make_bill([run])
    money = summary.promise(MONEY)
    assert f"{bill.total.device_hours * 3600:,.0f} device-seconds" in money.measured_how
    assert money.measured == pytest.approx(bill.total.usd)
    assert bill.total.device_hours * 3600 < 1.7 * summary.attempts[0].seconds


def test_figures_stand_below_names_that_have_no_room_beside_them(tmp_path: Path) -> None:
    """A bill of runs with names of more than seven letters was wider than a page of 100 columns."""
    names = ["a", "a-run-whose-name-says-what-was-tried-in-it"]
    for name in names:
        run_at(tmp_path / name)
    wide = table_of(make_bill([tmp_path]))
    assert max(map(len, wide)) <= 100 and [line for line in wide if line in names] == sorted(names)
    assert len({len(line) for line in wide if line.startswith("  ")}) == 1 and wide[-2] == "total"
    narrow = table_of(make_bill([tmp_path / "a"]))
    assert narrow[0].startswith("run ") and narrow[-1].startswith("total ") and max(map(len, narrow)) <= 100

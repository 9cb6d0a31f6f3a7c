"""The page, the files and the console lines of a report."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, MissingExtra, StorageError
from paceline.history.records import json_safe
from paceline.observe.exports.tensorboard import TensorBoardWriter, export_tensorboard
from paceline.report.build import build_report, report_lines, write_report
from paceline.report.charts import Band, Line, line_chart, stacked_bars
from paceline.report.html import render_html
from paceline.report.scale import linear_ticks, log_ticks, scale_for, ticks_of
from paceline.report.sections import decisions, spec_toml
from paceline.report.style import CSS
from paceline.report.summary import Event, summarise
from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import CheckpointRecord, DecisionRecord, StepRecord
from paceline.spec.journal.record import now, read
from paceline.spec.plan import PlanSpec

VOID = {"meta", "br", "link", "img"}
RUNS = [journals.complete, journals.resumed, journals.failed, journals.one_step]


class Checker(HTMLParser):
    """Checks that every tag is closed in order and collects attributes that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object")
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("make", RUNS)
def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(make: Any) -> None:
    page = render_html(summarise(make()))
    assert check(page).fetched == []
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page
    assert "nan" not in page.split("<body>")[1].lower().replace("finance", "")


def test_the_page_says_what_matters() -> None:
    words = " ".join(check(render_html(summarise(journals.resumed()))).words)
    for expected in ("Finished: 300 of 300 steps", "Interruptions cost", "lost work", "start 3", "requeue (75)",
                     "rank 1 was killed", "gradient reduction", "121 GFLOP/s", "global_batch"):  # fmt: skip
        assert expected in words, expected


def test_hostile_text_is_escaped() -> None:
    evil = "</title></pre><script>alert(1)</script>\"'&"
    records = journals.failed()

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key if key in known else key + evil: poison(item) if key != "kind" else item
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [poison(item) for item in value]
        return value + evil if isinstance(value, str) and value not in ("nan", "inf") else value

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for item in value.values() for key in keys(item)}
        return {key for item in value for key in keys(item)} if isinstance(value, list) else set()

    known = keys([records[0], records[5], records[-1]]) - {"lr", "bf16", "torch"}
    page = render_html(summarise([poison(record) for record in records], evil))
    assert "<script" not in page and evil not in page
    assert "&lt;script&gt;" in page
    check(page)


def test_a_long_run_stays_a_small_page() -> None:
    rng = random.Random(5)
    one = journals.step(1, 1, 0.0, rng)
    records = [journals.run_started(1, journals.START, steps=200_000)]
    records += [
        {**one, "step": n, "time": journals.START + 2.0 * n, "loss": 2 + math.exp(-n / 1e4) + rng.random() / 10,
         "seconds": {"total": 1.9 + rng.random() / 5}}
        for n in range(1, 200_001)
    ]  # fmt: skip
    records += [{"kind": "evaluation", "attempt": 1, "step": n, "loss": 2.0} for n in range(10, 200_001, 100)]
    page = render_html(summarise(records))
    assert len(page.encode()) < 500_000
    check(page)


def test_the_report_is_written_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    journals.write(tmp_path, journals.complete())
    target = write_report(tmp_path)
    assert target == tmp_path / "report.html" and target.read_text().endswith("</html>\n")
    target.write_text("old")
    assert write_report(tmp_path).stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "report.html"]


def test_a_report_that_cannot_be_written_leaves_no_litter(tmp_path: Path) -> None:
    journals.write(tmp_path, journals.one_step())
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal", "report.html"]


def test_directories_without_a_journal_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run's directory"):
        build_report(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        build_report(tmp_path / "absent")
    (tmp_path / "journal").mkdir()
    with pytest.raises(StorageError, match="is empty"):
        build_report(tmp_path)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_files_cut_anywhere_give_a_report(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run_dir = journals.write(tmp_path_factory.mktemp("run"), SHORT)
    for path in sorted((run_dir / "journal").iterdir()):
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size)))
    (run_dir / "journal" / "0009.jsonl").write_text(
        '{"schema":1,"kind":"run_started","time":1.0,"attempt":9,"step":3}\n{"ki'
    )
    assert build_report(run_dir).attempts[-1].number == 9
    assert write_report(run_dir).exists()


SHORT = [record for record in journals.resumed() if record.get("step", 0) % 20 in (0, 1)]


def test_console_lines(tmp_path: Path) -> None:
    journals.write(tmp_path, journals.complete())
    line, bound = report_lines(build_report(tmp_path))
    assert bound.startswith("verdict  compute-bound, healthy: ")
    assert line.startswith(f"report   {tmp_path}/report.html      forecast vs measured: time +1.")
    assert "memory -2.1%" in line and "energy +5%" in line
    assert report_lines(summarise(journals.failed(), "runs/x"))[-1] == "failed   the loss of step 41 is not a number"
    assert report_lines(summarise([], "runs/x")) == ["report   runs/x/report.html"]


def test_a_plan_is_from_what_the_spec_asks_for(tmp_path: Path) -> None:
    """All 32 options of [plan] stood there, nearly all of them 0 or "auto"; so did lists of the data that are empty."""
    for asked, told in (({}, "auto"), ({"precision": "fp32", "tp": 2}, "tp 2, precision fp32")):
        found = dataclasses.asdict(dataclasses.replace(PlanSpec(), **asked))
        event = Event(1.0, 1, {"kind": "decision", "what": "plan", "from": json_safe(found), "to": "tp=2"})
        assert f"<td>{told}</td>" in decisions([event])
    journals.write(tmp_path, journals.complete())
    page = render_html(build_report(tmp_path))
    assert "cp_method gather" not in page and "data: notes" not in page


def test_the_spec_reads_back_as_toml() -> None:
    import tomllib

    spec = journals.run_started(1, 0.0)["spec"]
    spec["task"]["model"]["arguments"] = {"width": 3, "deep": {"a": [1, 2]}}
    written = tomllib.loads(spec_toml(spec))
    del spec["task"]["model"]["tied"]  # unset values are left out
    assert written == spec


@given(
    st.lists(st.floats(-1e150, 1e150), min_size=1, max_size=20),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_scales_show_every_value(values: list[float], zero: bool, log: bool) -> None:
    values = [0.0 if abs(value) < 1e-140 else value for value in values]
    scale = scale_for(values, 10.0, 110.0, zero=zero, log=log)
    assert scale.low < scale.high
    assert all(10.0 <= scale(value) <= 110.0 for value in values)
    assert all(scale.low <= value <= scale.high for value in values)
    assert 1 <= len(ticks_of(scale)) <= 14


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[1e305, 1.7e308], [-1.7e308, -1e305], [1e300], [-1e300], [-1e300, 1e300]])
def test_values_beyond_all_measure_have_a_scale(values: list[float], log: bool) -> None:
    scale = scale_for(values, 0.0, 100.0, log=log)
    assert scale.low < scale.high and all(math.isfinite(tick) for tick in ticks_of(scale))
    assert all(0.0 <= scale(value) <= 100.0 for value in values)


def test_ticks_are_round() -> None:
    assert linear_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(1.31, 6.2) == pytest.approx([2, 3, 4, 5, 6])
    assert log_ticks(0.1, 10) == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert log_ticks(3.0, 4.0) == [3.0, 4.0]


def test_charts_hold_what_they_are_given() -> None:
    svg = line_chart(
        [Line("training", [(1, 4.0), (2, 2.0), (3, 99.0)])], label="a & b", x_label="step", y_label="loss",
        reference=(3.0, "by frequency"), band=Band(1.0, 3.0, 2.0, "forecast"), markers=[(2, "start 2")], ceiling=10.0,
    )  # fmt: skip
    assert 'aria-label="a &amp; b"' in svg and "by frequency" in svg and "start 2" in svg
    assert "beyond the scale: up to 99" in svg and svg.count('class="beyond"') == 1
    assert "step 2\ntraining: 2" in svg and "80 % interval 1 to 3" in svg
    bars = stacked_bars([("forecast", [("a", 3.0), ("b", 1.0)])], label="x", show=str, names=["a", "b"])
    assert "forecast: a 3.0 (75.0%)" in bars and ">4.0</text>" in bars
    check(f"<body>{svg}{bars}</body>")


def scalars(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_holds_the_steps_that_count(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    records = journals.resumed()
    journals.write(tmp_path, records)
    export_tensorboard(tmp_path)
    folder = export_tensorboard(tmp_path)  # a second export replaces the first
    assert len(list(folder.iterdir())) == 1
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "step"}
    assert scalars(folder, "loss/training") == pytest.approx(losses, rel=1e-6)
    assert set(scalars(folder, "loss/held_out")) == {50, 100, 150, 200, 250, 300}
    assert scalars(folder, "seconds/total")[300] == pytest.approx(records[-4]["seconds"]["total"], rel=1e-6)


def test_tensorboard_drops_steps_that_are_made_again_within_a_start(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardWriter(tmp_path) as writer:
        for step in [*range(1, 9), *range(6, 10)]:
            writer.write(now(read(StepRecord, {"step": step, "loss": 1.0, "seconds": {"total": 1.0}})))
        writer.write(now(read(CheckpointRecord, {"step": 5, "bytes": 9})))  # of a save beside training
        writer.write(now(read(VerdictRecord, {"step": 9, "shares": {"data": 0.5}})))
    events = EventAccumulator(str(writer.folder))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/training")] == list(range(1, 10))
    assert [event.step for event in events.Scalars("checkpoint/bytes")] == [5]
    assert [event.value for event in events.Scalars("bound/data")] == [0.5]


def test_what_is_decided_before_a_first_step_stands_before_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardWriter(tmp_path) as writer:
        writer.write(now(DecisionRecord("plan", "dp=1", "dp=2", "it is faster", {})))
        writer.write(now(read(StepRecord, {"step": 3, "loss": 1.0, "seconds": {"total": 1.0}})))
        writer.write(now(DecisionRecord("plan", "dp=2", "dp=1", "a device is lost", {})))
    events = EventAccumulator(str(writer.folder))
    events.Reload()
    assert [event.step for event in events.Tensors("decision")] == [0, 3]


def test_tensorboard_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto", None)
    with pytest.raises(MissingExtra, match=r"(?s)TensorBoard event files needs.*paceline\[tensorboard\]"):
        TensorBoardWriter(tmp_path)


def test_charts_are_no_wider_than_a_phone() -> None:
    wide, narrow = CSS.split("@media (max-width:36rem)")
    assert "svg.chart{display:block;width:100%;min-width:34rem" in wide, "it is this that a phone has to undo"
    assert "svg.chart{min-width:0" in narrow.split("@media print")[0]

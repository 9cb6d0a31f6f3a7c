"""No code reads what a report prints: other words for its promises and phases change the words alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import report_journals as journals

from paceline.history import phases
from paceline.report import compare
from paceline.report.build import report_lines
from paceline.report.html import render_html
from paceline.report.summary import Summary, summarise
from paceline.report.watched.lines import nodes_seen
from paceline.spec.journal.watching import NodeSample

RUNS = [journals.complete, journals.resumed, journals.failed]


def other(words: dict[str, str]) -> dict[str, str]:
    return {kind: f"estimate {number}" for number, kind in enumerate(words)}


def numbers(summary: Summary) -> dict[str, Any]:
    """Return the summary without the names that are printed."""
    plain = json.loads(json.dumps(summary.as_dict()))
    for each in (*plain["promises"], *plain["phases"]):
        del each["name"]
    return dict(plain)


@pytest.mark.parametrize("journal", RUNS)
def test_other_words_change_no_number(journal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = summarise(journal())
    for at, name in ((compare, "PROMISES"), (phases, "PHASE_NAMES")):
        monkeypatch.setattr(at, name, other(getattr(at, name)))
    after = summarise(journal())
    assert numbers(after) == numbers(before) and numbers(before)["goodput"]["useful_seconds"] > 0
    assert report_lines(after) == report_lines(before)
    assert [each.kind for each in after.phases] == [each.kind for each in before.phases]
    assert len(render_html(after)) == pytest.approx(len(render_html(before)), rel=0.01), "every part is drawn"


def test_a_figure_is_called_an_estimate_by_its_field() -> None:
    summary = summarise(journals.complete())
    assert [each.kind for each in summary.promises if each.is_estimate] == ["money", "energy", "carbon"]
    said = [dataclasses.replace(each, measured_how="worked out") for each in summary.promises]
    page = render_html(dataclasses.replace(summary, promises=tuple(said)))
    assert page.count("(estimate)") == render_html(summary).count("(estimate)") > 0


def test_what_sensors_gave_is_a_field() -> None:
    plain = NodeSample(1, "a", 1.0, (0,), {}, {}, {}, ())
    warm = dataclasses.replace(plain, host={"celsius": 40.0})
    assert [nodes_seen(samples).sensed for samples in ([], [plain], [plain, warm])] == [False, False, True]

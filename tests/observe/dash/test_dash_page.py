"""What the page says of a run: every part, whatever the journal holds, and nothing of it as code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import in_process

import paceline
from paceline.observe.dash.page import STYLE, run_body, runs_table, shell
from paceline.observe.dash.page_parts import PARTS, RunView
from paceline.observe.live.glance import Glances
from paceline.observe.live.run import LiveRun

EVIL = '"><script>alert(1)</script><img src=x onerror="alert(2)">'
STATIC = Path(paceline.__file__).parent / "observe" / "dash" / "static"


class Tags(HTMLParser):
    """Collects tags, and attributes that run or fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.bad: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name.startswith("on") or name in ("src", "style") or (value or "").startswith("javascript:"):
                self.bad.append((name, value or ""))


def parts_of(run_dir: Path) -> dict[str, str]:
    live = LiveRun(run_dir)
    live.refresh()
    view = RunView(live, 0.0)
    return {name: part(view) for name, (_, part) in PARTS.items()}


def many(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add a record of every kind that a run of several nodes has."""
    base = {"schema": 1, "attempt": 1, "time": journals.START + 100, "step": 20}
    spread = {"min": 1.0, "median": 1.1, "max": 1.6, "rank": 3}
    more = [
        {"kind": "ranks", "steps": 10, "ranks": 4, "device": "cpu",
         "spreads": {"total": spread, "computing": spread, "data": {**spread, "max": 1.2}}},
        {"kind": "node", "node": "n1", "seconds": 5.0, "ranks": [2, 3], "flagged": ["rank 3 throttled"],
         "signals": {"celsius": spread, "memory_bytes": {**spread, "median": 2.0**30}},
         "host": {"cpu_share": 0.5, "sent_bytes_per_second": 1e6}, "absent": {"watts": "no counter"}},
        {"kind": "health", "values": {"block 1": {"grad_norm": 0.5}, "block 2": {"grad_norm": 0.25, "dead_share": 0.1}},
         "told": [{"detector": "vanishing", "block": "block 1", "value": 1e-9, "threshold": 1e-7, "advice": "look"}]},
        {"kind": "alert", "rule": "straggler", "severity": "warning", "state": "firing", "title": "rank 3 is slow",
         "evidence": {"times": 1.5}, "advice": "replace it"},
        {"kind": "verdict", "bound": "straggler", "evidence": ["rank 3"], "advice": "x", "shares": {"data": 0.1},
         "healthy": False, "because": "rank 3 is slow", "promise": "8 %", "step_seconds": 1.9, "steps": 10},
        {"kind": "trace", "path": "traces/1", "first": 1, "last": 2, "ranks": [0], "by": "command", "seconds": 0.1},
        {"kind": "recovery", "rung": "reform", "because": "rank 1 died", "from_world": 4, "to_world": 3,
         "seconds": {"total": 3.0}},
    ]  # fmt: skip
    return records + [{**base, **each} for each in more]


def test_every_part_of_a_run_that_goes_on_is_there(tmp_path: Path) -> None:
    run = journals.write(tmp_path / "run", many(journals.resumed()[:-1]))
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("a line\n")
    parts = parts_of(run)
    assert [name for name, html in parts.items() if not html] == []
    for name, words in (
        ("head", "300 of 300 steps"), ("alerts", "rank 3 is slow"), ("verdict", "straggler-bound"),
        ("lanes", "rank 3"), ("lanes", "rank 3 throttled"), ("lanes", " GiB"), ("health", "vanishing"),
        ("timeline", "rank 1 died"), ("timeline", "traces/1"), ("spent", "money"), ("faults", "signal 9"),
        ("logs", "a line"),
        ("decisions", "the newest complete checkpoint"), ("cards", "tokens/s"), ("memory", "activations"),
        ("speed", "forecast"), ("loss", "held-out"),
    ):  # fmt: skip
        assert words in parts[name], (name, words)
    tags = Tags()
    tags.feed(run_body("run", parts))
    assert not tags.bad and "script" not in tags.tags


def _evil(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _evil(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_evil(item) for item in value]
    return EVIL if isinstance(value, str) else value


def test_words_of_a_journal_stay_words(tmp_path: Path) -> None:
    """A run's name, its losses, its errors and what it printed may come from anybody."""
    records = [{key: value if key == "kind" else _evil(value) for key, value in record.items()}
               for record in many(journals.failed())]  # fmt: skip
    for record in records:
        record.setdefault("loss", EVIL)
        if record["kind"] == "run_started":
            record["forecast"] = journals.forecast()
            record["spec"]["task"][EVIL] = 1
    run = journals.write(tmp_path / "run", records)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text(EVIL)
    html = run_body(EVIL, parts_of(run)) + runs_table({EVIL: Glances().at(run)}, 0.0)
    tags = Tags()
    tags.feed(shell(EVIL, html, "/events"))
    assert not [each for each in tags.bad if each != ("src", "/static/dash.js")]
    assert "<script>" not in html and "<img" not in html and html.count("&lt;script&gt;") > 10


LINES = st.dictionaries(
    st.sampled_from(["kind", "time", "step", "attempt", "loss", "seconds", "values", "told", "signals", "spec", "plan",
                     "forecast", "spreads", "ranks", "title", "node", "host", "flagged", "components", "error"]),
    st.recursive(st.none() | st.floats() | st.text(max_size=5) | st.integers(-3, 10**12),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                 max_leaves=6),
)  # fmt: skip
KINDS = st.sampled_from(["run_started", "step", "ranks", "evaluation", "memory", "decision", "fault", "recovery",
                         "node", "health", "alert", "verdict", "trace", "checkpoint", "verify",
                         "run_ended"])  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(KINDS, LINES), max_size=6))
def test_no_journal_keeps_the_page_from_being_drawn(tmp_path_factory: pytest.TempPathFactory, lines: Any) -> None:
    run = tmp_path_factory.mktemp("run")
    (run / "journal").mkdir()
    text = "".join(json.dumps({**line, "kind": kind}) + "\n" for kind, line in lines)
    (run / "journal" / "0001.jsonl").write_text(text)
    assert set(parts_of(run)) == set(PARTS)
    runs_table({"run": Glances().at(run)}, 0.0)


def test_the_static_twin_is_one_file_without_a_script(tmp_path: Path) -> None:
    runs = [journals.write(tmp_path / "runs" / name, make())
            for name, make in (("a", journals.complete), ("b", journals.resumed))]  # fmt: skip
    out = tmp_path / "page.html"
    assert in_process("dash", runs[0], "--export", out).returncode == 0
    page = out.read_text()
    assert "default-src 'none'" in page and "<script" not in page and "://" not in page and "300 of 300" in page
    told = json.loads(in_process("dash", tmp_path / "runs", "--export", out, "--json").stdout)
    assert told["runs"] == 2 and "training loss" in out.read_text()
    assert in_process("dash", tmp_path / "runs", "--export", tmp_path / "no" / "page.html").returncode == 74
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_every_class_that_is_drawn_has_a_style(tmp_path: Path) -> None:
    html = "".join(parts_of(journals.write(tmp_path, many(journals.resumed()))).values())
    used = {name for names in re.findall(r'class="([^"]+)"', html) for name in names.split()}
    plain = {"tick", "body", "part", "solid", "label", "top", "big", "small", "n", "group", "term", "total", "c7"}
    assert {name for name in used if f".{name}" not in STYLE} <= plain


def test_the_script_is_sound() -> None:
    """Node checks the page's own script where it is installed; that it fetches nothing is told by its words."""
    script = (STATIC / "dash.js").read_text(encoding="utf-8")
    assert not re.search(r"https?:|eval|document\.write|import\s*\(|Function\(", script)
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the script's syntax was not checked")
    checked = subprocess.run([node, "--check", str(STATIC / "dash.js")], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr

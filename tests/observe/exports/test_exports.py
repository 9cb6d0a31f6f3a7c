"""Other tools get a run's journal whole and in order: where they hang, die or come back, and where the run does."""

from __future__ import annotations

import importlib
import json
import re
import sqlite3
import struct
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import in_process, wait_until

from paceline.cli.json.shapes import DELIVER, undeclared
from paceline.errors import ConfigError
from paceline.observe.exports import deliver as delivering
from paceline.observe.exports.cursor import JournalCursor
from paceline.observe.exports.deliver import Delivery
from paceline.observe.exports.generated import PANELS, RULES, alert_rules, dashboard, metric_names
from paceline.observe.exports.logged import OfflineRows
from paceline.observe.exports.openmetrics import NAME, OpenMetricsSink, escaped
from paceline.observe.exports.process import SINKS, deliver_until
from paceline.observe.exports.sink import ExportedRun
from paceline.observe.exports.values import step_of, values_of
from paceline.session.extras import missing_export
from paceline.spec.journal.kinds import StepRecord, parse
from paceline.spec.journal.record import Record
from paceline.spec.watch.exports import ExportsSpec

STEPS = 40


def step_line(step: int, **more: Any) -> str:
    fields = {"kind": "step", "schema": 1, "time": 1e9 + step, "step": step, "loss": 1 / step, "grad_norm": 1.0,
              "lr": 1e-3, "seconds": {"total": 0.1}, "peak_bytes": 5, "tokens_per_second": 1.0}  # fmt: skip
    return json.dumps({**fields, **more}) + "\n"


def started(attempt: int) -> str:
    exports = {"openmetrics": "file", "of a later version": 1}
    told = {"kind": "run_started", "schema": 1, "time": 1e9, "attempt": attempt, "step": 0, "world_size": 2,
            "host": "h", "plan_text": "dp=2", "forecast": {"step_seconds": {"value": 0.2}},
            "spec": {"task": {"name": "a run"}, "run": {"exports": exports}}}  # fmt: skip
    return json.dumps(told) + "\n"


def append(run_dir: Path, *lines: str, attempt: int = 1) -> None:
    (run_dir / "journal").mkdir(parents=True, exist_ok=True)
    with (run_dir / "journal" / f"{attempt:04d}.jsonl").open("a") as file:
        file.write("".join(lines))


def run_of(run_dir: Path, **exports: Any) -> ExportedRun:
    return ExportedRun(run_dir, 'a "run"', ExportsSpec(**exports))


class Tool:
    """A tool that keeps what it gets; it can hang, and fail."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.opened: list[dict[str, Any]] = []
        self.fails = self.closed = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, run: ExportedRun, state: dict[str, Any]) -> Tool:
        self.opened.append(dict(state))
        return self

    def send(self, records: Sequence[Record]) -> None:
        self.may_go_on.wait()
        if self.fails:
            raise RuntimeError("no route")
        self.got += [step for record in records if isinstance(record, StepRecord) and (step := step_of(record))]

    def state(self) -> dict[str, Any]:
        return {"last": self.got[-1] if self.got else 0}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivering, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(delivering, "LONGEST_SECONDS", 0.02)
    monkeypatch.setattr(delivering, "SILENT_SECONDS", 0.2)


def test_a_tool_that_hangs_dies_and_comes_back_gets_each_record_once_and_in_order(tmp_path: Path) -> None:
    tool, fast, said = Tool(), Tool(), list[str]()
    append(tmp_path, started(1), *map(step_line, range(1, 11)))
    tool.may_go_on.clear()
    slow = Delivery("slow", run_of(tmp_path), tool, said.append).start()
    other = Delivery("fast", run_of(tmp_path), fast, said.append).start()
    wait_until(lambda: fast.got == list(range(1, 11)))
    assert tool.got == [] and not slow.join(0.0), "one that hangs holds up nobody but itself"
    wait_until(lambda: bool(said))
    assert said == ["exports  slow has not answered for 0 s; it gets all of it later"]
    append(tmp_path, *map(step_line, range(11, 21)))
    wait_until(lambda: len(fast.got) == 20)
    tool.fails = True
    tool.may_go_on.set()
    wait_until(lambda: len(tool.opened) > 2)
    tool.fails = False
    wait_until(lambda: len(tool.got) == 20)
    append(tmp_path, *map(step_line, range(21, 31)))
    slow.finish()
    other.finish()
    assert slow.join(30) and other.join(30) and slow.has_all
    assert tool.got == fast.got == list(range(1, 31)) and tool.closed
    assert len(said) == 2 and "slow takes nothing: RuntimeError: no route" in said[1], "once, until it goes on"


def test_a_tool_that_fails_tells_no_password(tmp_path: Path) -> None:
    def opened(run: ExportedRun, state: dict[str, Any]) -> Any:
        raise RuntimeError("API request to http://me:pa55word-of-mine@tracking/api?token=t0ken-0f-mine1 failed")

    append(tmp_path, started(1), step_line(1))
    said: list[str] = []
    delivery = Delivery("mlflow", run_of(tmp_path), opened, said.append).start()
    wait_until(lambda: bool(said))
    assert "tracking/api" in said[0] and "pa55word" not in said[0] and "t0ken" not in said[0]
    assert not delivery.has_all


def test_what_was_missed_is_delivered_by_the_next_start(tmp_path: Path) -> None:
    dead, tool, said = Tool(), Tool(), list[str]()
    dead.fails = True
    append(tmp_path, started(1), *map(step_line, range(1, 6)), '{"kind":"step","step":6,"lo')
    first = Delivery("tool", run_of(tmp_path), dead, said.append).start()
    first.finish()
    assert first.join(30) and not first.has_all and dead.got == [], "a run's end does not wait for a dead tool"
    append(tmp_path, started(2), *map(step_line, range(6, 9)), attempt=2)
    again = Delivery("tool", run_of(tmp_path), tool, said.append).start()
    again.finish()
    assert again.join(30) and tool.got == list(range(1, 9)), "the torn line of the first start is passed over"
    third = Tool()
    append(tmp_path, step_line(9), attempt=2)
    last = Delivery("tool", run_of(tmp_path), third, said.append).start()
    last.finish()
    assert last.join(30) and third.got == [9] and third.opened == [{"last": 8}], "it goes on where the last one was"


def all_of(cursor: JournalCursor) -> list[int | None]:
    found: list[int | None] = []
    while True:
        records, place = cursor.read()
        if not records and place == cursor.place:
            return found
        found += map(step_of, records)
        cursor.commit(place, {"a": 1})


def test_a_cursor_reads_whole_lines_of_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.observe.exports.cursor.MOST_BYTES", 300)
    cursor = JournalCursor(tmp_path, "x")
    assert cursor.read() == ([], cursor.place), "no journal yet"
    append(tmp_path, *map(step_line, range(1, 8)), '{"kind":"step","step":8')
    assert all_of(cursor) == list(range(1, 8))
    append(tmp_path, ',"loss":1.0}\n')
    assert all_of(cursor) == [8], "the rest of a line that was being written"
    append(tmp_path, "no json\n", "{}\n", '{"kind":"of a later version"}\n' * 30, step_line(9, more="x" * 2000))
    assert all_of(cursor) == [9] and JournalCursor(tmp_path, "x").state == {"a": 1}
    cursor.path.write_text("[]")
    assert JournalCursor(tmp_path, "x").place.offset == 0, "a damaged file delivers once more, and leaves nothing out"


def test_prometheus_gets_the_newest_values_with_few_labels(tmp_path: Path) -> None:
    append(tmp_path, started(1), *map(step_line, range(1, STEPS)))
    append(tmp_path, json.dumps({"kind": "fault", "what": "a", "time": 2e9}) + "\n")
    append(tmp_path, json.dumps({"kind": "verdict", "shares": {"data": 0.5, 'b"': 0.1}, "bound": "data"}) + "\n")
    sink = OpenMetricsSink(run_of(tmp_path, openmetrics="127.0.0.1:0"), {})
    try:
        sink.send(JournalCursor(tmp_path, "x").read()[0])
        (told,) = json.loads((tmp_path / "exports" / "file_sd.json").read_text())
        with urllib.request.urlopen(f"http://{told['targets'][0]}/metrics") as answer:
            text = answer.read().decode()
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://{told['targets'][0]}/journal")
    finally:
        sink.close()
    assert text == (tmp_path / "exports" / NAME).read_text() and text.endswith("# EOF\n")
    run = r'run="a \"run\""'
    assert f"paceline_step{{{run}}} {STEPS - 1}\n" in text and f"paceline_faults_total{{{run}}} 1\n" in text
    assert f'paceline_bound_ratio{{{run},cause="data"}} 0.5\n' in text and 'cause="b\\""' in text
    assert escaped("a\nb\\") == "a\\nb\\\\"
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) < 25 and {line.partition("{")[0] for line in samples} <= metric_names()
    again = OpenMetricsSink(run_of(tmp_path, openmetrics="file"), sink.state())
    record = parse(json.loads(started(2)))
    assert record is not None
    again.send([record])
    assert f"paceline_starts_total{{{run}}} 2\n" in again.text(), "a next start counts on"


def test_rules_and_panels_name_metrics_that_there_are(tmp_path: Path) -> None:
    expressions = [each[1] for each in (*RULES, *PANELS)]
    named = {name for text in expressions for name in re.findall(r"paceline_\w+", text)}
    assert named <= metric_names() and len(alert_rules()["groups"][0]["rules"]) == len(RULES)
    ended = in_process("deliver", "--rules", tmp_path / "rules.json", "--dashboard", tmp_path / "board.json", "--json")
    assert ended.returncode == 0 and undeclared(DELIVER, set(json.loads(ended.stdout))) == set(), ended
    assert json.loads((tmp_path / "rules.json").read_text()) == alert_rules()
    assert json.loads((tmp_path / "board.json").read_text()) == dashboard()


def test_a_run_that_ended_is_delivered_by_hand(tmp_path: Path) -> None:
    append(tmp_path, started(1), *map(step_line, range(1, 4)))
    ended = in_process("deliver", tmp_path)
    assert ended.returncode == 0 and "openmetrics has got all of it" in ended.stdout, ended
    assert 'paceline_step{run="a run"} 3' in (tmp_path / "exports" / NAME).read_text()
    nothing = in_process("deliver", tmp_path, "--to", "openmetrics=")
    assert nothing.returncode == 2 and "exported to nobody" in nothing.stderr
    assert in_process("deliver", tmp_path / "none").returncode == in_process("deliver").returncode == 2


def test_what_cannot_be_is_refused() -> None:
    assert set(SINKS) == set(ExportsSpec("u", True, True, "file").names)
    with pytest.raises(ConfigError, match="no address"):
        ExportsSpec(openmetrics="files").refuse_contradictions()
    record = parse({"kind": "step", "step": 1, "loss": "nan"})
    assert record is not None and values_of(record) == {}


def test_a_folder_called_as_a_tool_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # W&B itself makes one where a program runs
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    assert missing_export(ExportsSpec(wandb=True)) == "wandb"


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    append(tmp_path, started(1), *map(step_line, range(1, STEPS)))
    run = run_of(tmp_path, mlflow=f"sqlite:///{tmp_path}/mlflow.db")
    assert deliver_until(run, lambda: None, print, 60) == []
    odd = {"acc@5 (%)": 0.5, "größe": 1.0, "a//b": 2.0}  # a callback names them
    logged = json.dumps({"kind": "logged", "time": 2e9, "step": STEPS, "by": "mine", "values": odd}) + "\n"
    append(tmp_path, started(2), logged, step_line(STEPS), attempt=2)
    append(tmp_path, json.dumps({"kind": "run_ended", "status": "complete", "exit_code": 0}) + "\n", attempt=2)
    assert deliver_until(run, lambda: None, print, 60) == []
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        assert store.execute("select count(*) from runs").fetchone() == (1,)
        steps = [row[0] for row in store.execute("select step from metrics where key='loss/training' order by step")]
        assert steps == list(range(1, STEPS + 1))
        names = {row[0] for row in store.execute("select key from metrics where key like 'mine/%'")}
        assert names == {"mine/acc_5 ___", "mine/größe", "mine/a/b"}, "one odd name does not hold up all the others"
        assert store.execute("select status from runs").fetchone() == ("FINISHED",)


class Rows:
    """A tool of rows whose count grows: like W&B it drops what is logged below the row that it is at."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.at, self.over = 0, dict[str, str]()

    def define_metric(self, name: str, step_metric: str = "") -> None:
        self.over[name] = step_metric

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        if step is None or step >= self.at:
            self.rows.append(values)
        self.at = self.at + 1 if step is None else max(step, self.at)


def again_and_late(run_dir: Path) -> list[int]:
    """Write a journal in which steps 6 to 8 are made twice, and a checkpoint is on record late; return all steps."""
    saved = json.dumps({"kind": "checkpoint", "time": 1e9, "step": 5, "bytes": 9, "cost_seconds": 0.5}) + "\n"
    append(run_dir, started(1), *map(step_line, range(1, 8)), saved, step_line(8), *map(step_line, range(6, 9)))
    return [*range(1, 8), 5, 8, 6, 7, 8]


def test_a_tool_whose_rows_only_grow_gets_steps_that_are_made_again_and_late_records(tmp_path: Path) -> None:
    tool, steps = Rows(), again_and_late(tmp_path)
    sink = OfflineRows(tool, {})
    for record in JournalCursor(tmp_path, "wandb").read()[0]:  # a batch each, as they come while the run goes on
        sink.send([record])
    assert [row["step"] for row in tool.rows] == steps and tool.rows[7]["checkpoint/bytes"] == 9
    assert tool.over == {"step": "", "*": "step"}


def log_of(path: Path) -> Iterator[bytes]:
    """Return the records of W&B's file: a log as LevelDB writes it, behind a header of seven bytes."""
    raw, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:  # the end of a block holds no header
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", raw[at + 4 : at + 7])
        part, at = part + raw[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def test_weights_and_biases_is_written_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record as Kept

    steps = again_and_late(tmp_path)
    assert deliver_until(run_of(tmp_path, wandb=True), lambda: None, print, 60) == []
    (path,) = (tmp_path / "exports" / "wandb").glob("offline-run-*/run-*.wandb")
    kept = [Kept.FromString(data) for data in log_of(path)]
    rows = [{item.key or item.nested_key[0]: item.value_json for item in each.history.item} for each in kept
            if each.HasField("history")]  # fmt: skip
    assert [int(row["step"]) for row in rows] == steps and json.loads(rows[-1]["loss/training"]) == 1 / 8
    assert {each.metric.step_metric for each in kept if each.HasField("metric")} == {"", "step"}

"""Prometheus's own tool takes the rules, the panels' expressions and the metrics, and each rule fires by its cause."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.exports.generated import PANELS, RULES, alert_rules
from paceline.observe.exports.openmetrics import OpenMetricsSink
from paceline.observe.exports.sink import ExportedRun
from paceline.spec.journal.kinds import parse
from paceline.spec.watch.exports import ExportsSpec

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="not installed: promtool (Debian's package prometheus)")


def promtool(*arguments: Any, given: str = "") -> str:
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *map(str, arguments)], input=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    named = ",".join(f'{key}="{value}"' for key, value in {"run": "a", **labels}.items())
    return {"series": f"paceline_{name}{{{named}}}", "values": values}


def always(value: str) -> str:
    return f"{value}+0x600"


RUNNING, ENDED = series("running", always("1")), series("running", always("0"))
WELL = [RUNNING, series("last_record_timestamp_seconds", "0+60x600"), series("loss", always("2"), of="training"),
        series("step_seconds", always("1.2"), phase="total"), series("forecast_step_seconds", always("1")),
        series("faults_total", always("0")), series("checkpoint_timestamp_seconds", "0+60x600"),
        series("exit_code", always("6"))]  # fmt: skip
# Rule -> (what is the matter, minutes until it fires, further labels, what it says)
CAUSES: dict[str, tuple[list[dict[str, str]], int, dict[str, str], str]] = {
    "PacelineStalled": ([RUNNING, series("last_record_timestamp_seconds", always("0"))], 12, {},
                        "a has written no record for ten minutes"),
    "PacelineFailed": ([ENDED, series("exit_code", always("6"))], 1, {}, "a has ended with exit code 6"),
    "PacelineLossNotFinite": ([series("loss", always("NaN"), of="training")], 1, {"of": "training"},
                              "the loss of a is no number"),
    "PacelineSlow": ([series("step_seconds", always("1.3"), phase="total"),
                      series("forecast_step_seconds", always("1"))], 16, {"phase": "total"},
                     "steps of a take a quarter longer than forecast"),
    "PacelineFault": ([series("faults_total", "0x10 1x500")], 12, {}, "a has had a fault"),
    "PacelineCheckpointOld": ([RUNNING, series("checkpoint_timestamp_seconds", always("0"))], 370, {},
                              "the newest checkpoint of a is older than six hours"),
}  # fmt: skip


def test_each_rule_fires_by_its_cause_and_is_silent_while_all_is_well(tmp_path: Path) -> None:
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(alert_rules()))
    promtool("check", "rules", rules)
    assert CAUSES.keys() == {name for name, *_ in RULES}
    tests: list[dict[str, Any]] = []
    for name, _, _, severity, _ in RULES:
        given, minutes, labels, says = CAUSES[name]
        fires = {"exp_labels": {"severity": severity, "run": "a", **labels}, "exp_annotations": {"summary": says}}
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": [
            {"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": [fires]}]})  # fmt: skip
    quiet = [{"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": []}
             for name in CAUSES for minutes in (1, 20, 400)]  # fmt: skip
    tests.append({"interval": "1m", "input_series": WELL, "alert_rule_test": quiet})
    waits = [ENDED, series("exit_code", always("75")), series("last_record_timestamp_seconds", always("0"))]
    tests.append({"interval": "1m", "input_series": waits, "alert_rule_test": quiet})  # to be started again
    told = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.json").write_text(json.dumps(told))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.json")


def test_what_panels_ask_for_can_be_asked(tmp_path: Path) -> None:
    asked = [{"record": f"panel:{at}", "expr": each[1].replace("$run", ".*")} for at, each in enumerate(PANELS)]
    (tmp_path / "panels.json").write_text(json.dumps({"groups": [{"name": "panels", "rules": asked}]}))
    assert f"{len(PANELS)} rules found" in promtool("check", "rules", tmp_path / "panels.json")


def test_the_metrics_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    sink = OpenMetricsSink(ExportedRun(tmp_path, 'a "run"', ExportsSpec(openmetrics="file")), {})
    started = {"kind": "run_started", "time": 1e9, "forecast": {"step_seconds": {"value": 0.2}}}
    step = {"kind": "step", "time": 1e9, "step": 3, "loss": float("nan"), "seconds": {"total": 0.1, 'a"b': 1e-9},
            "tokens_per_second": 1e7, "peak_bytes": 5}  # fmt: skip
    records = [parse(line) for line in (started, step, {"kind": "run_ended", "exit_code": 6, "time": 2e9})]
    sink.send([record for record in records if record is not None])
    assert 'paceline_faults_total{run="a \\"run\\""} 0\n' in sink.text(), "the first fault is an increase"
    # It reads the format before OpenMetrics, in which a family of counters has the name of its samples.
    promtool(
        "check", "metrics", given=re.sub(r"(# \w+ paceline_(?:faults|recoveries|starts)) ", r"\1_total ", sink.text())
    )

"""`paceline simulate`, `plan --timeline` and the expected run in `plan`: what they print, write and refuse."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cli.output import table_lines
from paceline.cli.simulate import side_by_side
from paceline.config.build import Override
from paceline.plan.planned import Planned, plan_task
from paceline.simulate.policy import Policy, split_policy
from paceline.spec.load import load_spec, parse_spec

SMALL = """
[task]
model = "llama-1b"
global_batch = "1 Mi tokens"
stop = "200 B tokens"
[task.data]
seq_len = 4096
max_bytes = "100 kB"
[cluster]
device = "h100-sxm"
devices = 64
"""
RELIABLE = '\n[cluster.reliability]\nmtbf_hours_per_device = 2000.0\nrepair = "4 h"\n'


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL + RELIABLE, encoding="utf-8")
    return str(path)


def planned(text: str, *overrides: str) -> Planned:
    return plan_task(parse_spec(text, overrides=list[str | Override](overrides)))


def test_policies_are_compared_in_one_table(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", spec, "--runs", "4"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("policy "))
    assert lines[head].split() == ["policy", "spares", "blocking", "memory", "shrink"]
    own = lines[head : lines.index("", lines.index("time spent in", head))]
    assert max(map(len, own)) <= 100 and {line.partition("  ")[0] for line in own} >= {
        "saves every", "goodput", "finish", "p10 to p90", "money", "training", "lost work", "restart"}  # fmt: skip
    assert "from the spec" in out


def test_policies_that_have_no_room_beside_the_others_are_in_a_table_of_their_own() -> None:
    head, columns = ("policy", "goodput"), [(f"policy-{number}", "x" * 30) for number in range(7)]
    tables = [table_lines(rows) for rows in side_by_side(head, columns)]
    assert [len(table[0].split()) - 1 for table in tables] == [2, 2, 2, 1]
    assert max(len(line) for table in tables for line in table) <= 100
    assert next(table_lines(rows) for rows in side_by_side(head, [("a", "y" * 300)]))[1] == f"goodput  {'y' * 300}"


def test_json_holds_every_policys_summary_and_is_the_same_for_a_seed(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", spec, "--runs", "3", "--policy", "spares", "--policy", "blocking,every=20min", "--json"]
    read = []
    for seed in ("1", "1", "2"):
        assert main([*words, "--seed", seed]) == 0
        read.append(json.loads(capsys.readouterr().out))
    assert read[0] == read[1] != read[2]
    first, second = read[0]["policies"]
    assert (first["policy"]["name"], second["policy"]["every"]) == ("spares", 1200.0)
    assert sum(first["seconds"].values()) == pytest.approx(first["wall_seconds"]["mean"])
    assert read[0]["mtbf_seconds"] == pytest.approx(2000 / 64 * 3600)
    assert read[0]["intervals"] is None


def test_money_is_paid_for_spares_too_and_unknown_without_a_price(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", spec, "--runs", "2", "--days", "2", "--json", "--set", "cluster.price_usd_per_device_hour=2"]
    assert main([*words, "--policy", "spares,spares=8", "--set", "cluster.reliability.failures=none"]) == 0
    dear = json.loads(capsys.readouterr().out)["policies"][0]
    assert dear["usd"]["mean"] <= 2 * 2 * 24 * (64 + 8 * 8) + 1e-6
    assert dear["usd"]["mean"] > 2 * 2 * 24 * (64 + 7 * 8)


def test_intervals_pictures_and_traces(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "intervals.svg", tmp_path / "run.json"
    words = ["simulate", spec, "--runs", "2", "--policy", "spares", "--days", "20"]
    assert main([*words, "--intervals", "--picture", str(picture), "--trace", str(trace)]) == 0
    assert "best interval (spares): Young" in capsys.readouterr().out
    ET.fromstring(picture.read_text(encoding="utf-8"))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["dur"] for event in spans) == pytest.approx(20 * 86400e6)
    assert any(event["ph"] == "i" for event in events)


REFUSED = [
    (["--policy", "cheapest"], 2, "unknown policy"),
    (["--policy", "spares,every"], 2, "every"),
    (["--policy", "spares,evry=1h"], 2, "evry"),
    (["--policy", "spares,every=often"], 2, "often"),
    (["--policy", "spares,spares=many"], 2, "many"),
    (["--policy", "spares,spares=-1"], 2, "spares = -1"),
    (["--policy", "spares,every=1s,write=1h"], 2, "takes 3600 s to write"),
    (["--days", "0"], 2, "--days"),
    (["--days", "nan"], 2, "--days"),
    (["--runs", "0"], 2, "--runs"),
    (["--picture", "x.svg"], 2, "--intervals"),
    (["--set", "cluster.device=l4", "--set", "cluster.reliability.mtbf_hours_per_device=none"], 2, "is unknown"),
    (["--runs", "1", "--policy", "spares", "--trace", "/nowhere/at/all.json"], 74, "cannot be written"),
]


@pytest.mark.parametrize(("words", "code", "what"), REFUSED, ids=[" ".join(words) for words, _, _ in REFUSED])
def test_what_cannot_be_is_refused_with_a_reason(
    spec: str, words: list[str], code: int, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", spec, *words]) == code
    said = capsys.readouterr().err
    assert what in said and "because" in said and "try" in said


def test_settings_of_a_policy_are_read_with_their_units() -> None:
    name, settings = split_policy("memory, every=2h, memory_every=90 s, spares=3, memory_survives=0.5")
    assert (name, settings) == ("memory", {"every": 7200.0, "memory_every": 90.0, "spares": 3, "memory_survives": 0.5})


def test_a_cycle_holds_a_whole_number_of_copies() -> None:
    policy = Policy("x", 1000.0, 1.0, 0.0, 1.0, 1.0, 1.0, memory_every=300.0)
    assert (policy.cycle.copies, policy.cycle.work) == (3, pytest.approx(1000.0))


# ---- in `plan` --------------------------------------------------------------------------------------------------


def test_the_expected_run_adds_up_and_scales_with_failures() -> None:
    often, seldom = planned(SMALL + RELIABLE).expected, planned(SMALL).expected
    assert sum(term.value for term in often.terms) == pytest.approx(often.wall_seconds.value)
    assert often.goodput < seldom.goodput < 1
    assert often.wall_seconds.low < often.wall_seconds.value < often.wall_seconds.high
    assert often.interruptions > 10 * seldom.interruptions


def test_the_headline_tells_the_expected_run_where_failures_matter(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", spec]) == 0
    assert "expected: " in capsys.readouterr().out
    assert main(["plan", spec, "--set", "cluster.reliability.mtbf_hours_per_device=1e9", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "expected: " not in out and "under failures: " in out


def test_unknown_failures_are_an_answer_in_plan(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "cluster.device=l40s", "--set", "cluster.reliability.mtbf_hours_per_device=none"]
    assert main(["plan", spec, *words, "--explain"]) == 0
    assert "no published failure rate" in capsys.readouterr().out
    assert main(["plan", spec, *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expected"]["goodput"] is None


PIPELINE = ["--set", "plan.pp=4", "--set", "plan.tp=1", "--set", "plan.cp=1"]


def test_a_planned_pipeline_is_drawn_and_traced(spec: str, tmp_path: Path) -> None:
    for name in ("step.svg", "step.json"):
        words = ["plan", spec, *PIPELINE, "--set", "cluster.devices=8", "--set", "task.global_batch='64 samples'"]
        assert main([*words, "--timeline", str(tmp_path / name)]) == 0
    ET.fromstring((tmp_path / "step.svg").read_text(encoding="utf-8"))
    events = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["tid"] for event in events} == {0, 1, 2, 3}


def test_a_timeline_needs_a_pipeline_and_a_known_ending(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", spec, "--set", "plan.pp=1", "--timeline", "x.svg"]) == 2
    assert "no pipeline" in capsys.readouterr().err
    assert main(["plan", spec, *PIPELINE, "--timeline", "x.png"]) == 2
    assert ".svg" in capsys.readouterr().err


def test_the_example_is_llama3s_run() -> None:
    spec = load_spec(Path(__file__).parents[2] / "examples" / "llama-405b.toml")
    assert (spec.cluster.devices, spec.cluster.reliability.failures) == (16384, "llama3")

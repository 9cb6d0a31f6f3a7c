"""The verbs in Python: their names hold whatever is imported, and each returns what the command line prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import run_patiently

import paceline
from paceline.cli.main import main
from paceline.cli.output import json_safe
from paceline.cluster.catalog.devices import read_catalog
from paceline.errors import ConfigError, VerificationFailed
from paceline.session.verbs.proofs import Verification
from paceline.spec.proof.records import Proof

EXAMPLES = Path(__file__).parents[3] / "examples"
VERBS = ("backtest", "load_run", "plan", "report", "simulate", "verify")
ALL_VERBS = f"import paceline; assert all(callable(getattr(paceline, name)) for name in {VERBS})"
SPEC = """
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
[cluster.reliability]
mtbf_hours_per_device = 2000.0
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "task.toml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "code",
    [ALL_VERBS,
     f"import paceline.plan.planned, paceline.report.build, paceline.simulate.sweep; {ALL_VERBS}",
     f"{ALL_VERBS}; import paceline.verify.process.start, paceline.backtest.backtest; {ALL_VERBS}",
     f"from paceline.plan.planned import plan_task; import paceline as p; assert p.plan is not plan_task; {ALL_VERBS}",
     f"from paceline.plan import planned; assert planned.plan_task; {ALL_VERBS}",
     f"import importlib, paceline; importlib.reload(paceline); {ALL_VERBS}"],
    ids=["first", "rooms first", "verbs first", "from a room", "a room's module", "reloaded"],
)  # fmt: skip
def test_a_verb_keeps_its_name_whatever_is_imported(code: str) -> None:
    ran = run_patiently([sys.executable, "-c", code], 60)
    assert ran.returncode == 0, ran.stderr


def test_plan_returns_what_the_command_line_prints(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = paceline.plan(spec, overrides=["cluster.devices=32"])
    told = printed(capsys, "plan", spec, "--devices", "32")
    assert told["plan"] == json_safe(planned.plan) and told["forecast"] == json_safe(planned.forecast)
    assert told["pareto"] == json_safe(planned.front) and len(planned.front.plans) > 1


def test_a_list_of_clusters_is_compared(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = paceline.plan(spec, cluster=[32, 64, "h100-sxm", "a100-80"])
    told = printed(capsys, "plan", spec, "--devices", "32,64", "--device", "h100-sxm,a100-80")
    assert [(row["device"], row["devices"], row["finish_seconds"]) for row in told["rows"]] == [
        (row.device, row.devices, row.finish_seconds) for row in found.rows
    ]
    assert told["best"] == found.best
    with pytest.raises(ConfigError, match="several clusters"):
        paceline.plan(spec, cluster=[32, 64], measure=True)  # type: ignore[call-overload]


def test_a_list_that_compares_nothing_is_answered_with_devices_that_there_are(spec: Path) -> None:
    with pytest.raises(ConfigError, match="a list compares") as told:
        paceline.plan(spec, cluster=[0])
    numbers, _, names = told.value.try_.partition(", or ")
    assert json.loads(numbers) and set(json.loads(names)) <= set(read_catalog())


def test_a_task_and_a_file_that_say_the_same_are_planned_alike(spec: Path) -> None:
    task = paceline.Task(
        model="llama-1b",
        data=paceline.DataSpec(seq_len=4096, max_bytes=100_000),
        global_batch="1 Mi tokens",
        stop="200 B tokens",
    )
    cluster = {"device": "h100-sxm", "devices": 64}
    by_task, by_file = paceline.plan(task, "tp=2", cluster=cluster).forecast, paceline.plan(spec, "tp=2").forecast
    assert repr(by_task) == repr(by_file), "which has NaN for what is not known: since Python 3.13 that is not equal"
    fewer = paceline.plan(spec, cluster=cluster | {"devices": 32}, overrides=["task.seed=3"])
    assert (fewer.cluster.devices, fewer.spec.task.seed) == (32, 3)
    assert fewer.spec.cluster.reliability.mtbf_hours_per_device is None, "the whole table is another"
    with pytest.raises(ConfigError, match="without a spec file"):
        paceline.plan(task, overrides=["task.seed=3"])


def test_simulate_returns_what_the_command_line_prints(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"runs": 3, "seed": 5, "policies": ["wait", "spares,every=30min"]}
    found = paceline.simulate(spec, **options, intervals=True)  # type: ignore[arg-type]
    words = ["--runs", "3", "--seed", "5", "--policy", "wait", "--policy", "spares,every=30min", "--intervals"]
    told = printed(capsys, "simulate", spec, *words)
    assert [one["goodput"] for one in told["policies"]] == [json_safe(one.summary.goodput) for one in found.results]
    assert told["intervals"] == json_safe(found.sweep) and found.first_run().spans


def test_backtest_returns_what_the_command_line_prints(capsys: pytest.CaptureFixture[str]) -> None:
    table = EXAMPLES / "measured-steps.csv"
    found = paceline.backtest(table)
    told = printed(capsys, "backtest", table)
    assert told["files"] == json_safe([file.score for file in found.files])


def proof(layout: str, equal: bool = False, **changes: Any) -> Proof:
    return Proof(layout, equal, None, seconds=1.0, steps=2, **changes)


def test_verify_returns_refusals_and_refuses_what_it_cannot_read() -> None:
    digits = EXAMPLES / "digits.toml"
    found = paceline.verify(digits, "pp=2")
    assert not found.equal and found.exit_code == 3 and found.refused == found.layouts and found.failure() is None
    with pytest.raises(ConfigError, match="unknown precision"):
        paceline.verify(digits, "dp_shard=2", dtypes=["bf16"])
    with pytest.raises(ConfigError, match="exclude each other"):
        paceline.verify(digits, "dp_shard=2", every=2)


def test_one_unequal_layout_decides_how_a_proof_ends() -> None:
    equal, refused = proof("dp_shard=2", equal=True), proof("pp=2", refused_because="no chain")
    assert Verification(True, (equal, refused)).exit_code == 0
    assert Verification(False, (refused,)).exit_code == 3
    broken = Verification(False, (equal, refused, proof("tp=2 dp_shard=2", error="a rank died")))
    failure = broken.failure("my.toml")
    assert broken.exit_code == 4 and isinstance(failure, VerificationFailed)
    assert "a rank died" in str(failure) and "paceline verify my.toml --layout tp=2,dp_shard=2" in str(failure)

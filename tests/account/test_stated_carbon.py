"""Carbon that `run.when` states is used wherever carbon is counted: by the plan, the ledger, the bill and budgets."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
from runs import in_process, write_spec

from paceline.account.ledger import ledger_of
from paceline.account.prices import BookPower, PriceBook
from paceline.cluster.grid.carbon import with_carbon
from paceline.plan.planned import plan_task
from paceline.session.ready.budget import forecast_of
from paceline.spec.load import load_spec

BEGAN = datetime.datetime(2026, 11, 23, 11, 30).timestamp()
H100 = ["task.model=llama-124m", "task.data.seq_len=512", "task.global_batch=64 samples", "cluster.device=h100-sxm",
        "cluster.devices=8", "task.stop=1000 steps"]  # fmt: skip


def by_hour(tmp_path: Path) -> Path:
    path = tmp_path / "carbon.csv"
    path.write_text("hour,grams\n" + "".join(f"{hour},{100 + hour}\n" for hour in range(24)))
    return path


def journal(when: dict[str, str], **spec: Any) -> list[dict[str, Any]]:
    """Return a journal of one device at 1,000 W from 11:30 to 12:30."""
    known = {"value": 1000.0, "source": "published", "note": ""}
    unknown = {"value": None, "source": "unknown", "note": ""}
    cluster = {"device": {"name": "x"}, "devices": 1, "watts_per_device": known, "carbon_g_per_kwh": unknown}
    start = {"kind": "run_started", "attempt": 1, "time": BEGAN, "world_size": 1, "plan_text": "plan", "forecast": {},
             "cluster": cluster, "spec": {"run": {"when": when}, **spec}}  # fmt: skip
    return [start, {"kind": "run_ended", "attempt": 1, "time": BEGAN + 3600, "status": "complete"}]


def grams_of(lines: list[dict[str, Any]], book: PriceBook | None = None) -> tuple[float | None, str]:
    entries = ledger_of(lines, "run", book)
    known = [entry.carbon_g for entry in entries if entry.carbon_g is not None]
    return sum(known) if known else None, entries[0].how.get("carbon_g", "")


def test_the_ledger_takes_the_carbon_of_the_hours_in_which_a_run_trained(tmp_path: Path) -> None:
    path = str(by_hour(tmp_path))
    grams, how = grams_of(journal({"carbon": path}))
    assert grams == pytest.approx(111.5), "a kWh, half of it at 111 g and half at 112"
    assert how == "by the carbon that run.when states"
    assert grams_of(journal({"carbon": "41"}))[0] == pytest.approx(41.0)
    assert grams_of(journal({"carbon": path}), PriceBook(power=BookPower(carbon_g_per_kwh=7.0)))[0] == pytest.approx(
        7.0
    )


def test_what_the_cluster_states_stays_and_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert grams_of(journal({"carbon": "41"}, cluster={"carbon_g_per_kwh": 5.0}))[0] is None
    assert grams_of(journal({"carbon": str(tmp_path / "gone.csv")})) == (None, "")
    assert grams_of(journal({"carbon": "watttime:CAISO_NORTH"})) == (None, ""), "nobody asks a service for a bill"


def test_the_plan_counts_the_carbon_of_the_hours_of_its_run(tmp_path: Path) -> None:
    fixed = plan_task(load_spec(None, [*H100, "run.when.carbon=250"]))
    assert fixed.forecast.carbon_g.value == pytest.approx(fixed.forecast.kwh.value * 250)
    assert forecast_of(fixed, "kg_co2e") == pytest.approx(fixed.forecast.carbon_g.value / 1000)
    stated = plan_task(load_spec(None, [*H100, "run.when.carbon=250", "cluster.carbon_g_per_kwh=10"]))
    assert stated.cluster.carbon_g_per_kwh.value == 10, "the cluster's own figure is more than that of the hours"
    assert math.isnan(plan_task(load_spec(None, H100)).forecast.carbon_g.value)
    greenest = load_spec(None, [*H100, f"run.when.carbon={by_hour(tmp_path)}", "run.when.window=greenest",
                                "run.when.hours=4"])  # fmt: skip
    planned = plan_task(greenest)
    assert 100 <= planned.cluster.carbon_g_per_kwh.value <= 103, "hours 0 to 3 have 100 to 103"
    assert planned.forecast.carbon_g.value == pytest.approx(
        planned.forecast.kwh.value * planned.cluster.carbon_g_per_kwh.value
    )


def test_the_mean_is_that_of_the_hours_from_now_to_the_end(tmp_path: Path) -> None:
    spec = load_spec(None, [*H100, f"run.when.carbon={by_hour(tmp_path)}"])
    cluster = plan_task(load_spec(None, H100)).cluster
    found = with_carbon(cluster, spec.cluster, spec.run.when, 3600.0, BEGAN)
    assert found.carbon_g_per_kwh.value == pytest.approx(111.5)
    assert "carbon.csv, mean of the hours of the run" in found.carbon_g_per_kwh.note


def test_the_bill_of_a_run_that_states_its_carbon_knows_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "one"
    spec = write_spec(tmp_path, run_dir, steps=3)
    options = ("--set=cluster.watts_per_device=100", f"--set=run.when.carbon={by_hour(tmp_path)}",
               "--set=run.budget.kg_co2e=100")  # fmt: skip
    done = in_process("train", spec, *options)
    assert done.returncode == 0, done.stderr
    assert "kg CO2e is left" in done.stdout, "a budget of carbon counts it too"
    (row,) = json.loads(in_process("bill", run_dir, "--json").stdout)["rows"]
    assert row["missing"] == [] or "carbon_kg" not in row["missing"]
    mean = row["carbon_kg"] * 1000 / row["kwh"]
    assert 100 * (1 - 1e-9) <= mean <= 123 * (1 + 1e-9), "of the hours 0 to 23, of which each has 100 g and its number"

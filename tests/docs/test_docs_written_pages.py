"""Pages that scripts write from what the planner says are current, and say what the scores say."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline.backtest.statistics import median
from paceline.cli.main import main
from paceline.plan.cost.constants import read_constants

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS.parent / "examples" / "measured-steps.csv"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_published_cases_are_what_the_planner_says() -> None:
    on_disk = (DOCS / "published-cases.md").read_text(encoding="utf-8")
    assert on_disk == script("write_published_cases").page(), "run: python docs/scripts/write_published_cases.py"


@pytest.mark.parametrize(
    ("case", "unit", "published"),
    [("GPT-3 175B on 1,024 A100", "days", 34), ("ResNet-50 on 256 P100", "minutes", 60),
     ("BERT-Large on 1,024 V100", "minutes", 44)],
)  # fmt: skip
def test_published_durations_are_forecast_within_a_third(case: str, unit: str, published: float) -> None:
    page = (DOCS / "published-cases.md").read_text(encoding="utf-8")
    section = page.split(f"## {case}")[1].split("\n## ")[0]
    told = re.findall(rf"(?<![\w(])([\d.]+) {unit} \(", section)
    forecast = float(told[-1] if "Together" in section else told[0])
    assert forecast / published == pytest.approx(1, abs=1 / 3)


def test_the_traced_net_is_the_published_one() -> None:
    profile, module = script("write_published_cases").resnet_profile(), script("resnet50")
    assert profile.parameters == module.PARAMETERS
    assert profile.forward_flops / 2 == pytest.approx(module.MULTIPLY_ADDS, rel=0.005)


def test_the_page_of_accuracy_is_that_of_the_scores_that_are_kept() -> None:
    on_disk = (DOCS / "forecast-accuracy.md").read_text(encoding="utf-8")
    assert on_disk == script("write_forecast_accuracy").kept_page()
    assert read_constants().sha256[:16] in on_disk, "the scores are of other constants: score the tables again"
    assert f"off by {leave_out(on_disk)}" in on_disk


def leave_out(page: str) -> str:
    """Return the median over the tables of the headline, as its rows say it."""
    headline = page.split("## Step time, each table without its source")[1].split("\n## ")[0]
    rows = [row.split("|") for row in headline.splitlines() if row.startswith("| ") and "step time" not in row]
    errors = [float(row[3].strip().rstrip("%")) for row in rows]
    return f"{median(errors):.1f}%"


def test_the_page_of_accuracy_holds_the_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backtest", str(EXAMPLE), "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    page = script("write_forecast_accuracy").page(scores)
    time = scores["files"][0]["step_time"]
    assert f"| measured-steps | 5 | {time['mape']:.1%} |" in page
    assert scores["constants_sha256"][:16] in page
    assert str(EXAMPLE.parent) not in page

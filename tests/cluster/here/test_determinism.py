"""What deterministic kernels are said to cost is what the benchmark measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cluster.here.determinism import MEASURED, deterministic_price

RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "figures" / "deterministic.json"


def test_the_price_is_that_of_the_saved_benchmark() -> None:
    saved = json.loads(RESULT.read_text(encoding="utf-8"))
    (ratio,) = [row["ratio"] for row in saved["rows"] if row["loop"] == "deterministic"]
    price = MEASURED["cpu"]
    told = (price.ratio, price.low, price.high)
    assert told == pytest.approx((ratio["median"], ratio["low"], ratio["high"]), abs=0.005)
    assert price.source.endswith(saved["machine"]["date"])
    assert saved["equal"]["deterministic"]


def test_what_was_not_measured_is_said_to_be_so() -> None:
    assert "not measured on cuda" in deterministic_price("cuda")

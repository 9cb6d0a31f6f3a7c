"""Numbers for people."""

from __future__ import annotations

import pytest

from paceline.observe.live.spent import SpentAmount
from paceline.plan.explain.headline import energy_text
from paceline.report.format import figure, plural, quantity, signed_percent, usd, utc


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "$0.00"), (1204.4, "$1,204"), (3.52, "$3.52"), (0.5, "$0.50"), (0.0169, "$0.017"), (0.00042, "$0.00042")],
)
def test_money(value: float, words: str) -> None:
    assert usd(value) == words


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.016, "+1.6%"), (-0.0213, "-2.1%"), (2.861, "+286%"), (116.55, "×118"), (None, "unknown")]
)
def test_differences(ratio: float | None, words: str) -> None:
    assert signed_percent(ratio) == words


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (1.92, "s", "1.92 s"),
        (2**30, "B", "1.00 GiB"),
        (0.00405, "kWh", "4.05 Wh"),
        (12.5, "kWh", "12.5 kWh"),
        (420.0, "g", "420 g CO2e"),
        (42_000.0, "g", "42 kg CO2e"),
        (None, "USD", "unknown"),
    ],
)
def test_quantities(value: float | None, unit: str, words: str) -> None:
    assert quantity(value, unit) == words


def test_figures_take_their_unit_from_their_name() -> None:
    assert figure("memory_bytes", 8 * 2**30) == "8.00 GiB"
    assert figure("bytes_per_second", 2.9e9) == "2.9 GB/s"
    assert figure("latency_seconds", 61e-6) == "61 µs"
    assert figure("price_usd_per_device_hour", 2.5) == "$2.50"
    assert figure("watts_per_device", 700.0) == "700"


def test_counts_and_moments() -> None:
    assert plural(1, "step") == "1 step" and plural(1200, "step") == "1,200 steps"
    assert utc(1_772_323_205.0) == "2026-03-01 00:00:05 UTC"
    assert utc(None) == "unknown" and utc(1e300) == "unknown"


@pytest.mark.parametrize("kwh", [5.17e-7, 9.29e-5, 0.0244, 0.3, 12.5, 42_000.0])
def test_a_plans_energy_is_written_as_the_reports(kwh: float) -> None:
    live = SpentAmount("kwh", kwh, None, None, None, None, None)
    assert energy_text(kwh) == quantity(kwh, "kWh") == live.said(kwh)

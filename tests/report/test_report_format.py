"""Numbers for people."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.observe.live.spent import SpentAmount
from paceline.plan.explain.headline import energy_text
from paceline.report.drawn.figures import loss_chart
from paceline.report.format import figure, quantity, signed_percent, utc
from paceline.report.series import thin
from paceline.run.record.status import sparkline
from paceline.spec.survive.budget import BUDGETS
from paceline.units import format_amount, format_loss, format_usd, plural


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "$0.00"),
        (1204.4, "$1,204"),
        (3.52, "$3.52"),
        (0.5, "$0.50"),
        (0.0169, "$0.0169"),
        (0.00042, "$0.00042"),
        (0.0437331, "$0.04373"),
        (0.4, "$0.40"),
        (0.9999, "$1.00"),
        (99.999, "$100"),
        (-3.5, "-$3.50"),
        (1e-300, "<$0.000001"),
        (12345.67, "$12,346"),
        (float("nan"), "unknown"),
        (float("inf"), "unknown"),
    ],
)
def test_money(value: float, words: str) -> None:
    assert format_usd(value) == words


def test_a_large_budget_has_all_of_its_figures() -> None:
    """Four figures of 12,345.67 were 1.235e+04."""
    assert BUDGETS["usd"][2](12345.67) == "$12,346" and BUDGETS["kwh"][2](1_287_000.0) == "1,287,000 kWh"
    assert BUDGETS["device_hours"][2](54_321.0) == "54,321 device-hours" and format_amount(0.4475) == "0.4475"
    assert format_amount(999.99) == "1,000" and format_amount(float("nan"), "kWh") == "unknown"


def test_a_loss_that_is_no_number_is_told_and_drawn_around() -> None:
    """A terminal's curve of losses ended the run with the first one that was no number."""
    assert sparkline([1.0, float("nan"), 2.0, float("inf")]) == "▁▇" and sparkline([float("nan")]) == ""
    assert format_loss(float("nan")) == "no number" and format_loss(1.3e9) == "1.3e+09"


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
    live = SpentAmount("kwh", kwh, None, None, None)
    assert energy_text(kwh) == quantity(kwh, "kWh") == live.said(kwh)


def test_a_loss_is_in_nats_where_it_is_known_to_be() -> None:
    """A squared error, or what an objective of one's own returns, is not."""
    losses = thin(np.arange(3.0), np.array([3.0, 2.0, 1.0]), 10)
    texts = [loss_chart(losses, losses, losses, by_frequency) for by_frequency in (None, 2.5)]
    assert ["nats" in text for text in texts] == [False, True] and "loss per item" in texts[0]

"""Values that are compared are told in one unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import DoesNotFit
from paceline.plan.planned import plan_task
from paceline.report.format import quantities
from paceline.spec.load import load_spec
from paceline.units import format_bytes, format_carbon, format_durations, format_energy, format_sizes

GIB = 2**30


def units_in(text: str, unit: str) -> set[str]:
    return set(re.findall(rf"[\d,.e-]+ ({unit})\b", text))


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ((174 * GIB, 75.1 * GIB), ("174.0 GiB", "75.1 GiB")),
        ((0.61 * GIB, 1.5 * GIB), ("0.61 GiB", "1.50 GiB")),
        ((3 * 2**20, 75 * GIB), ("0.0029 GiB", "75.0 GiB")),
        ((512, 2048), ("512 B", "2,048 B")),
        ((0.0, 8 * GIB), ("0.00 GiB", "8.00 GiB")),
        ((float("nan"), GIB), ("unknown", "1.00 GiB")),
    ],
)
def test_sizes_that_are_compared_have_one_unit(counts: tuple[float, ...], told: tuple[str, ...]) -> None:
    assert format_sizes(*counts) == told


def test_durations_carbon_and_energy_that_are_compared_have_one_unit() -> None:
    assert format_durations(0.95, 1.2) == ("950 ms", "1,200 ms")
    assert format_durations(59.2, 63) == ("59.2 s", "63 s")
    assert format_durations(4.12e-4, 1.1) == ("0.412 ms", "1,100 ms")
    assert format_durations(45, 9000) == ("45 s", "2h 30m"), "hours are told with their minutes"
    assert format_carbon(950, 2250) == ("950 g CO2e", "2,250 g CO2e")
    assert format_energy(0.085, 0.12) == ("85 Wh", "120 Wh")
    assert quantities((950.0, None, 2250.0), "g") == ("950 g CO2e", "unknown", "2,250 g CO2e")
    assert quantities((0.5, 3.0), "USD") == ("$0.50", "$3.00")


@given(st.lists(st.floats(1.0, 1e15), min_size=1, max_size=4))
def test_every_size_is_in_the_same_unit_and_near_its_value(counts: list[float]) -> None:
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
    told = [text.split() for text in format_sizes(*counts)]
    assert len({unit for _, unit in told}) == 1
    for count, (figures, unit) in zip(counts, told, strict=True):
        assert float(figures.replace(",", "")) * scale[unit] == pytest.approx(count, rel=0.06, abs=0.6 * (unit == "B"))


def test_one_size_is_told_as_it_is_alone() -> None:
    for count in (700.0, 5e5, 3e8, 7e10, 4e13):
        assert format_sizes(count) == (format_bytes(count),)
    assert format_bytes(150 * GIB) == "150.0 GiB" and format_bytes(2048 * GIB) == "2.00 TiB"  # a B200 held "0.15 TiB"


def test_what_does_not_fit_is_told_in_the_unit_of_the_memory(tmp_path: Path) -> None:
    """Some 170 GiB a device beside 75 GiB: it was "0.17 TiB of 75.1 GiB"."""
    (tmp_path / "prose.txt").write_text("A paceline is a line of riders who share the work. " * 20000)
    spec = load_spec(None, [
        "task.model=llama-8b", f"task.data.source={tmp_path / 'prose.txt'}", "task.data.seq_len=4096",
        "task.global_batch=8 samples", "task.stop=10 steps", "cluster.device=h100-sxm", "cluster.devices=1",
    ])  # fmt: skip
    with pytest.raises(DoesNotFit) as refused:
        plan_task(spec)
    told = str(refused.value)
    (compared,) = re.findall(r"needs up to .* of [\d.]+ \w+ usable", told)
    assert units_in(compared, "[KMGT]iB") == {"GiB"}, told

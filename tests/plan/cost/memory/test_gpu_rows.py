"""Forecasts of memory against what a GPU's allocator held: nothing is fitted, but the laws were found in these rows.

One NVIDIA H200, torch 2.11.0+cu130, 2026-11-27, `benchmarks/grid/one_gpu.py`: most bytes of tensors at a time, of steps
after the third. What the process holds beside its allocator, the term `runtime`, is not in them.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
from gpu_of_2026_11_27 import hold_as_measured

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.spec.cluster import ClusterSpec
from paceline.spec.forecast import Forecast
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder


@dataclasses.dataclass(frozen=True)
class Row:
    """A model of the table, how it was trained, and the bytes that were measured."""

    model: str
    layers: int
    seq_len: int
    micro_batch: int
    accumulation: int
    recompute: str
    measured_bytes: float
    compiled: bool = False

    @property
    def forecast(self) -> Forecast:
        batch = self.micro_batch * self.accumulation
        size = NAMED_SIZES[self.model]
        # GPT-2's vocabulary where the model has none of its own.
        config = dataclasses.replace(size, layers=self.layers, vocab=size.vocab or 50257)
        resolved = resolve_cluster(ClusterSpec(device="h200", devices=1))[0]
        plan = Plan(
            Layout(), 3, self.micro_batch, self.accumulation, batch, self.recompute, "bf16", compile=self.compiled
        )
        return price(PricedTask(profile_decoder(config, self.seq_len), resolved, batch, 1), plan)


@pytest.fixture(autouse=True)
def _that_program(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_as_measured(monkeypatch)


SELECTIVE = Row("llama-1b", 16, 4096, 4, 2, "selective", 38026499584)
PLAIN = Row("llama-1b", 16, 4096, 2, 1, "none", 32496791040)
FULL = Row("llama-8b", 12, 4096, 2, 1, "full", 59806313984)
SMALL = Row("llama-124m", 12, 1024, 32, 1, "none", 15278197760)
COMPILED = Row("llama-1b", 16, 4096, 8, 1, "selective", 45666217472, compiled=True)
NOT_WORSE = {COMPILED: 0.01, SELECTIVE: 0.02, PLAIN: 0.01, FULL: 0.01, SMALL: 0.01}


def held(forecast: Forecast) -> dict[str, float]:
    return {term.name: term.value for term in forecast.memory}


@pytest.mark.parametrize("row", NOT_WORSE, ids=lambda row: f"{row.model}, {row.micro_batch} x {row.accumulation}")
def test_a_row_of_the_table_is_forecast_and_within_its_interval(row: Row) -> None:
    forecast = row.forecast
    beside = held(forecast)["runtime"]
    assert forecast.peak_bytes.value - beside == pytest.approx(row.measured_bytes, rel=NOT_WORSE[row])
    assert forecast.peak_bytes.low <= row.measured_bytes + beside <= forecast.peak_bytes.high


@pytest.mark.parametrize("row", NOT_WORSE, ids=lambda row: f"{row.model}, {row.micro_batch} x {row.accumulation}")
def test_terms_add_up_to_the_peak(row: Row) -> None:
    forecast = row.forecast
    assert math.fsum(term.value for term in forecast.memory) == pytest.approx(forecast.peak_bytes.value)


def test_where_the_backward_pass_ends_all_gradients_stand_and_the_last_one_twice() -> None:
    """What is left to the byte: the embedding's gradient in bf16 beside that in fp32, and the stream's."""
    size = NAMED_SIZES["llama-8b"]
    found = held(FULL.forecast)
    rest = FULL.measured_bytes - found["weights"] - found["gradients"] - found["optimizer state"]
    own = 2 * size.vocab * size.hidden + 2 * FULL.micro_batch * FULL.seq_len * size.hidden
    assert rest == pytest.approx(own, rel=1e-3), "of the measured row"
    passes = sum(found[name] for name in ("weight copies", "activations", "transients", "loss buffers"))
    assert found["held in turn"] < 0
    assert passes + found["held in turn"] == pytest.approx(own, rel=0.15), "of the forecast, whose stream is in fp32"

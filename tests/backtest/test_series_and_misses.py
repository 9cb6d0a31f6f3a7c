"""Rows of one chart that differ in their devices alone ran one micro-batch; what of a miss was to be expected."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.fitting.leave_out import beyond_unknown
from paceline.backtest.price import Priced, TermSeconds, price_cases
from paceline.backtest.rows import Case, with_one_micro_batch
from paceline.plan.cost.constants import read_constants

# 256 sequences on 64, 128 and 256 devices; the chart states no micro-batch.
CHART = replace(
    LLAMA,
    source_ref="a chart",
    program="nanotron",
    zero_stage="0",
    micro_batch=None,
    global_batch=256,
    recompute="none",
)


def of(devices: int, **changes: object) -> Case:
    return case_of(CHART, n_devices=devices, dp=devices, **changes)


def micro_batches(cases: list[Case]) -> list[set[int]]:
    return [{plan.micro_batch for plan in case.plans} for case in cases]


def test_a_scaling_series_ran_the_micro_batches_that_all_of_its_rows_can() -> None:
    series = [of(devices) for devices in (64, 128, 256)]
    assert micro_batches(series) == [{1, 2, 4}, {1, 2}, {1}]
    assert micro_batches(with_one_micro_batch(series)) == [{1}, {1}, {1}]


def test_what_is_no_series_stays_as_it_is() -> None:
    others = [
        of(64), of(256, source_ref="another"), of(256, seq_len=2048), of(256, precision="fp16"),
        of(128, micro_batch=2), case_of(CHART, n_devices=128, dp=64, tp=2),
    ]  # fmt: skip
    assert with_one_micro_batch(others) == others
    alone = [of(64), of(64)]  # the same layout twice shows no scaling
    assert with_one_micro_batch(alone) == alone
    unnamed = [of(64, source_ref=""), of(256, source_ref="")]
    assert with_one_micro_batch(unnamed) == unnamed


def test_what_is_known_to_be_unknown_of_a_row_is_no_miss() -> None:
    """Of 0.5 upwards a program that no table had (0.35) and launches of a fifth of the step (0.16 and 0.24) leave 0.21.

    Three tenths of these are unknown downwards: of 0.4 they leave 0.376.
    """
    case = case_of(LLAMA, program="pytorch-fsdp1")
    (priced,) = price_cases([case])
    assert isinstance(priced, Priced)
    terms = (TermSeconds("products", "products", 0.8), TermSeconds("launches", "host", 0.2))
    known, unknown = replace(priced, terms=terms, starting=0.2), math.sqrt(0.35**2 + 0.16**2 + 0.24**2)
    took_longer, took_less = (beyond_unknown(miss, case, known, read_constants()) for miss in (-0.5, 0.4))
    assert took_longer == pytest.approx(math.sqrt(0.5**2 - unknown**2)) and round(took_longer, 3) == 0.210
    assert took_less == pytest.approx(math.sqrt(0.4**2 - (0.3 * unknown) ** 2)) and round(took_less, 3) == 0.376
    assert beyond_unknown(0.1, case, replace(priced, terms=terms), read_constants()) == 0.0

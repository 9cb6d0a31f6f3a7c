"""Rows of one chart that differ in their devices alone ran one micro-batch; how wide a new source's interval is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.fitting.leave_out import widths_of_a_new_source
from paceline.backtest.rows import Case, with_one_micro_batch

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


def test_an_interval_of_a_new_source_is_as_wide_as_sources_differ_and_their_rows_do() -> None:
    """Sources 0.05 off, and rows 0.05 about them: 1.2816 x 1.4826 x 0.0707 is 0.1344. A wild table is one of five."""
    rows = np.array([-0.05, 0.0, 0.05])
    tables = [rows + middle for middle in (0.05, -0.05, 0.05, -0.05)]
    narrow, wide = widths_of_a_new_source([*tables, rows + 0.9, np.array([0.7, 0.8])])
    assert narrow == pytest.approx(0.1344, abs=1e-4), "two rows are no table"
    assert wide / narrow == pytest.approx(1.96 / 1.2816, rel=1e-3)
    assert widths_of_a_new_source([rows + 0.05]) == (narrow, wide)
    alike, apart = (widths_of_a_new_source([values]) for values in (0 * rows + 0.05, rows))
    assert alike[0] == apart[0] == pytest.approx(narrow / math.sqrt(2)), "either alone is half of the variance"
    assert widths_of_a_new_source([np.array([0.1])]) == (math.inf, math.inf)

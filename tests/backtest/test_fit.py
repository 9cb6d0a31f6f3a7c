"""The fit finds constants that made the measurements, whatever a few wild rows say."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from paceline.backtest.fitting.fit import START, Fitting, fit
from paceline.backtest.fitting.leave_out import leave_sources_out
from paceline.backtest.price import Priced, price_cases, seconds_of_cases
from paceline.backtest.rows import Reader
from paceline.backtest.table import read_table
from paceline.errors import DataError
from paceline.plan.cost.constants import constants_text, read_constants
from paceline.plan.cost.power_limit import pooled

SIZES = (512, 1024, 2048, 4096)


def table(
    path: Path, seconds: list[float] | None = None, gib: list[float] | None = None, widths: tuple[int, ...] = SIZES
) -> Path:
    rows = []
    sizes = itertools.product(widths, ((1, 8), (2, 4), (8, 1)), (1, 2, 4), (4, 8))
    for hidden, (tp, dp), micro, layers in sizes:
        rows.append(
            {"source": "made", "model": f"h{hidden}", "arch": "llama", "layers": layers, "hidden": hidden,
             "ffn_hidden": 4 * hidden, "heads": 8, "kv_heads": 8, "vocab": 32000, "seq_len": 2048,
             "accelerator": "A100-80GB", "n_devices": 8, "devices_per_node": 8, "precision": "bf16", "tp": tp, "sp": 1,
             "pp": 1, "cp": 1, "ep": 1, "dp": dp, "zero_stage": "1", "micro_batch": micro, "global_batch": 64,
             "grad_accum": 64 // dp // micro, "recompute": "none", "attention_kernel": "flash", "status": "ok"}
        )  # fmt: skip
    for index, row in enumerate(rows):
        row["measured_step_s"] = seconds[index] if seconds else 1.0
        row["measured_memory_gib"] = gib[index] if gib else 1.0
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_constants_that_made_the_measurements_are_found_and_wild_rows_forgiven(tmp_path: Path) -> None:
    # Not the constants that came with this version: where they lie would decide how near the fit comes.
    start = dataclasses.replace(START, launch_seconds=4e-5)
    truth = dataclasses.replace(start, share={**start.share, "ampere": 0.5}, launch_seconds=2e-5, allocator_share=0.2)
    reader = Reader()
    cases = [reader.case(row)[0] for row in read_table(table(tmp_path / "empty.csv")).rows]
    priced = [item for item in price_cases([case for case in cases if case], truth) if isinstance(item, Priced)]
    seconds = [item.step_seconds.value for item in priced]
    seconds[3] *= 40  # a row that no constants explain
    gib = [item.memory_bytes / 2**30 for item in priced]
    found = fit([table(tmp_path / "made.csv", seconds, gib)], start).constants
    assert found.share["ampere"] == pytest.approx(0.5, rel=0.04)
    assert found.launch_seconds == pytest.approx(2e-5, rel=0.10)
    assert found.allocator_share == pytest.approx(0.2, abs=0.01)
    assert found.files == ("made.csv",) and found.sha256 != truth.sha256
    assert found.attention["hopper"] == truth.attention["hopper"], "what no row tells of stays where it was"
    told = pooled(found.share, {"ampere": 1})["hopper"]
    assert found.share["hopper"] == pytest.approx(told, rel=1e-3), "but for shares, that other generations tell of"
    assert found.time_80 < 0.05 < 1 < found.time_95 * 40
    assert f'sha256 = "{found.sha256}"' in constants_text(found)


def test_nothing_to_fit_on_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("model,accelerator,n_devices,seq_len\nx,unknown-chip,8,2048\n")
    with pytest.raises(DataError, match="nothing to fit on"):
        fit([path])


def test_a_source_that_is_left_out_has_no_say_in_the_constants_that_forecast_it(tmp_path: Path) -> None:
    start = read_constants()
    names = ("own.csv", "other.csv")
    for wrong in (1.0, 3.0):
        for name, slower in zip(names, (wrong, 1.0), strict=True):
            path = table(tmp_path / name, widths=SIZES[::3])
            reader = Reader()
            cases = [case for row in read_table(path).rows if (case := reader.case(row)[0])]
            seconds = [slower * value for value in seconds_of_cases(cases, start)]
            table(path, list(seconds), widths=SIZES[::3])
            path.write_text(path.read_text().replace("made,", f"{name},"))
        fitting = Fitting([read_table(tmp_path / name) for name in names], Reader(), start)
        own = [part for part in fitting.parts if part.file.endswith(names[0])]
        left = fitting.without(own)
        assert left.share["ampere"] == pytest.approx(start.share["ampere"], rel=0.05), "whatever the other one says"
        assert own[0].missed(left).mean() == pytest.approx(-np.log(wrong), abs=0.05)


def test_the_interval_of_a_table_is_told_by_the_others_that_have_another_source(tmp_path: Path) -> None:
    """Of tables 0 and 0.5 off the median one is 0.25 off: 1.2816 x 1.4826 x 0.25 beside what is unknown of a row."""
    named = {"fitted": 1.0, "near": 1.0, "far": np.exp(0.5)}
    paths = [tmp_path / f"{name}.csv" for name in named]
    for path, (name, slower) in zip(paths, named.items(), strict=True):
        reader = Reader()
        cases = [case for row in read_table(table(path, widths=(4096,))).rows if (case := reader.case(row)[0])]
        table(path, [slower * value for value in seconds_of_cases(cases, START)], widths=(4096,))
        path.write_text(path.read_text().replace("made,", f"{name},"))
    _, near, far = leave_sources_out(paths, paths[:1]).files
    above = [[math.log(item.priced.step_seconds.high_80 / item.priced.step_seconds.value) for item in one.steps]
             for one in (near, far)]  # fmt: skip
    assert len(above[0]) == len(above[1]) == 18
    for wide, narrow in zip(*above, strict=True):
        assert wide**2 - narrow**2 == pytest.approx((1.2816 * 1.4826 * 0.25) ** 2, rel=0.05), "far's own is no part"

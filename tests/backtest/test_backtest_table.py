"""Tables are read the same from CSV, JSON Lines and Parquet, and say where a cell is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from backtest_examples import LLAMA, cells_of, write_table

from paceline.backtest.schema import KINDS, CollectiveRow, LayerRow, PowerRow, StepRow, WholeRunRow
from paceline.backtest.table import read_table
from paceline.errors import DataError


def test_formats_hold_the_same_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    rows = [cells_of(LLAMA), cells_of(LLAMA, n_devices=16, dp=16, kv_heads=8)]
    write_table(tmp_path / "a.csv", rows)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")

    def bare(name: str) -> list[dict[str, object]]:
        table = read_table(tmp_path / name)
        assert table.kind == "steps"
        return [{**vars(row), "file": "", "line": 0} for row in table.rows]

    assert bare("a.csv") == bare("a.jsonl") == bare("a.parquet")
    assert bare("a.csv")[1]["kv_heads"] == 8


def test_an_empty_cell_means_that_the_table_does_not_say(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv", [cells_of(LLAMA, tp="", micro_batch=" 4 ".strip(), measured_step_s="1e1")])
    (row,) = read_table(path).rows
    assert isinstance(row, StepRow)
    assert (row.tp, row.micro_batch, row.measured_step_s, row.line) == (None, 4, 10.0, 2)


def test_a_cell_that_is_no_number_is_named_and_the_file_goes_on(tmp_path: Path) -> None:
    rows = [cells_of(LLAMA, tp="2 or 4", measured_step_s="nan"), cells_of(LLAMA), cells_of(LLAMA, layers=1.5)]
    rows.append(cells_of(LLAMA, measured_step_s=-1))
    first, second, third, fourth = read_table(write_table(tmp_path / "a.csv", rows)).rows
    assert first.problem == "tp = '2 or 4' is not a whole number; measured_step_s = 'nan' is not a number"
    assert (first.line, second.problem, second.line) == (2, "", 3)
    assert third.problem == "layers = '1.5' is not a whole number"
    assert fourth.problem == "measured_step_s = '-1' is not a number"


def test_nan_of_a_binary_format_is_an_empty_cell(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({**cells_of(LLAMA), "measured_step_s": math.nan}))
    (row,) = read_table(tmp_path / "a.jsonl").rows
    assert isinstance(row, StepRow)
    assert row.measured_step_s is None and not row.problem


def test_other_columns_are_ignored_and_told(tmp_path: Path) -> None:
    table = read_table(write_table(tmp_path / "a.csv", [{**cells_of(LLAMA), "operator": "me", "weather": ""}]))
    assert table.ignored_columns == ("operator", "weather")


@pytest.mark.parametrize(
    ("header", "kind", "row_type"),
    [("collective,busbw_gb_s,group_size", "collectives", CollectiveRow),
     ("accelerator,node_steady_w_per_device", "power", PowerRow),
     ("model,hidden,combined_ms", "layers", LayerRow),
     ("model,device_hours,energy_mwh", "runs", WholeRunRow)],
)  # fmt: skip
def test_the_columns_tell_the_kind(tmp_path: Path, header: str, kind: str, row_type: type) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n{',' * header.count(',')}\n")
    table = read_table(tmp_path / "a.csv")
    assert table.kind == kind and isinstance(table.rows[0], row_type)
    assert KINDS[kind][0] is row_type


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [("a.txt", "x", "is not a table"),
     ("a.csv", "", "has no rows"),
     ("a.csv", "model,accelerator\nm,a\n", "columns of no table"),
     ("a.csv", "model,accelerator,n_devices,seq_len\nm,a\n", "a.csv:2: 2 cells"),
     ("a.csv", "model,accelerator,n_devices,seq_len\nm,a,1,2,3\n", "a.csv:2: 5 cells"),
     ("a.jsonl", '{"model": "m"}\n{"model": \n', "a.jsonl:2: not JSON"),
     ("a.jsonl", "[1]\n", "a.jsonl:1: not an object")],
)  # fmt: skip
def test_what_is_no_table_is_refused_with_its_place(tmp_path: Path, name: str, text: str, what: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=what):
        read_table(tmp_path / name)


def test_a_missing_file_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / "none.csv")
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / "a.parquet")

"""The rows that a GPU has trained, priced as on that GPU: what `benchmarks/results/gpu.md` says of them now.

They were looked at while the forecast was mended, so this holds what is told and is no test of other GPUs. Their
program held 14 B a logit of a chunk and the head's gradient a third time, which it has not done since 2026-11-28.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from gpu_of_2026_11_27 import hold_as_measured

from paceline.cluster import resolve, store
from paceline.cluster.machine import Gpu

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "benchmarks" / "results" / "figures" / "gpu"


def priced(device: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return the errors of time and of memory of each row that was measured, as parts of what was measured."""
    for folder in ("grid", ""):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    import one_gpu

    hold_as_measured(monkeypatch)
    rows = json.loads((FIGURES / "grid.json").read_text("utf-8"))["rows"]
    held = {row["name"]: row["measured"] for row in rows if row.get("measured")}
    chosen = [row for row in one_gpu.ROWS if row.name in held]
    assert len(chosen) == len(held) == 5
    forecasts: Any = one_gpu.forecasts_of(chosen, argparse.Namespace(device=device, steps=6, warm_up=3))
    errors = []
    for row, found in zip(chosen, forecasts, strict=True):
        measured = held[row.name]
        bytes_told = sum(value for name, value in found["memory"].items() if name != "runtime")
        errors.append((found["seconds"] / measured["seconds"] - 1, bytes_told / measured["bytes"] - 1))
    return errors


def test_by_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = priced("h200", monkeypatch)
    assert [f"{time:+.0%}" for time, _ in errors] == ["+1%", "-1%", "+7%", "+5%", "+12%"]
    assert all(abs(memory) < 0.02 for _, memory in errors)


def test_by_what_its_probe_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The record is of the probe before its operands were random; what it says of products counts no more."""
    record = json.loads((FIGURES / "probe.json").read_text("utf-8")) | {"schema": store.SCHEMAS["cuda"]}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(resolve, "visible_gpus", lambda: [Gpu(record["device_name"], record["device_memory_bytes"])])
    monkeypatch.setattr(resolve, "torch_without_cuda", lambda: False)
    here = resolve.read_machine()
    path = store.probe_path(here.name, "cuda", 1, 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record | {"processor": here.processor}))
    errors = [time for time, _ in priced("cuda", monkeypatch)]
    assert all(-0.045 < error < 0.085 for error in errors), errors

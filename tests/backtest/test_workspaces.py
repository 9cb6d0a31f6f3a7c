"""Workspaces of products' libraries, by the sizes that torch and Transformer Engine state."""

from __future__ import annotations

import pytest
from backtest_examples import case_of

from paceline.backtest.price import price_cases
from paceline.plan.cost.programs.workspaces import workspace_bytes


def test_workspaces_are_two_of_cublas_and_one_of_layers() -> None:
    assert workspace_bytes("NVIDIA A100 SXM4 80GB", "", False) == 2 * 8_519_680
    assert workspace_bytes("NVIDIA A100 SXM4 80GB", "deterministic-mode=True", True) == 2 * 33_554_432 + 4_194_304
    assert workspace_bytes("NVIDIA H100 SXM5 80GB", "", False) == 2 * 33_554_432
    assert workspace_bytes("NVIDIA GB200 NVL72, one GPU, 186GB", "", True) == 3 * 33_554_432
    assert workspace_bytes("AMD Instinct MI300X 192GB", "deterministic-mode=True", True) == 0


def test_what_torch_allocated_holds_workspaces_and_what_a_monitor_shows_has_them_in_the_process() -> None:
    def bytes_of(kind: str, notes: str = "") -> float:
        priced = price_cases([case_of(memory_kind=kind, measured_memory_gib=30.0, notes=notes)])[0]
        assert not isinstance(priced, str)
        return priced.memory_bytes

    same = "deterministic-mode=True"
    for kind in ("allocated", "reserved"):
        assert bytes_of(kind, same) - bytes_of(kind) == pytest.approx(2 * (33_554_432 - 8_519_680))
    assert bytes_of("device", same) == bytes_of("device")

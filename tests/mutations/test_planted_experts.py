"""Mistakes that others made with experts, planted into the running system: the proof catches each and names it."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks
from planted import Planted
from planted_experts import CASES, EXPERTS, prove_experts

Proofs = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def proofs() -> Proofs:
    """Plant everything in one set of ranks per world size."""
    planted: dict[str, Any] = {}
    controls: dict[str, Any] = {}
    for ranks in sorted({plan.layout.devices for plan in CASES.values()}):
        found = run_ranks(prove_experts, ranks, ranks, timeout_seconds=150)[0]
        planted |= found[0]
        controls |= found[1]
    return planted, controls


@pytest.mark.parametrize("bug", EXPERTS, ids=lambda bug: bug.what)
def test_planted_mistakes_with_experts_are_caught_and_named(bug: Planted, proofs: Proofs) -> None:
    first = proofs[0][bug.what]["first_difference"]
    assert first is not None
    assert (first["quantity"], first["family"]) == (bug.quantity, bug.diagnosed), first
    assert bug.tensor in first["name"] and bug.says in first["likely"], first


@pytest.mark.parametrize("case", CASES)
def test_controls_with_experts_are_not_flagged(case: str, proofs: Proofs) -> None:
    assert proofs[1][case]["equal"], proofs[1][case]["first_difference"]

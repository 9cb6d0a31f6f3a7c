"""Every planted mistake is caught, named and diagnosed; without one, nothing is flagged."""

from __future__ import annotations

from typing import Any

import pytest
from catalogue import CONTROLS, PLANS, PROOFS, prove_all
from distributed import run_ranks
from planted import Planted
from resumed import PLANS as RESUME_PLANS
from resumed import RESUMES, Lost, resume_all
from write_table import PAGE, row_of

Proofs = tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def proofs() -> Proofs:
    """Plant everything in one set of ranks per world size."""
    planted: dict[str, Any] = {}
    controls: dict[str, Any] = {}
    for ranks in sorted({plan.layout.devices for plan in PLANS.values()}):
        everywhere = run_ranks(prove_all, ranks, ranks)
        assert all(told == everywhere[0] for told in map(_without_seconds, everywhere)), "all ranks say the same"
        planted |= everywhere[0][0]
        controls |= everywhere[0][1]
    return planted, controls


@pytest.fixture(scope="module")
def resumes() -> Proofs:
    return run_ranks(resume_all, 2)[0]


def _without_seconds(told: Proofs) -> Proofs:
    for results in told:
        for result in results.values():
            result.pop("seconds", None)
            for key in [k for k, v in (result["first_difference"] or {}).items() if v != v]:
                result["first_difference"][key] = None  # NaN, which equals nothing
    return told


@pytest.mark.parametrize("bug", PROOFS, ids=lambda bug: bug.what)
def test_the_proof_catches_it_and_names_it(bug: Planted, proofs: Proofs) -> None:
    result = proofs[0][bug.what]
    assert not result["equal"]
    first = result["first_difference"]
    assert (first["quantity"], first["family"]) == (bug.quantity, bug.diagnosed), first
    assert bug.tensor in first["name"] and first["name"] in first["tensors"]
    assert bug.says in first["likely"]


@pytest.mark.parametrize("case", CONTROLS)
def test_controls_are_not_flagged(case: str, proofs: Proofs) -> None:
    result = proofs[1][case]
    assert result["equal"] and result["first_difference"] is None, result


@pytest.mark.parametrize("lost", RESUMES, ids=lambda lost: lost.what)
def test_a_resumed_run_catches_it_and_names_it(lost: Lost, resumes: Proofs) -> None:
    assert resumes[0][lost.what] == (lost.quantity, lost.step)


@pytest.mark.parametrize("case", RESUME_PLANS)
def test_resumed_runs_without_a_mistake_do_not_depart(case: str, resumes: Proofs) -> None:
    assert resumes[1][case] is None


def test_every_mistake_has_a_name_of_its_own() -> None:
    names = [bug.what for bug in (*PROOFS, *RESUMES)]
    assert len(set(names)) == len(names)


def test_the_page_lists_every_mistake() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| family", "|---"))]
    expected = [row_of(bug) for bug in (*PROOFS, *RESUMES)]
    again = "run tests/mutations/write_table.py again"
    assert len(rows) == len(expected), again
    assert all(row.startswith(start) for row, start in zip(rows, expected, strict=True)), again
    assert "not caught" not in "".join(rows)

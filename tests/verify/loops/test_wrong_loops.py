"""`paceline.verify_loop` tells every loop of wrong_loops.py, and the right one that they are changes of is equal."""

from __future__ import annotations

import pytest
from distributed import run_ranks
from wrong_loops import WRONG, hold_all

from paceline.spec.proof.records import LoopProof


@pytest.fixture(scope="module")
def found() -> list[dict[str, LoopProof]]:
    return run_ranks(hold_all, 2, ["", *WRONG])


def test_the_right_loop_is_equal(found: list[dict[str, LoopProof]]) -> None:
    assert all(of_rank[""].equal for of_rank in found), found[0][""].text


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_loop_is_told(what: str, found: list[dict[str, LoopProof]]) -> None:
    results = [of_rank[what] for of_rank in found]
    assert all(result.equal is False and result.verdict == "unequal" for result in results), results[0].text
    assert "NOT equal to one device" in results[0].text

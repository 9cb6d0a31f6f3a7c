"""What many strangers say of a generation's share of its peak."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from backtest_examples import LLAMA, case_of, cells_of, write_table

from paceline.backtest.fitting.fit import START, Fitting
from paceline.backtest.fitting.generations import SharesTold, blended, shares_told
from paceline.backtest.price import seconds_of_cases
from paceline.backtest.rows import Case, Reader
from paceline.backtest.schema import StepRow
from paceline.backtest.table import read_table
from paceline.plan.cost.constants import Constants

# Of one device, so that nothing is waited for, and of large micro-batches, so that products are most of a step.
ALONE = replace(LLAMA, zero_stage="0", n_devices=1, dp=1, micro_batch=4, layers=4, recompute="none")
AMPERE = {"ampere": 0.77}


def told(*shares: float, rows: int = 1) -> SharesTold:
    return {"ampere": {f"source {at}": (share, rows) for at, share in enumerate(shares)}}


def at_share(share: float) -> Constants:
    return replace(START, share={**START.share, "ampere": share})


def measured(share: float, **changes: Any) -> Case:
    """A case whose time is what constants of another share of Ampere's peak say."""
    case = case_of(ALONE, **changes)
    (seconds,) = seconds_of_cases([case], at_share(share))
    return case_of(ALONE, **changes, measured_step_s=float(seconds))


def test_a_share_moves_to_the_median_source_by_their_rows() -> None:
    """A third of 62 rows: (139 ln 0.77 + 20.67 ln 0.68) / 159.67 is -0.27745, the logarithm of 0.7577."""
    apart = [0.68 * 1.01**step for step in (-1, 0, 1)]
    sources = {
        f"source {at}": (share, count) for at, (share, count) in enumerate(zip(apart, (20, 22, 20), strict=True))
    }
    assert blended(AMPERE, {"ampere": 139}, {"ampere": sources})["ampere"] == pytest.approx(0.7577, abs=1e-4)
    assert blended(AMPERE, {}, {"ampere": sources})["ampere"] == pytest.approx(0.68), "nothing else tells of it"
    assert blended({**AMPERE, "hopper": 0.6}, {"ampere": 139}, {"ampere": sources})["hopper"] == 0.6


@pytest.mark.parametrize(("nearer", "moves"), [(0.15, False), (0.18, True)])
def test_sources_that_differ_no_more_than_their_own_errors_say_nothing(nearer: float, moves: bool) -> None:
    """Five sources, the middle one's neighbours 0.1 away: an error of 1.858 x 0.1 / 2.236, 0.083, of which two."""
    apart = [0.6 * math.exp(step) for step in (-0.2, -0.1, 0.0, 0.1, 0.2)]
    fitted = {"ampere": 0.6 * math.exp(nearer)}
    assert (blended(fitted, {"ampere": 5}, told(*apart)) != fitted) is moves


def test_a_source_that_is_left_out_is_not_heard() -> None:
    shares = told(0.5, 0.5, 0.6, 0.6, rows=2)
    assert blended(AMPERE, {}, shares, ["source 0", "source 1"])["ampere"] == pytest.approx(0.6)
    assert blended(AMPERE, {"ampere": 1}, shares, list(shares["ampere"])) == AMPERE


def test_sources_tell_the_share_that_made_their_rows_and_rows_of_experts_tell_none() -> None:
    rows = [
        measured(0.5, source="slow"), measured(0.5, source="slow", layers=8), measured(0.2, source="slow", layers=6),
        measured(0.66, source="fast"),
        measured(0.4, source="routed", arch="moe", experts=8, topk=2),
        measured(0.4, source="small", hidden=256, ffn_hidden=512, heads=4, seq_len=64, micro_batch=1, global_batch=64),
    ]  # fmt: skip
    found = shares_told(rows, at_share(0.62))
    assert set(found) == {"ampere"} and set(found["ampere"]) == {"slow", "fast"}
    assert found["ampere"]["slow"] == (pytest.approx(0.5, rel=0.01), 3), "its median row, one of three being wild"
    assert found["ampere"]["fast"] == (pytest.approx(0.66, rel=0.01), 1)


def table(path: Path, share: float, sources: tuple[str, ...]) -> Path:
    rows = []
    for source in sources:
        for layers, micro in ((4, 4), (8, 4), (4, 2)):
            case = measured(share, source=source, layers=layers, micro_batch=micro)
            assert isinstance(case.row, StepRow)
            rows.append(cells_of(case.row))
    return write_table(path, rows)


def test_a_table_of_many_sources_has_a_say_in_shares_and_in_nothing_else(tmp_path: Path) -> None:
    own = read_table(table(tmp_path / "own.csv", 0.62, ("own",)))
    many = read_table(table(tmp_path / "many.csv", 0.5, ("a", "b", "c")))
    two = read_table(table(tmp_path / "two.csv", 0.5, ("a", "b")))
    alone, both = Fitting([own], Reader()), Fitting([own, many], Reader())
    assert [Path(part.file).name for part in both.parts] == ["own.csv"]
    assert len(Fitting([own, two], Reader()).parts) == 2, "two sources are no collection"
    fitted = alone.constants.share["ampere"]
    by_rows = math.exp((3 * math.log(fitted) + 9 / 3 * math.log(0.5)) / 6)
    assert both.constants.share["ampere"] == pytest.approx(by_rows, rel=0.02)
    moved = dict(vars(both.constants), share=alone.constants.share)
    assert Constants(**moved) == alone.constants
    assert Fitting([many], Reader()).parts, "alone it is fitted on as any table is"

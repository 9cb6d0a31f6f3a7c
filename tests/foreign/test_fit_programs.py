"""`paceline.fit` on strangers' programs: proven and trained as in a plain loop, or refused before it trains."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from foreign_catalogue import ODD_PROGRAMS, OWN_MODELS, Foreign
from foreign_held import BATCH, spec_of
from plain_loop import trained
from runs import steps_of

import paceline
from paceline.errors import PacelineError
from paceline.report.summary import Summary

STEPS = 8
ROWS = {row.name: row for row in (*OWN_MODELS, *ODD_PROGRAMS)}


@pytest.fixture
def ranks_import_these(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [path for path in sys.path if Path(path).is_relative_to(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")]))


def fitted(row: Foreign, folder: Path) -> Summary:
    """Return the report of a run of two ranks."""
    spec = spec_of(row, {"dp_replicate": 2})
    task = dataclasses.replace(spec.task, stop=f"{STEPS} steps")
    return paceline.fit(dataclasses.replace(spec, task=task, run=dataclasses.replace(spec.run, dir=str(folder))))


@pytest.mark.parametrize("name", [
    "GAN", *(pytest.param(name, marks=pytest.mark.deep) for name in (
        "gradient penalty", "slow copy", "distillation", "SyncBatchNorm", "mixture of depths", "outcome")),
])  # fmt: skip
def test_a_program_is_fitted_as_a_plain_loop_trains_it(name: str, tmp_path: Path, ranks_import_these: None) -> None:
    row = ROWS[name]
    summary = fitted(row, tmp_path / "run")
    assert summary.status == "complete" and summary.verification is not None
    plain = trained(row.model, row.arguments, row.data, row.objective, BATCH, STEPS, row.turns)["losses"]
    for step, record in enumerate(steps_of(tmp_path / "run")):
        told = list(record["turns"].values()) if row.turns else [record]
        mine = plain[step * len(told) : (step + 1) * len(told)]
        assert [one["loss"] for one in told] == pytest.approx(mine, rel=2e-4), step + 1


@pytest.mark.parametrize(("name", "said"), [
    ("survival", "not a sum over rows"),
    pytest.param("contrastive (InfoNCE)", "not a sum over rows", marks=pytest.mark.deep),
    pytest.param("a mean of z-losses", "not a sum over rows", marks=pytest.mark.deep),
])  # fmt: skip
def test_a_program_whose_rows_see_each_other_is_not_trained(
    name: str, said: str, tmp_path: Path, ranks_import_these: None
) -> None:
    with pytest.raises(PacelineError, match=said):
        fitted(ROWS[name], tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))

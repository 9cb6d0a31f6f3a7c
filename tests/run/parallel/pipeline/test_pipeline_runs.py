"""A whole run through a pipeline: planned, trained, evaluated, and moved to other layouts by its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from rounding import assert_curves_close
from runs import paceline, records_of, steps_of, write_spec

STAYS = ((1, "", 16),)
MOVES = ((2, "pp = 2", 6), (1, "", 11), (4, 'pp = 2\ndp_shard = 2\nzero = 2\nschedule = "gpipe"', 16))


def train(folder: Path, name: str, starts: tuple[tuple[int, str, int], ...]) -> Path:
    """Train in one run directory, each start on other devices and up to another step."""
    run_dir = folder / name
    for devices, plan, steps in starts:
        spec = write_spec(folder, run_dir, devices, plan, steps, precision="fp64")
        ended = paceline("train", spec, "--set", "run.evaluate_every=5 steps", timeout=200)
        assert ended.returncode == 0, ended.stderr
    return run_dir


@pytest.mark.deep
def test_a_run_moves_into_and_out_of_a_pipeline(tmp_path: Path) -> None:
    stayed, moved = train(tmp_path, "stayed", STAYS), train(tmp_path, "moved", MOVES)
    for ours, theirs in zip(steps_of(moved), steps_of(stayed), strict=True):
        assert ours["sample_ids"] == theirs["sample_ids"], "each once, though both stages read them"
        for number in ("loss", "grad_norm"):
            assert_curves_close([ours[number]], [theirs[number]])
    at = {record["step"]: record["loss"] for record in records_of(stayed, "evaluation")}
    both = [record for record in records_of(moved, "evaluation") if record["step"] in at]
    assert len(both) >= 3
    assert_curves_close([record["loss"] for record in both], [at[record["step"]] for record in both])
    notes = [record["because"] for record in records_of(moved, "decision") if record["what"] == "resume"]
    assert any("resharded from layout pp=2 to single device" in note for note in notes)

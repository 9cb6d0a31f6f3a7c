"""A notice too short for a save: all ranks keep the newest checkpoint, whatever each of them has seen of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Start, Story, told
from test_soak import RUN

from paceline.checkpoint.manifest import read_manifest

TWO, STEPS = {"dp_replicate": 2}, 10
SIGNAL: dict[str, Any] = {"kind": "signal", "rank": 0}
AT_ONCE = {"checkpoints": {"asynchronous": "off"}}  # a save beside training may be given up with its world
# Of one process alone: copies go nowhere else, but all that a run with remote storage does is done.
FAR = {"checkpoints": {**AT_ONCE["checkpoints"], "remote": "memory://far", "remote_every": "4 steps"}}
OFTEN = {**RUN, "checkpoint_every": "4 steps", "check_every": "5 steps"}


def run_with(notice: str, **changes: Any) -> dict[str, Any]:
    return {**OFTEN, "recovery": {**RUN["recovery"], "notice": notice}, **changes}


# A rank that has come anew has seen no save; a start that has made none knows of one by the journal; and one that went
# to memory meanwhile tells nothing of the disk (whose next file is slow in step 4).
STORIES = [
    Story("calm", TWO, run=OFTEN, steps=STEPS),
    Story("anew", TWO, [{"kind": "kill", "step": 5, "rank": 1, "phase": "backward"}, {**SIGNAL, "step": 6},
                        {**SIGNAL, "step": 7}], run_with("1 ms", **FAR), STEPS, how=SURVIVES),
    Story("memory", TWO, [{"kind": "slow_disk", "step": 4, "rank": 0, "seconds": "1500 ms"}, {**SIGNAL, "step": 7}],
          run_with("1 s", checkpoints={"memory_every": "3 steps", **AT_ONCE["checkpoints"]}), STEPS, how=SURVIVES),
    Story("limit", TWO, [{"kind": "stop", "step": 3, "rank": 0, "seconds": "2500 ms"},
                         {"kind": "error", "step": 4, "everywhere": True},
                         {"kind": "stop", "step": 6, "rank": 0, "seconds": "2500 ms"}],
          {**OFTEN, "time_limit": "4 s", "health": {"hang_minimum": "30 s", "hang_still": "30 s"}}, STEPS,
          how=SURVIVES),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notices")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, list[Start]]:
    return told(folder, STORIES)


@pytest.mark.parametrize(("name", "codes"), [("anew", [75, 75, 0]), ("memory", [75, 0])])
def test_the_newest_checkpoint_on_disk_counts_where_a_save_would_not_fit(
    folder: Path, ended: dict[str, list[Start]], name: str, codes: list[int]
) -> None:
    assert [start.code for start in ended[name]] == codes, ended[name]
    kept = [each for each in records_of(folder / name, "decision") if "of this moment" in str(each["from"])]
    assert len(kept) == codes.count(75) and all(each["to"].endswith("step-00000004") for each in kept), kept
    saved = [each["step"] for each in records_of(folder / name, "checkpoint") if not each.get("tier")]
    assert saved == [4, 8, 10]
    names = {read_manifest(each).extra["run"] for each in (folder / name / "checkpoints").glob("step-*")}
    assert len(names) == 1 and (names == {None}) is (name != "anew"), "one run, in whatever processes"
    for what in ("step", "sample_ids"):
        assert [each[what] for each in steps_of(folder / name)] == [each[what] for each in steps_of(folder / "calm")]
    losses = [[each["loss"].hex() for each in steps_of(folder / of)] for of in (name, "calm")]
    assert losses[0] == losses[1]


def test_a_time_limit_is_of_the_call_and_not_of_the_processes_that_a_recovery_starts(
    folder: Path, ended: dict[str, list[Start]]
) -> None:
    codes = [start.code for start in ended["limit"]]
    assert codes[0] == 75 and codes[-1] == 0, ended["limit"]
    first, *_ = [each for each in records_of(folder / "limit", "decision") if each["what"] == "stop"]
    assert "time limit" in first["because"], first

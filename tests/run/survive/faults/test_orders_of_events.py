"""Orders of events that a storm is unlikely to hit: who leaves, who is asked, and who is lost in the same moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from runs import records_of, steps_of
from storm import SURVIVES, Story, told
from survive_runs import here, training
from test_soak import FOUR, RUN, state_of

from paceline.errors import Requeue
from paceline.run.loop.next_world import NextWorld

TWO = {"dp_replicate": 2}


def test_a_rank_that_leaves_as_if_it_were_done_is_a_fault_and_nobody_waits_for_it_for_ever(tmp_path: Path) -> None:
    """Its peers stand by for a next world, which nobody formed: a code of 0 counted as no failure."""
    story = Story("left", TWO, run=RUN, how=SURVIVES, task="leaves as if done")
    (start,) = told(tmp_path, [story], timeout=60)["left"]
    assert start.code == 0, start
    (fault,) = [each for each in records_of(tmp_path / "left", "fault") if each.get("rank") == 1]
    assert "ended with code 0" in fault["what"]
    assert [each["step"] for each in steps_of(tmp_path / "left")] == [*range(1, 9)]


SIX: dict[str, int] = {"dp_replicate": 2, "dp_shard": 3}
SHRINKS: dict[str, Any] = {**RUN, "recovery": {**RUN["recovery"], "min_devices": 2, "max_devices": 6}}
LEAVES_A_SHARD: list[dict[str, Any]] = [{"kind": "kill", "step": 7, "rank": 2, "phase": "backward"}]


def test_a_smaller_world_is_made_of_the_survivors_that_hold_the_whole_state_between_them(tmp_path: Path) -> None:
    """Its ranks were the first of those that were left, and where these lacked a shard the run ended with code 74."""
    stories = [
        Story(f"to {devices}", SIX, LEAVES_A_SHARD, SHRINKS, steps=10, how=SURVIVES, precision="fp64", there_every=5,
              worlds={"6": SIX, str(devices): {"dp_replicate": devices}}, there=[6, devices])
        for devices in (4, 2)
    ]  # fmt: skip
    ended = told(tmp_path, stories, timeout=90)
    for name, lost in (("to 4", 0), ("to 2", 2)):  # two ranks cannot bring three shards: the newest checkpoint is used
        assert [start.code for start in ended[name]] == [0], ended[name]
        (recovery,) = records_of(tmp_path / name, "recovery")
        assert (recovery["rung"], recovery["from_world"], recovery["to_world"]) == ("reform", 6, int(name[-1]))
        assert recovery["steps_lost"] <= lost, recovery
        assert [each["step"] for each in steps_of(tmp_path / name)] == [*range(1, 11)]
    (restore,) = [each for each in records_of(tmp_path / "to 2", "decision") if each["what"] == "restore"]
    assert "1 of the 3 parts" in restore["because"]


def _stops_as_it_is_called(folder: str) -> list[int]:
    """Return after which steps a rank left its world: rank 1 has a signal, and rank 0 alone sees the call already."""
    run, world = training(Path(folder) / "run"), here()
    reformed: list[int] = []

    def left(own: Any) -> bool:
        reformed.append(own.progress.step)
        return False  # the supervisor has no further world: the step ends with Requeue, as a stop does

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextWorld, "_reformed", left)
        patch.setattr(run, "_is_called", lambda: world.is_first)
        if not world.is_first:
            run._stop.because = "SIGTERM"
        batch = next(iter(run))
        with pytest.raises(Requeue):
            run.step(batch)
    return reformed


def test_a_call_that_comes_as_ranks_stop_is_answered_by_all_of_them_or_by_none(tmp_path: Path) -> None:
    """One began a save for the end, the other left for the next world: they met in collectives of different kinds."""
    assert run_ranks(_stops_as_it_is_called, 2, str(tmp_path), timeout_seconds=30) == [[1], [1]]


ASKED: list[dict[str, Any]] = [
    {"kind": "signal", "whom": "supervisor", "step": 5, "rank": 0},
    *({"kind": "kill", "phase": "save", "step": step, "rank": 1} for step in (5, 6)),  # it is heard in one of them
]


def test_a_run_that_loses_a_rank_in_the_save_at_its_stop_is_to_be_started_again(tmp_path: Path) -> None:
    """It ended with the code of the rank, 137, for which no scheduler queues a run that was preempted."""
    story = Story("asked", TWO, ASKED, {**RUN, "checkpoint_every": "3 steps"}, steps=10, how=SURVIVES)
    first, *rest = told(tmp_path, [story], timeout=90)["asked"]
    assert first.code == 75 and "asked to stop" in first.because, first
    assert [start.code for start in rest] == [0], rest
    ended = [(each["status"], each["exit_code"]) for each in records_of(tmp_path / "asked", "run_ended")]
    assert ended == [("requeue", 75), ("complete", 0)]
    assert any("SIGKILL" in each["what"] for each in records_of(tmp_path / "asked", "fault"))
    assert sorted({each["step"] for each in steps_of(tmp_path / "asked")}) == [*range(1, 11)]


KILL: dict[str, Any] = {"kind": "kill"}
AT_ONCE: dict[str, list[dict[str, Any]]] = {
    "a rank, and the only copy of its part as the next world is formed": [
        {**KILL, "step": 5, "rank": 1, "phase": "backward"}, {**KILL, "phase": "load", "rank": 3, "step": 2},
    ],
    "the first rank and another, and a third as the next world is formed": [
        *({**KILL, "step": 5, "rank": rank, "phase": "reduce"} for rank in (0, 2)),
        {**KILL, "phase": "load", "rank": 1, "step": 2},
    ],
    "the supervisor and a rank, and another stands still": [
        {**KILL, "step": 5, "rank": 1, "whom": "supervisor", "phase": "forward"},
        {"kind": "stop", "rank": 3, "step": 5, "phase": "forward"}, {**KILL, "rank": 2, "step": 5, "phase": "forward"},
    ],
    "the supervisor as its ranks save to a slow disk": [
        {"kind": "slow_disk", "step": 6, "rank": 0, "seconds": "1500 ms"},
        {**KILL, "whom": "supervisor", "phase": "save", "step": 6, "rank": 1},
    ],
}  # fmt: skip


@pytest.mark.deep
def test_what_is_lost_at_once_is_made_good(tmp_path: Path) -> None:
    named = {f"lost {number}": faults for number, faults in enumerate(AT_ONCE.values())}
    met = [Story(name, FOUR, faults, RUN, 12, how=SURVIVES) for name, faults in named.items()]
    ended = told(tmp_path, [Story("calm", FOUR, run=RUN, steps=12), *met], timeout=150)
    calm = steps_of(tmp_path / "calm")
    for name, what in zip(named, AT_ONCE, strict=True):
        assert [start.code for start in ended[name]] == [0], (what, ended[name])
        found = steps_of(tmp_path / name)
        assert [step["loss"].hex() for step in found] == [step["loss"].hex() for step in calm], what
        assert [step["sample_ids"] for step in found] == [step["sample_ids"] for step in calm], what
        assert state_of(tmp_path / name) == state_of(tmp_path / "calm"), what
        assert len(records_of(tmp_path / name, "injected")) == len(named[name]), what


@pytest.mark.deep
def test_the_first_rank_and_a_new_one_are_lost_as_a_world_grows(tmp_path: Path) -> None:
    """The world that falls was called for, and had ranks that held nothing yet."""
    grows = {**SHRINKS, "recovery": {**SHRINKS["recovery"], "worth": None}}
    faults = [{**KILL, "phase": "load", "rank": rank, "step": 2} for rank in (0, 5)]
    story = Story("grows", FOUR, faults, grows, 40, how=SURVIVES, worlds={"4": FOUR, "6": SIX}, there=[4, 6],
                  there_every=4)  # fmt: skip
    (start,) = told(tmp_path, [story], timeout=120)["grows"]
    assert start.code == 0, start
    (recovery,) = records_of(tmp_path / "grows", "recovery")
    assert (recovery["rung"], recovery["to_world"], recovery["steps_lost"]) == ("reform", 6, 0), recovery
    assert [each["step"] for each in steps_of(tmp_path / "grows")] == [*range(1, 41)]

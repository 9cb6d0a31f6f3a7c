"""Faults that meet: two or three in one step, of kinds and on ranks that nobody chose, and the run ends as calm."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Start, Story, told
from test_soak import BATCH, DAMAGE, FOUR, LETHAL, MILD, RANKS, RUN, state_of

from paceline.checkpoint import list_checkpoints
from paceline.spec.survive.faults import OF_A_FILE

# Beside what the soak has: what strikes while a world is being formed, all ranks at once, or the supervisor.
FORMING: list[dict[str, Any]] = [
    {"kind": "kill", "phase": "rendezvous"}, {"kind": "kill", "phase": "load"}, {"kind": "error", "phase": "load"},
]  # fmt: skip
OF_ALL: list[dict[str, Any]] = [
    {"kind": "error", "everywhere": True}, {"kind": "stop", "seconds": "100 ms", "everywhere": True},
    {"kind": "disk_full", "everywhere": True},
]  # fmt: skip
OF_STATE: list[dict[str, Any]] = [{"kind": "flip", "target": "optimizer", "phase": "data", "bit": 12}]
OF_THE_SUPERVISOR: list[dict[str, Any]] = [{"kind": "signal", "whom": "supervisor", "phase": "forward"}]
CODES = (0, 1, 3, 4, 6, 75, 137)  # of a bug, memory, ranks that disagree, numbers that are none, a stop, SIGKILL
EVERY = 6  # steps, in which a run saves three times: what two damages take is not all there is


def meetings(count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return the faults of so many meetings, a lethal one in each, and the steps of a run that has all of them."""
    drawn = random.Random(seed)
    others = [*LETHAL, *MILD, *DAMAGE, *DAMAGE, *FORMING, *OF_ALL, *OF_THE_SUPERVISOR, *OF_STATE]
    faults: list[dict[str, Any]] = []
    for number in range(count):
        first = drawn.choice(LETHAL)
        met = [first, *drawn.sample(others, drawn.choice((1, 1, 2)))]
        is_saving = any(each.get("phase") == "save" or each["kind"] in OF_A_FILE for each in met)
        step = EVERY * (number + 1) + (0 if is_saving else 1)  # a checkpoint is made in even steps
        for each in met:
            place = {} if each in FORMING else {"step": step}
            who = {} if each.get("everywhere") else {"rank": drawn.randrange(RANKS)}
            faults.append({**each, **place, **who})
    return faults, EVERY * (count + 1) + 4


def check(folder: Path, count: int, seed: int) -> list[Start]:
    """Hold a run in which faults meet against one without any."""
    faults, steps = meetings(count, seed)
    stories = [Story("calm", FOUR, run=RUN, steps=steps),
               Story("met", FOUR, faults, RUN, steps, seed, most_starts=6 * count, how=SURVIVES)]  # fmt: skip
    ended = told(folder, stories, timeout=60 + 30 * count)
    assert [start.code for start in ended["calm"]] == [0]
    assert ended["met"][-1].code == 0, (faults, ended["met"][-3:])
    assert all(start.code in CODES and (start.what or not start.code or start.code == 75) for start in ended["met"])
    calm, met = steps_of(folder / "calm"), steps_of(folder / "met")
    assert [step["loss"].hex() for step in met] == [step["loss"].hex() for step in calm], faults
    assert [step["sample_ids"] for step in met] == [step["sample_ids"] for step in calm], faults
    read = list(itertools.chain.from_iterable(step["sample_ids"] for step in met))
    assert len(set(read)) == len(read) == steps * BATCH or steps * BATCH > 1000  # an epoch has 1,000 samples
    assert state_of(folder / "met") == state_of(folder / "calm"), faults
    listing = list_checkpoints(folder / "met" / "checkpoints")
    assert listing.complete and not list((folder / "met" / "checkpoints").glob(".partial-*"))
    struck = {record["fault"] for record in records_of(folder / "met", "injected")}
    missed = [each for number, each in enumerate(faults, 1) if number not in struck]
    print(f"seed {seed}: {len(struck)} of {len(faults)} faults in {count} meetings, {len(ended['met'])} starts, "
          f"{len(records_of(folder / 'met', 'recovery'))} recoveries, never struck: {missed}")  # fmt: skip
    return ended["met"]


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 10))])
def test_a_run_comes_through_faults_that_meet(tmp_path: Path, seed: int) -> None:
    check(tmp_path, 3 if seed == 1 else 12, seed)

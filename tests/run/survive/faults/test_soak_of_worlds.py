"""A soak in which the number of processes changes too, from four to six: faults of every kind, one experiment."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from rounding import FP64_TRAINED, assert_curves_close
from runs import records_of, steps_of
from storm import SURVIVES, Story, told
from test_soak import DAMAGE, LETHAL, MILD, RUN

from paceline.checkpoint import find_latest
from paceline.checkpoint.inspect.differ import compare_checkpoints
from paceline.spec.survive.faults import KINDS

# All have whole copies: a flipped bit of a weight that one rank alone holds is found by nobody.
WORLDS = {4: {"dp_replicate": 2, "dp_shard": 2}, 5: {"dp_replicate": 5}, 6: {"dp_replicate": 2, "dp_shard": 3}}
FEWEST, EVERY = min(WORLDS), 7  # steps after which another number of devices is there
OF_THE_SUPERVISOR: list[dict[str, Any]] = [
    {"kind": "kill", "whom": "supervisor"},
    {"kind": "signal", "whom": "supervisor"},
]
OF_NODES, OF_ONE_PROCESS = {"cut", "slow_network"}, {"journal_full"}  # what waits in memory dies with rank 0
RATE = {"lr": 1e-4}  # what rounding of other layouts explains stays in proportion to the length of a run
# The code with which a call ends that meets such a fault. Others are survived, or end the supervisor and leave no code;
# but what fails before the first step of a call is not tried again.
CODES, NO_STEP = {"signal": 75, "oom": 3, "nan": 6, "flip": 4}, "no step was made before it"


def storm(count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return so many faults, one in every second step, and the steps of a run that meets all of them."""
    drawn = random.Random(seed)
    known = [*LETHAL, *MILD, *OF_THE_SUPERVISOR]
    kinds = list(itertools.islice(itertools.cycle(drawn.sample(known, len(known))), count - count // 10))
    for at in range(count // 10):  # older checkpoints are there, and lethal faults follow
        kinds.insert(4 + 9 * at + drawn.randrange(3), DAMAGE[at % 2])
    faults = [  # a checkpoint is made in even steps
        {**each, "step": 5 + 2 * number + (each.get("phase") == "save"), "rank": drawn.randrange(FEWEST)}
        for number, each in enumerate(kinds)
    ]
    return faults, 5 + 2 * count + 4


def check(folder: Path, count: int, seed: int) -> None:
    """Hold a run through a storm in changing worlds against one through none in a world that stays."""
    faults, steps = storm(count, seed)
    drawn = random.Random(seed)
    there = [FEWEST]
    while len(there) * EVERY < steps:
        there.append(drawn.choice([each for each in WORLDS if each != there[-1]]))
    options = {"worlds": WORLDS, "there": there, "there_every": EVERY, "precision": "fp64", "optimizer": RATE}
    run = {**RUN, "recovery": {**RUN["recovery"], "worth": None, "max_devices": max(WORLDS), "min_devices": FEWEST}}
    met = Story("met", WORLDS[FEWEST], faults, run, steps, seed, 4 * count, how=SURVIVES, **options)
    calm = Story("calm", WORLDS[FEWEST], run=RUN, steps=steps, precision="fp64", optimizer=RATE)
    ended = told(folder, [calm, met], timeout=60 + 15 * count)
    assert [start.code for start in ended["calm"]] == [0]
    assert ended["met"][-1].code == 0, ended["met"][-3:]
    codes = Counter(CODES[each["kind"]] for each in faults if each["kind"] in CODES)
    assert Counter(start.code for start in ended["met"] if NO_STEP not in start.because) == codes + Counter([0])
    expected, found = steps_of(folder / "calm"), steps_of(folder / "met")
    assert [step["sample_ids"] for step in found] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found], [step["loss"] for step in expected])
    newest = [find_latest(folder / name / "checkpoints") for name in ("calm", "met")]
    assert newest[0] and newest[1]
    apart = compare_checkpoints(newest[0], newest[1])
    assert not apart.only_first and not apart.only_second
    assert all(change.relative is not None and change.relative <= FP64_TRAINED for change in apart.changed), apart
    struck = Counter((record["fault"], record["what"]) for record in records_of(folder / "met", "injected"))
    assert struck == Counter({(number, str(each["kind"])): 1 for number, each in enumerate(faults, 1)})
    hangs = [each for each in faults if each["kind"] == "stop" and "seconds" not in each]
    assert sum("hung" in fault["what"] for fault in records_of(folder / "met", "fault")) == len(hangs)
    recoveries = records_of(folder / "met", "recovery")
    worlds = Counter((each["from_world"], each["to_world"]) for each in recoveries)
    sizes = {size for pair in worlds for size in pair}
    kinds = len({each["kind"] for each in faults})
    print(f"{count} faults of {kinds} kinds, {steps} steps, {len(recoveries)} recoveries",
          f"(worlds of {sorted(sizes)}, {sum(n for (a, b), n in worlds.items() if a != b)} changes),",
          f"{len(ended['met'])} calls, {sum(start.seconds for start in ended['met']):.0f} s")  # fmt: skip
    assert sizes == set(WORLDS) or count < 40
    # Of few faults most end a call. A world that fell before its first step shows as what the next one came from.
    chains = defaultdict(list)
    for record in (*records_of(folder / "met", "run_started"), *recoveries):
        names = ("world_size",) if "world_size" in record else ("from_world", "to_world")
        chains[record["attempt"]] += [record[name] for name in names]
    changes = sum(before != after for chain in chains.values() for before, after in itertools.pairwise(chain))
    assert changes >= (1 if count < 40 else count // 10)


@pytest.mark.parametrize(
    ("count", "seed"), [(10, 10), *(pytest.param(count, count, marks=pytest.mark.deep) for count in (40, 300))]
)
def test_a_run_comes_through_a_storm_in_changing_worlds(tmp_path: Path, count: int, seed: int) -> None:
    check(tmp_path, count, seed)


def test_the_storm_has_every_kind_that_a_machine_can_have() -> None:
    faults, _ = storm(40, 40)
    assert {each["kind"] for each in faults} == set(KINDS) - OF_NODES - OF_ONE_PROCESS
    assert {each.get("whom", "rank") for each in faults} == {"rank", "supervisor"}

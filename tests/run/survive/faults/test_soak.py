"""The soak: one run through a storm of faults of every kind, which must end as the run that met none."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import records_of, steps_of
from storm import SURVIVES, Story, told

from paceline.checkpoint import find_latest, read_manifest
from paceline.report.summary import summarise
from paceline.session.verbs.simulation import hold_against
from paceline.spec.journal.reading import read_journal
from paceline.spec.survive.faults import KINDS

FOUR = {"dp_replicate": 2, "dp_shard": 2}
RANKS, BATCH = 4, 13
RUN = {
    "keep_last": 8, "checkpoint_every": "2 steps", "redact": [],
    "health": {"hang_minimum": "500 ms", "hang_factor": 4.0},
    "recovery": {"retries": 1000, "preemption_retries": 1000},
}  # fmt: skip
# What ends a start: the supervisor goes on by itself after some, and the run is started again after the others.
LETHAL: list[dict[str, Any]] = [
    *({"kind": "kill", "phase": phase} for phase in ("data", "forward", "backward", "reduce", "update", "save")),
    *({"kind": "stop", "phase": phase} for phase in ("forward", "reduce")),
    *({"kind": "error", "phase": phase} for phase in ("forward", "update", "save")),
    {"kind": "oom"}, {"kind": "signal"}, {"kind": "signal", "signal": "SIGUSR1"}, {"kind": "nan"},
    {"kind": "nan", "target": "weight", "phase": "data"},
    {"kind": "flip", "target": "weight", "phase": "data", "bit": 12},
    {"kind": "flip", "phase": "update", "bit": 20},
]  # fmt: skip
MILD: list[dict[str, Any]] = [
    {"kind": "delay", "seconds": "50 ms"}, {"kind": "slow", "factor": 2.0, "steps": 2},
    {"kind": "stop", "seconds": "100 ms"}, {"kind": "disk_full"}, {"kind": "read_only"},
    {"kind": "slow_disk", "seconds": "300 ms"},
    {"kind": "descriptors", "seconds": "50 ms"},
]  # fmt: skip
DAMAGE: list[dict[str, Any]] = [{"kind": "corrupt"}, {"kind": "truncate"}]


def storm(count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """Return so many faults, one in every second step or fewer, and the steps of a run that meets all of them.

    A checkpoint is damaged only where older ones are there, and lethal faults follow it.
    """
    drawn = random.Random(seed)
    wanted, known = max(0, count - count // 10), [*LETHAL, *MILD]
    kinds = (
        list(itertools.islice(itertools.cycle(known), wanted)) if wanted >= len(known) else drawn.sample(known, wanted)
    )
    drawn.shuffle(kinds)
    for at in range(count // 10):
        kinds.insert(4 + 9 * at + drawn.randrange(3), DAMAGE[at % 2])
    faults = [  # a checkpoint is made in even steps
        {**each, "step": 5 + 2 * number + (each.get("phase") == "save"), "rank": drawn.randrange(RANKS)}
        for number, each in enumerate(kinds)
    ]
    return faults, 5 + 2 * len(faults) + 4


def state_of(run_dir: Path) -> list[tuple[str, str]]:
    """Return the digests of all that the last checkpoint holds: weights and the optimizer's state."""
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None
    files = read_manifest(newest).files
    return sorted((name, entry.sha256) for name, entry in files.items() if name.endswith(".safetensors"))


def check(folder: Path, count: int, seed: int, clock_moves: bool) -> None:
    """Hold a run through a storm against one through none, with a clock that shows other days again and again."""
    faults, steps = storm(count, seed)
    storms = Story("storm", FOUR, faults, RUN, steps, seed, 4 * count, how=SURVIVES, clock_moves=clock_moves)
    stories = [Story("calm", FOUR, run=RUN, steps=steps), storms]
    ended = told(folder, stories, timeout=60 + 12 * count)
    assert [start.code for start in ended["calm"]] == [0]
    assert ended["storm"][-1].code == 0, ended["storm"][-3:]
    calm, stormy = steps_of(folder / "calm"), steps_of(folder / "storm")
    assert [step["loss"].hex() for step in stormy] == [step["loss"].hex() for step in calm]
    assert state_of(folder / "storm") == state_of(folder / "calm")
    read = list(itertools.chain.from_iterable(step["sample_ids"] for step in stormy))
    assert len(set(read)) == len(read) == steps * BATCH or steps * BATCH > 1000  # an epoch has 1,000 samples
    assert [step["sample_ids"] for step in stormy] == [step["sample_ids"] for step in calm]
    struck = Counter((record["fault"], record["what"]) for record in records_of(folder / "storm", "injected"))
    assert struck == Counter({(number, str(each["kind"])): 1 for number, each in enumerate(faults, 1)})
    named = records_of(folder / "storm", "fault")
    hangs = [each for each in faults if each["kind"] == "stop" and "seconds" not in each]
    assert sum("hung" in fault["what"] for fault in named) == len(hangs)
    recoveries = Counter(record["rung"] for record in records_of(folder / "storm", "recovery"))
    ends = recoveries.total() + len(ended["storm"]) - 1
    lethal = [each for each in faults if {k: v for k, v in each.items() if k not in ("step", "rank")} in LETHAL]
    print(f"{len(faults)} faults of {len({each['kind'] for each in faults})} kinds, {ends} worlds after the first",
          f"({', '.join(f'{rung} {number}' for rung, number in recoveries.items())}),",
          f"{len(ended['storm'])} calls, {sum(start.seconds for start in ended['storm']):.0f} s")  # fmt: skip
    assert ends == len(lethal)


def clock_is_taken_out(run_dir: Path) -> None:
    """Hold what a run says that it took, which is seconds and minutes, where its clock was set by days."""
    moves = [abs(each["moved"]) for each in records_of(run_dir, "clock")]
    assert max(moves) > 80_000, "the clock was set, and that is on record"
    assert all(each["seconds"]["total"] < 600 for each in records_of(run_dir, "recovery"))
    assert summarise(list(read_journal(run_dir))).goodput.wall_seconds < 3600


def hold_to_the_simulator(run_dir: Path) -> None:
    """Print a storm beside its simulation. Its faults come evenly, which those that are simulated do at random."""
    held = hold_against(run_dir)
    measured, simulated = held.measured, held.simulated
    share = measured.useful_seconds / measured.exposed_seconds
    goodput, wall, seconds = simulated.goodput, simulated.wall, measured.exposed_seconds
    print(f"goodput {share:.1%} where {goodput.mean:.1%} ({goodput.p10:.1%} to {goodput.p90:.1%}) is simulated;",
          f"{seconds:.1f} s where {wall.mean:.1f} s ({wall.p10:.1f} to {wall.p90:.1f}) is")  # fmt: skip
    assert wall.p10 / 1.5 < seconds < wall.p90 * 1.5


@pytest.mark.parametrize("count", [12, pytest.param(27, marks=pytest.mark.deep)])
def test_a_run_comes_through_a_storm_as_through_a_calm(tmp_path: Path, count: int) -> None:
    """27 have every kind. With half of them what is tried is that runs go on again and again; kinds: test_faults.py."""
    check(tmp_path, count, seed=1, clock_moves=True)
    clock_is_taken_out(tmp_path / "storm")


@pytest.mark.deep
def test_a_run_comes_through_three_hundred_faults(tmp_path: Path) -> None:
    check(tmp_path, 300, seed=2, clock_moves=False)
    hold_to_the_simulator(tmp_path / "storm")  # by the clock, which says little of 27 faults on a busy machine


def test_a_storm_has_faults_of_every_kind() -> None:
    of_nodes, of_one_process = {"cut", "slow_network"}, {"journal_full"}  # what waits in memory dies with rank 0
    assert {each["kind"] for each in storm(27, 1)[0]} == set(KINDS) - of_nodes - of_one_process

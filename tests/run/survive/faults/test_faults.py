"""Faults that are made on purpose: each kind strikes where it is planned, once, and the run lives through it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from runs import records_of, steps_of
from storm import SURVIVES, Story, Told, told

from paceline.checkpoint import find_latest, read_manifest
from paceline.errors import ConfigError
from paceline.run.survive.faults.draws import draw, is_due, is_struck
from paceline.run.survive.faults.ledger import Ledger
from paceline.run.survive.faults.storage import damage, newest_file
from paceline.run.survive.faults.values import spoiled
from paceline.spec.load import parse_spec, spec_from_dict, spec_to_dict
from paceline.spec.survive.faults import KINDS, OF_A_FILE, FaultSpec, read_faults

TWO, STEPS = {"dp_replicate": 2}, 8
AT_ONCE = {"checkpoints": {"asynchronous": "off"}}  # so that it is known which checkpoint is the newest in a step

# What is planned, with which code the first start ends, and what is told of it. 0: the run goes through it.
KINDS_TRIED: dict[str, tuple[dict[str, object], int, str]] = {
    "kill": ({"kind": "kill", "step": 3, "phase": "backward"}, 137, "was ended by SIGKILL"),
    "stop": ({"kind": "stop", "step": 4, "phase": "reduce"}, 137, "hung reducing gradients over the ranks of step 4"),
    "moment": ({"kind": "stop", "step": 4, "seconds": "300 ms"}, 0, ""),
    "signal": ({"kind": "signal", "step": 3}, 75, ""),
    "slow": ({"kind": "slow", "step": 2, "steps": 3}, 0, ""),
    "delay": ({"kind": "delay", "step": 3, "seconds": "200 ms"}, 0, ""),
    "error": ({"kind": "error", "step": 3, "phase": "update"}, 1, "RuntimeError: fault 1 (error) was made on purpose"),
    "oom": (
        {"kind": "oom", "step": 3},
        3,
        "out of memory on rank 1 of 2, in the forward",
    ),
    "nan": ({"kind": "nan", "step": 3}, 6, "step 3: loss"),
    "nan weight": ({"kind": "nan", "step": 3, "phase": "data", "target": "weight"}, 6, "step 3: loss nan"),
    "flip": ({"kind": "flip", "step": 3, "phase": "update", "bit": 20}, 4, "step 3: ranks 0 and 1 no longer agree"),
    "flip weight": ({"kind": "flip", "step": 3, "phase": "data", "target": "weight", "bit": 3}, 4, "no longer agree"),
    "descriptors": ({"kind": "descriptors", "step": 3, "seconds": "200 ms"}, 0, ""),
    "rendezvous": ({"kind": "kill", "phase": "rendezvous"}, 137, "was ended by SIGKILL"),
    "load": ({"kind": "error", "phase": "load"}, 1, "was made on purpose"),
}


# Others strike in the same place or go through as these do, and the storm of test_soak.py draws of all kinds.
ALIKE = ("slow", "delay", "nan weight", "flip weight", "descriptors", "load")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def starts(folder: Path) -> Told:
    # A machine under load must still give the rank that waits the time to come to where it waits.
    minimum = {"stop": "4 s"}
    stories = [
        Story(
            name,
            TWO,
            [{"rank": 1, **fault}],
            {"health": {"hang_minimum": minimum.get(name, "500 ms"), "hang_factor": 3.0}},
        )
        for name, (fault, _, _) in KINDS_TRIED.items()
    ]
    always = [story for story in stories if story.name not in ALIKE]
    return Told(folder, [Story("none", TWO), *always], [story for story in stories if story.name in ALIKE], 150)


def digest(run_dir: Path) -> object:
    """Return what tells the state of the newest checkpoint from others."""
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None
    files = read_manifest(newest).files
    return newest.name, sorted((name, entry.sha256) for name, entry in files.items() if name.endswith(".safetensors"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.deep] * (name in ALIKE)) for name in KINDS_TRIED]
)
def test_a_fault_strikes_once_and_the_run_ends_as_if_it_had_not(folder: Path, starts: Told, name: str) -> None:
    fault, code, what = KINDS_TRIED[name]
    first, *rest = starts[name]
    assert first.code == code and what in first.what, first
    assert [start.code for start in rest] == ([0] if code else [])
    (strike,) = records_of(folder / name, "injected")
    assert (strike["fault"], strike["what"], strike["rank"]) == (1, fault["kind"], 1)
    if code not in (0, 75) and fault.get("phase") not in ("rendezvous", "load"):  # before there is a journal
        assert records_of(folder / name, "fault") and records_of(folder / name, "run_ended")[0]["exit_code"] == code
    undisturbed, found = steps_of(folder / "none"), steps_of(folder / name)
    assert [step["loss"].hex() for step in found] == [step["loss"].hex() for step in undisturbed]
    assert [step["sample_ids"] for step in found] == [step["sample_ids"] for step in undisturbed]
    assert digest(folder / name) == digest(folder / "none")


def test_a_rank_that_waits_for_one_that_hangs_tells_its_last_collectives(folder: Path, starts: Told) -> None:
    """Torch's own record, dumped by a thread while the main one waits in gloo; one that is stopped cannot answer."""
    (hang,) = (folder / "stop" / "hangs").iterdir()
    waits, stopped = (json.loads((hang / f"rank-{rank}.flight.json").read_text()) for rank in (0, 1))
    assert stopped == {"missing": "the rank did not answer"}
    # A save beside training has a group of its own, in which it may wait too, or be done: what counts is the world's.
    last = [each for each in waits["entries"] if each["process_group"][1] == "default_pg"][-1]
    assert last["profiling_name"].startswith("gloo:") and not last["retired"] and last["collective_seq_id"] > 0
    # A save that was published when the rank stopped may be told of too.
    (told,) = [each for each in records_of(folder / "stop", "fault") if "evidence" in each]
    by_rank = {each["rank"]: each for each in told["evidence"]["ranks"]}
    assert list(by_rank[0]["reached"].values())[-1][0] > 0 and by_rank[1]["reached"] == {}


def test_who_waits_to_meet_a_rank_that_died_before_it_came_is_not_waited_for(tmp_path: Path) -> None:
    """It holds nothing, and hears nothing: a node that is lost while its ranks import cost all others their grace."""
    early, run = {"kind": "kill", "phase": "rendezvous", "rank": 1}, {"recovery": {"preemption_retries": 9}}
    story = Story("early", TWO, [early], run, how=SURVIVES, endless=True)
    (start,) = told(tmp_path, [story])["early"]
    assert start.code == 0
    (recovery,) = records_of(tmp_path / "early", "recovery")
    assert (recovery["rank"], recovery["step"], recovery["steps_lost"]) == (1, 0, 0)
    assert [step["step"] for step in steps_of(tmp_path / "early")] == list(range(1, 9))


def test_without_faults_nothing_of_them_exists(folder: Path, starts: Told) -> None:
    assert [start.code for start in starts["none"]] == [0]
    assert not (folder / "none" / "faults").exists() and not (folder / "none" / "hangs").exists()
    assert not records_of(folder / "none", "injected") and not records_of(folder / "none", "fault")


def test_a_fault_aimed_at_the_supervisor_ends_all_and_the_next_start_goes_on(tmp_path: Path) -> None:
    fault = {"kind": "kill", "rank": 0, "step": 5, "whom": "supervisor"}
    (start,) = told(tmp_path, [Story("orphans", TWO, [fault])])["orphans"]  # the first left no word
    assert start.code == 0
    assert [record["resumed_from"] is None for record in records_of(tmp_path / "orphans", "run_started")] == [
        True,
        False,
    ]
    assert [step["step"] for step in steps_of(tmp_path / "orphans")] == list(range(1, STEPS + 1))


def test_storage_that_fails_and_files_that_are_damaged_cost_no_sample(tmp_path: Path) -> None:
    """A save that fails ends the run or not, as checkpoints decide; a damaged one is never loaded."""
    damaged = [{"kind": kind, "step": 5, "rank": 0} for kind in ("corrupt", "truncate")]
    then = {"kind": "kill", "step": 6, "rank": 1, "phase": "data"}
    stories = [
        Story("none", TWO),
        *(Story(kind, TWO, [{"kind": kind, "step": 4, "rank": 0, "seconds": "200 ms"}]) for kind in OF_A_FILE),
        *(Story(str(each["kind"]), TWO, [each, then], AT_ONCE) for each in damaged),
    ]
    ended = told(tmp_path, stories)
    for story in stories:
        assert ended[story.name][-1].code == 0, ended[story.name]
        assert len(records_of(tmp_path / story.name, "injected")) == len(story.faults)
        assert digest(tmp_path / story.name)[1] == digest(tmp_path / "none")[1]  # type: ignore[index]
        assert [step["step"] for step in steps_of(tmp_path / story.name)] == list(range(1, STEPS + 1))
    for each in damaged:
        last = records_of(tmp_path / str(each["kind"]), "run_started")[-1]
        assert last["step"] == 2, "the checkpoint of step 4 is damaged, and that of step 2 is taken"


# ---- when, whom, how often ------------------------------------------------------------------------------------------


def test_draws_are_a_function_of_the_plan_and_the_step() -> None:
    fault = FaultSpec(kind="kill", rate=0.1)
    struck = [step for step in range(1, 1001) if is_due(fault, 1, 7, step)]
    assert struck == [step for step in range(1, 1001) if is_due(fault, 1, 7, step)] and 60 < len(struck) < 150
    assert struck != [step for step in range(1, 1001) if is_due(fault, 1, 8, step)]
    ranks = [[rank for rank in range(4) if is_struck(fault, 1, 7, step, rank, 4)] for step in struck]
    assert all(len(each) == 1 for each in ranks) and {each[0] for each in ranks} == {0, 1, 2, 3}
    assert all(is_struck(FaultSpec(everywhere=True), 1, 7, 3, rank, 4) for rank in range(4))
    assert draw(1, 2, 3) == draw(1, 2, 3) != draw(1, 2, 4)


def test_the_ledger_lets_a_fault_strike_as_often_as_it_may(tmp_path: Path) -> None:
    once, twice, ever = FaultSpec(), FaultSpec(times=2, rate=0.5), FaultSpec(times=0, rate=0.5)
    again = FaultSpec(again=True, times=3, step=5)
    assert [Ledger(tmp_path).note(1, once, 0, step, "data") for step in (5, 5, 6)] == [True, False, False]
    assert [Ledger(tmp_path).note(2, twice, 0, step, "data") for step in (5, 5, 6, 7)] == [True, False, True, False]
    assert [Ledger(tmp_path).note(3, ever, 0, step, "data") for step in (5, 5, 6, 7)] == [True, False, True, True]
    assert [Ledger(tmp_path).note(4, again, 1, 5, "data") for _ in range(4)] == [True, True, True, False]
    everywhere = [Ledger(tmp_path).note(5, FaultSpec(everywhere=True), rank, 5, "data") for rank in (0, 1)]
    assert everywhere == [True, True]
    cut = next(tmp_path.glob("faults/001-*.json"))
    cut.write_text("")  # killed while it wrote
    assert not Ledger(tmp_path).note(1, once, 0, 5, "data")
    assert len(Ledger(tmp_path).strikes()) == 11


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_flipped_bit_is_one_bit(dtype: torch.dtype) -> None:
    whole = torch.linspace(-2, 2, 64, dtype=dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()]
    for bit in range(8 * whole.element_size()):
        changed = spoiled(whole, "flip", bit, 0.4, 0.0).view(integers) ^ whole.view(integers)
        (where,) = changed.nonzero().flatten().tolist()
        assert where == int(0.4 * 64) and changed[where].item() % 2 ** (8 * whole.element_size()) == 1 << bit
    assert spoiled(whole, "nan", -1, 0.0, 0.0).isnan().sum() == 1


def test_damage_is_done_to_what_is_published(tmp_path: Path) -> None:
    assert newest_file(tmp_path) is None
    for name in (".partial-1", "step-00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard.safetensors").write_bytes(bytes(1000))
    path = newest_file(tmp_path)
    assert path is not None and path.parent.name == "step-00000001"
    damage(path, "corrupt", 0.5)
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    damage(path, "truncate", 0.0)
    assert path.stat().st_size == 500
    path.unlink()
    damage(path, "corrupt", 0.5)  # it has gone with its checkpoint
    assert newest_file(tmp_path) is None and not path.exists()


def test_what_is_removed_while_the_newest_file_is_looked_for_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other ranks do it: a save under way that is published, and a checkpoint that is pruned."""
    for name in (".partial-1", "step-00000001", "step-00000002", "step-00000003"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard.safetensors").write_bytes(bytes(1000))
    walk = os.walk

    def removed(below: Path) -> Iterator[tuple[str, list[str], list[str]]]:
        for number, found in enumerate(walk(below)):
            if number == 0:
                shutil.rmtree(tmp_path / "step-00000002")  # before it is entered
            if found[0].endswith("step-00000003"):
                shutil.rmtree(found[0])  # after it was listed
            yield found

    monkeypatch.setattr(os, "walk", removed)
    assert newest_file(tmp_path) == tmp_path / "step-00000001" / "shard.safetensors"


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_a_plan_is_one_thing_in_a_file_in_python_and_in_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "faults.toml"
    path.write_text('seed = 3\n[[each]]\nkind = "stop"\nstep = 5\nseconds = "2 s"\n')
    plan = read_faults(path)
    assert plan.seed == 3 and plan.each == (FaultSpec(kind="stop", step=5, seconds="2 s"),)
    assert read_faults({"seed": 3, "each": [{"kind": "stop", "step": 5, "seconds": "2 s"}]}) == plan
    spec = parse_spec('[run.faults]\nseed = 3\n[[run.faults.each]]\nkind = "stop"\nstep = 5\nseconds = "2 s"\n')
    assert spec.run.faults == plan and spec_from_dict(json.loads(json.dumps(spec_to_dict(spec)))).run.faults == plan


@pytest.mark.parametrize(
    ("fault", "because"),
    [
        ({"kind": "kill"}, "neither a step nor a rate"),
        ({"kind": "oom", "step": 1, "whom": "supervisor"}, "only kill, stop, signal"),
        ({"kind": "slow", "step": 1, "phase": "data"}, "its place is reduce"),
        ({"kind": "disk_full", "step": 1, "phase": "update"}, "its place is a save"),
        ({"kind": "delay", "step": 1}, "its seconds are 0"),
        ({"kind": "explode", "step": 1}, "it takes one of"),
        ({"kind": "kill", "step": 1, "moment": 2}, "unknown key 'each.1.moment'"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused(fault: dict[str, object], because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        read_faults([fault])


def test_every_kind_is_tried_here() -> None:
    tried = {str(fault["kind"]) for fault, _, _ in KINDS_TRIED.values()}
    elsewhere = {"cut", "slow_network", "journal_full"}  # test_network_faults.py, test_storage_failures.py
    assert set(KINDS) - tried == {*OF_A_FILE, "corrupt", "truncate", *elsewhere}
    guide = (Path(__file__).parents[4] / "docs" / "guide" / "run" / "health.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"`{kind}`" not in guide] == []
    assert errno.ENOSPC != errno.EROFS

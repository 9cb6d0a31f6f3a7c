"""Silent corruption: a flipped bit that no norm shows is found, and the rank that computed it is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import records_of, steps_of
from storm import Story, Told
from survive_runs import training

from paceline.errors import ConfigError
from paceline.run.process.world import World
from paceline.run.survive.health.second_look import SecondLook
from paceline.run.survive.survivor import Brought
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.survive.health import HealthSpec
from paceline.units import Amount

LOOKS = {"health": {"recompute_every": "2 steps"}}
FLIP = {"kind": "flip", "bit": 0, "step": 4, "rank": 1}  # the last place of one number
LAYOUTS = {"shards": {"dp_shard": 2}, "copies": {"dp_replicate": 2}, "both": {"dp_shard": 2, "tp": 2}}
NAMES = ["shards", pytest.param("copies", marks=pytest.mark.deep), "both"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("looks")


@pytest.fixture(scope="module")
def starts(folder: Path) -> Told:
    stories = []
    for name, layout in LAYOUTS.items():
        rows = 2 if name == "shards" else 4  # so that the bit that is missed shows in a loss
        stories += [Story(f"{name} unseen", layout, micro_batch=rows),
                    Story(f"{name} sound", layout, run=LOOKS, micro_batch=rows),
                    Story(f"{name} flipped", layout, [FLIP], LOOKS, only_once=True, micro_batch=rows)]  # fmt: skip
    stories += [Story("missed", LAYOUTS["shards"], [{**FLIP, "step": 5}], LOOKS, micro_batch=2)]
    alike = [story for story in stories if story.name.startswith("copies")]
    return Told(folder, [story for story in stories if story not in alike], alike, 90)


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_device_changes_nothing(folder: Path, starts: Told, name: str) -> None:
    assert [start.code for start in starts[f"{name} sound"]] == [0], starts[f"{name} sound"]
    sound, unseen = steps_of(folder / f"{name} sound"), steps_of(folder / f"{name} unseen")
    assert [step["loss"].hex() for step in sound] == [step["loss"].hex() for step in unseen]
    (cost,) = [each for each in records_of(folder / f"{name} sound", "decision") if each["what"] == "recompute"]
    assert 0 < cost["evidence"]["share"] < 1 and "every 2 steps" in cost["to"]


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found_and_its_rank_is_named(folder: Path, starts: Told, name: str) -> None:
    (start,) = starts[f"{name} flipped"]
    who = "ranks 0, 1" if name == "both" else "rank 1"  # ranks of a tensor-parallel group compute together
    assert start.code == 4 and f"step 4: {who} computed a micro-batch twice" in start.what, start
    assert "the bits of the gradient of" in start.what
    (end,) = records_of(folder / f"{name} flipped", "run_ended")
    assert end["error"]["names_ranks"], "who tells it is another one, and was named beside them"


def test_what_strikes_between_two_looks_is_not_seen(folder: Path, starts: Told) -> None:
    """What a sample of steps cannot do, and the page says so: the run goes on with other bits."""
    assert [start.code for start in starts["missed"]] == [0]
    found, unseen = steps_of(folder / "missed"), steps_of(folder / "shards unseen")
    assert [step["loss"] for step in found][:5] == [step["loss"] for step in unseen][:5]
    assert [step["loss"] for step in found][6:] != [step["loss"] for step in unseen][6:]


def test_where_equal_numbers_may_have_other_bits_it_is_refused() -> None:
    plan = Plan(Layout(pp=2), micro_batch=1, accumulation=2, batch_samples=2)
    with pytest.raises(ConfigError, match="a stage of a pipeline"):
        SecondLook(1, plan, World(0, 2, 0, torch.device("cpu")), True)
    with pytest.raises(ConfigError, match="another order at every call"):
        SecondLook(1, plan, World(0, 2, 0, torch.device("cuda")), False)


def test_what_a_look_costs_is_told_once_for_all_worlds_of_a_layout(tmp_path: Path) -> None:
    run = training(tmp_path, health=HealthSpec(recompute_every=Amount(1, "steps")))
    for batch in run:
        if run.step(batch).step in (3, 5):
            run.save()
            run.take_down()
            run._enter(Brought(None, None, True))
    told = [record for record in records_of(tmp_path, "decision") if record["what"] == "recompute"]
    assert len(told) == 1 and run.progress.step > 5

"""The family of a difference in a whole run follows from what differs, not from what it is called."""

from __future__ import annotations

import torch

from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import FirstDifference
from paceline.verify.compare.diagnosis import Diagnosis, told
from paceline.verify.compare.difference import Difference
from paceline.verify.story.cause import caused
from paceline.verify.story.plans import Act
from paceline.verify.story.reference import in_the_journal

LOSS = Difference("loss", "loss", 2, 0, 0.5, 2.0, 1.0, 0.5)


def family(difference: Difference, name: str) -> str:
    world = World(0, 2, 0, torch.device("cpu"))
    act = Act(Plan(Layout(dp_replicate=2)), world, 1, (4, 4, 4))
    first = told(difference, [difference], Diagnosis("labels", "another loss"))
    named = FirstDifference(**{**vars(first), "name": name})
    found = caused(named, act)
    assert found is not None
    return found.family


def test_a_number_of_the_journal_is_known_by_its_field() -> None:
    recorded = in_the_journal(LOSS)
    assert family(recorded, recorded.name) == family(recorded, "loss on record") == "record"
    assert family(LOSS, "loss") == family(LOSS, "loss in the journal") == "labels"

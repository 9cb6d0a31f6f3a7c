"""All planted mistakes that a proof must catch, and the proofs of them."""

from __future__ import annotations

from typing import Any

import planted
import planted_axes
import planted_experts
import pytest
from planted import Plant, nothing
from tests_shared import SEQ_LEN

from paceline.run.world import World, join_world
from paceline.verify.compare import compare

PROOFS = [*planted.PROOFS, *planted_axes.AXIS_PROOFS, *planted_experts.EXPERT_PROOFS]
PLANS = {**planted.PLANS, **planted_axes.AXIS_PLANS, **planted_experts.EXPERT_PLANS}
CONTROLS = [case for case in PLANS if case != "batch norm"]
TASKS = {
    **dict.fromkeys(planted.PLANS, planted.task_of),
    **dict.fromkeys(planted_axes.AXIS_PLANS, planted_axes.task_of),
    **dict.fromkeys(planted_experts.EXPERT_PLANS, planted_experts.task_of),
}
STEPS = 2


def prove(case: str, plant: Plant, world: World) -> dict[str, Any]:
    """Return the proof of a case with a mistake planted. Every rank calls it."""
    task = TASKS[case](case)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, world)
        return compare(task, PLANS[case], world, task.data, SEQ_LEN, STEPS)


def prove_all(ranks: int) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the proofs of all planted mistakes (by what is planted) and of the controls that this world can run."""
    world = join_world("cpu", threads=1)
    found = {bug.what: prove(bug.case, bug.plant, world) for bug in PROOFS if PLANS[bug.case].layout.devices == ranks}
    controls = {case: prove(case, nothing, world) for case in CONTROLS if PLANS[case].layout.devices == ranks}
    return found, controls

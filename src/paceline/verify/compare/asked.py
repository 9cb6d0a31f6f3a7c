"""What a check is asked to hold against one device: a task under a plan, and the model of that one device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.protocol import Source
from paceline.verify.reference.passes import reference_model
from paceline.verify.reference.plain_attention import attend_plainly
from paceline.verify.reference.plain_parts import add_plainly
from paceline.verify.rounding.conditioning import Move, Narrowest, moved_by_one_ulp
from paceline.verify.rounding.narrow import narrowest_format


@dataclass(frozen=True)
class Asked:
    """A comparison that is asked for: a task under a plan against the same task on one device, over `steps` steps.

    `plain` has the reference compute attention by products and a softmax that are written out.
    """

    task: Task
    plan: Plan
    source: Source
    items_per_sample: int
    steps: int = 1
    plain: bool = False

    def in_format(self, precision: str) -> Asked:
        """Return the same comparison with its plan in another precision."""
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, precision=precision))

    def model(self, move: Move | None = None) -> nn.Module:
        """Return the reference's model with its initial weights, or with these moved."""
        dtype = MASTER_DTYPES[self.plan.precision]
        model = reference_model(self.task, self.source, self.items_per_sample, dtype)
        add_plainly(model)
        if self.plain:
            attend_plainly(model)
        if move is not None:
            moved_by_one_ulp(model, *move)
        return model

    def narrowest(self) -> Narrowest:
        """Return the narrowest format that the reference's model computes in."""
        return narrowest_format(self.model(), self.task, self.plan, self.source)

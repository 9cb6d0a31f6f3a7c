"""A first look at a user's model, on a micro-batch before the split: what the model draws and reads, where it cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import AnyObjective, in_model_precision
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.survey import survey_all
from paceline.run.parallel.context.part_check import check_parts
from paceline.run.parallel.context.zigzag import SequencePart
from paceline.run.parallel.entry import call
from paceline.run.parallel.pipeline.stage_check import check_chain
from paceline.run.parallel.split_check import SplitCheck
from paceline.run.process.groups import Mesh
from paceline.run.record.remarks import look_remark
from paceline.spec.plan import Plan
from paceline.task.declared import declared_rules
from paceline.task.entries_read import unread_remark
from paceline.task.models.huggingface.interface import is_transformers


class FirstLook:
    """What a model of nobody's knowledge shows: `survey` of its random numbers, `remarks` on what is without effect."""

    def __init__(
        self,
        model: nn.Module,
        objectives: Sequence[AnyObjective],
        main: int,
        example: MicroBatch,
        plan: Plan,
        device: torch.device,
    ) -> None:
        """Run the objectives on two samples of the example and on three; `main` is the one that remarks name.

        `model` is what is looked at: the task's, or one of its kind that computes where that has no weights yet.
        """
        self._model, self._example, self._plan, self._device = model, example, plan, device
        self._data = in_model_precision(example.data, plan)
        self.survey = survey_all(model, objectives, self._data, device)
        self.remarks = [*unread_remark(objectives[main], self.survey.unread), *look_remark(self.survey)]

    def checked(
        self, objective: AnyObjective, take_part: object, mesh: Mesh | None, randomness: SampleRandomness
    ) -> SplitCheck | None:
        """Return what split layers are to be held against, where the plan splits them by the model's own rules.

        Raises ConfigError where stages, or parts of sequences, do not give what the whole model gives. Every rank calls
        it, with what takes its own part of a batch.
        """
        model, plan = self._model, self._plan
        if isinstance(take_part, SequencePart) and mesh is not None and is_transformers(model):
            check_parts(model, plan, objective, self._data, take_part, mesh)
        if plan.layout.pp > 1:
            check_chain(model, plan, objective, self._example, self._device, randomness)
        elif plan.layout.tp > 1 and (rules := declared_rules(model)) is not None:
            return SplitCheck(model, rules, lambda: call(objective, model, self._data))
        return None

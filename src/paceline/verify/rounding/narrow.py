"""Formats inside a model: parts that compute in fewer bits than the model was asked for, such as norms in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.turns import turns_of
from paceline.verify.reference.passes import micro_batches, reference_randomness
from paceline.verify.rounding.conditioning import Narrowest

CASTS = ("to", "float", "half", "bfloat16", "type", "type_as", "double")


def narrowest_format(model: nn.Module, task: Task, plan: Plan, source: Source) -> Narrowest:
    """Return the narrowest format of the reference's model in a forward pass over the first of its micro-batches."""
    dtype = MASTER_DTYPES[plan.precision]
    turns = turns_of(task, source.unit)
    objectives = [turn.objective for turn in turns]
    randomness = reference_randomness(task, plan, source, model, objectives, dtype)
    whole = any(is_coupled(model, objective) for objective in objectives) or randomness.survey.is_cut_freely
    seen = NarrowSeen(model, dtype)
    positions, data = next(micro_batches(task, plan, source, 1, whole))
    for turn in turns:
        with randomness.during(SampleRows(positions, turn.draws_as(1), length_of(data))), seen.during():
            turn.objective(model, cast_floats(data, dtype))
    return seen.narrowest


class NarrowSeen(TorchFunctionMode):
    """Within it, the narrowest format that a model's numbers go through is noted, with the module and the function.

    A cast counts, since it rounds; what does not depend on the weights, such as a table of angles, does not.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.narrowest = Narrowest(dtype)
        self._inside: list[str] = []
        self._is_cast = False
        self._names = {module: name for name, module in model.named_modules() if name}

    @contextmanager
    def during(self) -> Iterator[None]:
        """Look at what runs meanwhile."""
        with ExitStack() as hooks, self:
            for module in self._names:
                hooks.enter_context(_removed(module.register_forward_pre_hook(self._enter)))
                hooks.enter_context(_removed(module.register_forward_hook(self._leave, always_call=True)))
            yield

    def _enter(self, module: nn.Module, args: object) -> None:
        self._inside.append(self._names[module])

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self._inside:
            self._inside.pop()

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Run a function of torch and look at the formats of what it returns."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.is_floating_point():
                self._note(tensor.dtype, name)
        return result

    def _note(self, dtype: torch.dtype, function: str) -> None:
        known, is_cast = self.narrowest, function in CASTS
        finer = torch.finfo(dtype).eps - torch.finfo(known.dtype).eps
        if finer > 0 or (finer == 0 and known.where and self._is_cast and not is_cast):
            inside = self._inside[-1] if self._inside else "the objective or the model itself"
            self.narrowest, self._is_cast = Narrowest(dtype, f"{inside} ({function})"), is_cast


@contextmanager
def _removed(hook: Any) -> Iterator[None]:
    try:
        yield
    finally:
        hook.remove()

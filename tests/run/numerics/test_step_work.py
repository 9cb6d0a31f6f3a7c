"""What a step does on the host beside the operators of the model, counted: no walk of modules, no pytree, few looks."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here
from torch import nn
from torch.utils import _pytree

import paceline.run
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.numerics.precision import _is_cast
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec

OURS = str(Path(paceline.run.__file__).parent)
WALKS = (nn.Module.named_modules, _pytree.tree_map, _pytree.tree_flatten, _pytree.tree_leaves, inspect.signature)


class Calls:
    """Within it, calls that this thread makes are counted: of Python by code, of C by name."""

    def __init__(self) -> None:
        self.python: Counter[CodeType] = Counter()
        self.c: Counter[str] = Counter()

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            self.python[frame.f_code] += 1
        elif event == "c_call":
            self.c[getattr(function, "__qualname__", "")] += 1

    def __enter__(self) -> Calls:
        sys.setprofile(self._called)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def times(self, function: Any) -> int:
        """Return how often a function of Python was called."""
        return self.python[inspect.unwrap(function).__code__]

    def ours(self) -> Counter[str]:
        """Return how often functions of `run` were called."""
        found: Counter[str] = Counter()
        for code, times in self.python.items():
            if code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):  # since 3.12 some are no calls
                found[code.co_qualname if sys.version_info >= (3, 11) else code.co_name] += times
        return found


def steps_of(layers: int, plan: Plan, **changes: Any) -> tuple[Calls, int]:
    """Return the calls of one step of a model that has made some before, and how many weights it has."""
    task, world = decoder_task(model=ModelSpec("llama-1m", **SMALL, layers=layers), **changes), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    for step in range(3):
        built.stepper.step(stream.at(step * plan.batch_samples), 1e-3)
    batch = stream.at(3 * plan.batch_samples)
    with Calls() as calls:
        built.stepper.step(batch, 1e-3)
    return calls, len(list(built.model.parameters()))


SMALL: dict[str, Any] = {"hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
BF16 = plan_of(Layout(), precision="bf16")
PASSES = BF16.accumulation
BLOCK_CALLS = 20  # of our functions for each call of a block, beside those for its weights


def test_what_is_counted_is_seen() -> None:
    with Calls() as calls:
        list(nn.Linear(2, 2).modules())
        _pytree.tree_map(id, [1])
        inspect.signature(steps_of)
        torch.ones(1).to(torch.float64)
    assert [calls.times(each) > 0 for each in WALKS] == [True, True, True, False, True]
    assert calls.c["Tensor.to"] == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_walks_through_no_module_and_takes_no_tree_to_pieces(precision: str) -> None:
    calls, _ = steps_of(2, plan_of(Layout(), precision=precision))
    assert {each.__qualname__: calls.times(each) for each in WALKS if calls.times(each)} == {}
    # Before each forward pass, after it, and once after all backward passes.
    assert calls.c["Generator.get_state"] == 2 * PASSES + 1


def test_a_weight_costs_one_look_and_one_cast_for_each_micro_batch_and_a_block_a_few_calls() -> None:
    (few, few_weights), (many, many_weights) = steps_of(2, BF16), steps_of(6, BF16)
    ours, of_c, weights = many.ours() - few.ours(), many.c - few.c, many_weights - few_weights
    assert weights == 4 * 9
    assert of_c["Parameter.to"] == ours[_is_cast.__qualname__] == weights * PASSES
    blocks = sum(ours.values()) - weights * PASSES
    assert 0 < blocks <= BLOCK_CALLS * 4 * PASSES, ours.most_common(12)
    hashes = many.times(torch.Tensor.__hash__) - few.times(torch.Tensor.__hash__)
    assert hashes == weights, "torch's optimizer looks for the state of each, once in a step"

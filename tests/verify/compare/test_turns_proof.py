"""The proof of objectives that take turns: equal where they are, and told where a turn leaks or comes out of order."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from typing import Any

import pytest
from distributed import run_kept, run_ranks
from gans import gan_task, judged_at_once, mean_of_rows
from programs import ROWS
from tests_shared import plan_of

from paceline.run.loop.step import Stepper
from paceline.run.numerics.precision import cast_unit
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.verify.compare.layout import compare
from paceline.verify.compare.whole_batch import whole_batch
from paceline.verify.low.low import low
from paceline.verify.story.story import story

SHARDED = Layout(dp_shard=2)


def leaks_into(stepper: Any, turn: Any, step: int = 0) -> None:
    """Keep the gradients that a turn leaves in others' parameters, and update those too."""
    turn.parameters = [p for p in stepper.model.parameters() if p.requires_grad]


def rewrite(function: Any, old: str, new: str) -> None:
    """Replace a piece of a function's source, for all who have imported it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"'{old}' is no longer there"
    made: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, made)
    function.__code__ = made[function.__name__].__code__


def evaluates_in_fp32() -> None:
    old = "        args, kwargs = _inputs_of_unit((args, kwargs), dtype)\n        originals"
    new = "        if not torch.is_grad_enabled():\n            return forward(*args, **kwargs)\n"
    rewrite(cast_unit, old, new + old)


def keeps_the_first_scale() -> None:
    rewrite(
        Stepper._make, "down = (self.scaler.scale if", "down = (vars(self).setdefault('_scale', self.scaler.scale) if"
    )


PLANTS = {"evaluation": evaluates_in_fp32, "scale": keeps_the_first_scale}


def held(check: str, layout: Layout, planted: str = "", precision: str = "fp64", **task: Any) -> CheckProof:
    """Return the record of a check of the GAN, in the ranks that are running."""
    world = join_world("cpu", threads=1)
    checks = {"steps": compare, "story": story, "whole batch": whole_batch, "low": low}
    if planted == "leak":
        Stepper._keep_own = leaks_into  # type: ignore[method-assign]
    if planted == "order":
        made = Stepper.step
        Stepper.step = lambda self, *args, **more: (  # type: ignore[method-assign]
            setattr(self, "turns", sorted(self.turns, key=lambda turn: turn.turn.name, reverse=True)),
            setattr(self, "main", 1),
            made(self, *args, **more),
        )[-1]
    PLANTS.get(planted, lambda: None)()
    made_of = gan_task(**task)
    held_out = dataclasses.replace(made_of, data=(made_of.data, made_of.data))
    plan = dataclasses.replace(plan_of(layout, batch=ROWS, zero=3, precision=precision), bucket_bytes=512)
    return checks[check](held_out, plan, world, made_of.data, 1, 3, {})


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_the_proof_says_equal(layout: Layout) -> None:
    assert run_kept(held, 2, "steps", layout)[0].equal


def test_a_turn_that_leaks_into_the_other_net_is_told_unequal() -> None:
    record = run_ranks(held, 2, "steps", Layout(dp_shard=2), "leak")[0]
    assert not record.equal
    assert record.first_difference.quantity in ("gradients", "grad_norm")
    assert record.first_difference.step == 1


def test_turns_in_another_order_are_told_unequal() -> None:
    record = run_ranks(held, 2, "steps", Layout(dp_shard=2), "order")[0]
    assert not record.equal


@pytest.mark.deep
def test_the_story_of_a_gan_is_one_devices() -> None:
    record = run_ranks(functools.partial(held, every=2), 2, "story", Layout(dp_shard=2))[0]
    assert record.equal, record.first_difference
    assert record.differences["evaluation"] < 1e-12


@pytest.mark.parametrize(("precision", "every"), [("bf16", 1), ("fp16", 2)])
def test_low_precision_is_one_devices(precision: str, every: int) -> None:
    record = run_kept(low_held, 2, "", precision, SHARDED, every)[0]
    assert record.equal, record.first_difference
    assert 0 < record.of_bound <= 1 and "evaluation" in record.differences


@pytest.mark.parametrize(
    ("planted", "precision", "quantity", "step"),
    [("evaluation", "bf16", "evaluation", 2), ("scale", "fp16", "gradients", 4)],
)
def test_low_precision_goes_on_after_the_first_update(planted: str, precision: str, quantity: str, step: int) -> None:
    record = run_ranks(low_held, 2, planted, precision, Layout(dp_replicate=2))[0]
    assert not record.equal
    assert (record.first_difference.quantity, record.first_difference.step) == (quantity, step)


def low_held(planted: str, precision: str, layout: Layout = SHARDED, every: int = 1) -> CheckProof:
    # A weight that is used twice in a pass has its two gradients added in bf16 by FSDP2, and in fp32 on one device.
    return held("low", layout, planted, precision, judge=judged_at_once, every=every)


def test_low_precision_tells_a_leak() -> None:
    assert not run_ranks(low_held, 2, "leak", "bf16")[0].equal


def test_every_objective_is_held_against_whole_batches() -> None:
    assert run_kept(held, 1, "whole batch", Layout())[0].equal
    wrong = run_kept(functools.partial(held, maker=mean_of_rows), 1, "whole batch", Layout())[0]
    assert not wrong.equal
    assert wrong.first_difference.name == "loss of maker"

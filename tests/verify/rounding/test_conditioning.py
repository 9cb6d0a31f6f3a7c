"""Rounding and mistakes told apart: by what one unit in the last place moves, by formats inside a model, by changes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from set_ups import SGD, Net, SetUp, net, set_ups, task
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of
from torch import nn

from paceline.run.process.world import World, join_world
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, Proof, Rounding
from paceline.spec.task import Task
from paceline.verify.compare import layout as comparison
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.layout import compare
from paceline.verify.compare.whole_batch import whole_batch
from paceline.verify.process.group import Job
from paceline.verify.process.start import proof_of, verify_text
from paceline.verify.rounding.conditioning import Again, Narrowest, beyond_rounding, moved_by_one_ulp
from paceline.verify.rounding.narrow import narrowest_format
from paceline.verify.story.story import story

ALONE = World(0, 1, 0, torch.device("cpu"))
COPIES = Layout(dp_replicate=2)
BY_NAME = {one.name: one for one in set_ups()}
BADLY_CONDITIONED = [BY_NAME[name] for name in ("eps 1e-12, copies", "adamw, lr 10, copies")]
SCALED = "layers.1.mlp.0.weight"


class NarrowHead(Net):
    """A network whose head multiplies in fp32 whatever it is asked for, as routers do."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return F.linear(x.float(), self.head.weight.float(), self.head.bias.float()).to(x.dtype)


class FarAway(nn.Module):
    """An embedding and a head whose weights are stored a thousand away from what they are used as."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Parameter(1000 + 0.1 * torch.randn(VOCAB, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return F.linear(self.embed(tokens), self.head - 1000)


# ---- what is moved and how far ---------------------------------------------------------------------------------------


def differing(relative: float, quantity: str = "gradients", name: str = "w", step: int = 1) -> Difference:
    return Difference(quantity, name, step, 0, relative, 1.0, 1.0, 1.0)


def asked(moves: float, asked_for: list[int] | None = None, itself: float = 0.0) -> Again:
    """Return a device whose gradients move by so much, and notes the seeds it is asked for.

    They are off by `itself` where it computes the same once more.
    """

    def moved(dtype: torch.dtype, seed: int, steps: int) -> list[Difference]:
        (asked_for if asked_for is not None else []).append(seed)
        return [differing(moves), differing(moves, name="v"), differing(moves, "grad_norm", "grad_norm")]

    def repeated(steps: int) -> list[Difference]:
        return [dataclasses.replace(differing(itself), ours=1.0 + itself)]

    return Again(moved, lambda: Narrowest(torch.float32), repeated)


def test_what_one_ulp_moves_as_far_is_rounding_and_what_it_does_not_is_a_mistake() -> None:
    found = [differing(1e-5), differing(3e-4, name="v")]
    left, rounding = beyond_rounding(found, "fp32", asked(1e-4), ALONE)
    assert not left and rounding is not None
    assert (rounding.quantity, rounding.name, rounding.relative) == ("gradients", "v", 3e-4)
    assert rounding.moved == pytest.approx(1e-4) and rounding.tolerance == 1e-4 and rounding.coarse
    left, rounding = beyond_rounding(found, "fp32", asked(1e-5), ALONE)
    assert [d.name for d in left] == ["v"] and rounding is None


def test_what_is_computed_in_fp32_is_known_to_its_last_place() -> None:
    for off, is_left in ((2.0**-23, False), (2.0**-19, True)):
        left, rounding = beyond_rounding([differing(off)], "fp64", asked(0.0), ALONE)
        assert bool(left) == is_left and (rounding is None) == is_left


def test_what_is_not_the_same_when_computed_once_more_is_no_rounding() -> None:
    found = [differing(3e-4), differing(2e-4, name="v")]
    left, rounding = beyond_rounding(found, "fp32", asked(1e-3, itself=2e-4), ALONE)
    assert rounding is None and [d.name for d in left] == ["w", "w", "v"]
    assert not any(d.is_reproducible for d in left) and left[0].ours == 1.0002
    left, rounding = beyond_rounding(found, "fp32", asked(1e-3, itself=9e-5), ALONE)
    assert not left and rounding is not None, "within the tolerance"
    nothing = dataclasses.replace(differing(math.nan), ours=math.nan, reference=math.nan)
    both = dataclasses.replace(asked(1e-3), repeated=lambda steps: [nothing])
    assert not beyond_rounding(found, "fp32", both, ALONE)[0], "no number is none both times"


def test_nothing_is_computed_again_where_all_is_equal_or_no_rounding_can_help() -> None:
    seeds: list[int] = []
    for found in ([differing(9e-5)], [differing(1.0, "samples")], [differing(float("inf"))]):
        left, rounding = beyond_rounding(found, "fp32", asked(1.0, seeds), ALONE)
        assert left == found[: len(left)] and rounding is None
    assert not seeds


@pytest.mark.parametrize(("moves", "draws"), [(1e-7, 2), (1e-5, 8), (0.1, 8)])
def test_what_is_far_more_off_than_two_draws_move_needs_no_more(moves: float, draws: int) -> None:
    seeds: list[int] = []
    found = [differing(1.0)]
    assert beyond_rounding(found, "fp32", asked(moves, seeds), ALONE) == (found, None)
    assert seeds == list(range(1, draws + 1))


def test_later_steps_are_not_computed_again_where_the_first_ones_are_left_unexplained() -> None:
    seeds: list[int] = []
    found = [differing(1e-3), differing(1.0, step=3)]
    left, rounding = beyond_rounding(found, "fp32", asked(1e-5, seeds), ALONE)
    assert left[0] == found[0] and rounding is None and seeds == list(range(1, 9))
    found = [differing(2e-4), differing(3e-4, step=3)]  # of which the first is rounding: what of the others?
    assert [d.step for d in beyond_rounding(found, "fp32", asked(1e-4, seeds), ALONE)[0]] == [3]
    assert seeds == 3 * list(range(1, 9)), "of a step that does not move as far"


def test_a_chaotic_reference_leaves_fp32_aside_and_fp64_at_the_tolerances_of_fp32() -> None:
    for precision, off, is_left in (("fp32", 1e9, False), ("fp64", 9e-5, False), ("fp64", 1e9, True)):
        left, rounding = beyond_rounding([differing(off)], precision, asked(1e6), ALONE)
        assert bool(left) == (is_left and off > 6e6)
        assert rounding is None or rounding.chaos == 1
    (left, _) = beyond_rounding([differing(1e-3, name="u")], "fp64", asked(1e6), ALONE)
    assert [d.name for d in left] == ["u"], "of which nothing says that it moves"


def test_an_overflow_is_rounding_in_chaos_below_fp64_and_nowhere_else() -> None:
    nan, infinity = float("nan"), float("inf")
    for precision, moves, off, is_left in (
        ("fp32", 1e6, nan, False),
        ("fp32", 1e-4, nan, True),
        ("fp64", 1e6, nan, True),
        ("fp32", 1e6, infinity, True),  # a tensor that is not there
    ):
        left, _ = beyond_rounding([differing(off, "grad_norm", "grad_norm")], precision, asked(moves), ALONE)
        assert bool(left) == is_left, (precision, moves, off)


def test_a_layout_that_overflows_alone_is_unequal_and_names_the_step() -> None:
    given = decoder_task()
    with planted(lambda gradient: gradient * float("nan"), "norm.weight"):
        found = compare(given, plan_of(Layout(), 7), ALONE, given.data, SEQ_LEN, 2)
    first = found.first_difference
    assert not found.equal and first is not None and (first.quantity, first.step) == ("grad_norm", 1)
    assert math.isnan(first.ours) and math.isfinite(first.reference)


def test_where_one_device_overflows_too_the_steps_before_are_compared() -> None:
    given = task(net, lr=1e30, **SGD)
    found = compare(given, plan_of(Layout(), 7), ALONE, given.data, 16, 3)
    assert found.equal and found.steps == 1 and found.differences["loss"] < 1e-5
    told = story(given, plan_of(Layout(), 7), ALONE, given.data, 16)
    assert told.equal and "overflow in step 2" in told.left_out


def test_zeros_are_not_moved_and_others_by_a_unit_in_the_last_place() -> None:
    model = nn.Linear(50, 50, dtype=torch.float64)
    nn.init.zeros_(model.bias)
    before = model.weight.detach().clone()
    moved_by_one_ulp(model, torch.float32, seed=1)
    off = ((model.weight.detach() - before) / before).abs()
    assert not model.bias.any() and 0 < float(off.max()) <= 1.001 * 2.0**-23


# ---- mistakes in set-ups that are badly conditioned ------------------------------------------------------------------


def planted(change: Callable[[torch.Tensor], torch.Tensor], name: str = SCALED) -> Any:
    """Return a patch that has the layout's gradient of one weight changed, in whatever precision."""
    assemble = comparison.assemble

    def changed(*given: Any) -> Any:
        built = assemble(*given)
        built.model.get_parameter(name).register_hook(change)
        return built

    return patch.object(comparison, "assemble", changed)


def scaled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 1.001


def rounded_in_fp32(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.bfloat16().float() if gradient.dtype == torch.float32 else gradient


def with_a_bug(change: Callable[[torch.Tensor], torch.Tensor] | None, chosen: list[SetUp]) -> list[CheckProof]:
    """Return the comparisons in fp32 of set-ups with the change planted."""
    world = join_world("cpu", threads=1)
    with planted(change or (lambda gradient: gradient)):
        return [compare(one.task, one.plan, world, one.task.data, one.task.data.items_per_sample, 3) for one in chosen]


def test_a_mistake_is_not_called_ill_conditioned() -> None:
    chaotic = SetUp("chaos", task(functools.partial(net, 30.0), lr=1e-4, **SGD), plan_of(COPIES, 7, precision="fp32"))
    without = run_ranks(with_a_bug, 2, None, [BADLY_CONDITIONED[0], chaotic])[0]  # test_no_false_alarm.py has the other
    assert all(right.equal for right in without), [right.first_difference for right in without]
    assert without[0].ill_conditioned and without[0].ill_conditioned.fp64["loss"] < 1e-12
    for wrong in run_ranks(with_a_bug, 2, scaled, [*BADLY_CONDITIONED, chaotic])[0]:
        assert not wrong.equal and wrong.ill_conditioned is None
        first = wrong.first_difference
        assert (first.quantity, first.step) == ("gradients", 1)
        assert first.tensors == (SCALED,) and first.ratio == pytest.approx(1.001)


def test_what_only_fp32_gets_wrong_is_wrong() -> None:
    (found,) = run_ranks(with_a_bug, 2, rounded_in_fp32, [BY_NAME["odd sizes, 2 copies"]])[0]
    assert not found.equal and found.dtype == "fp32"
    assert found.first_difference.tensors == (SCALED,)


# ---- changes of weights ----------------------------------------------------------------------------------------------


def with_another_rate(factor: float) -> CheckProof:
    """Return the comparison in fp32 of weights far from zero, with the layout's learning rate times a factor."""
    rate = comparison.learning_rate
    far = task(FarAway, lr=0.05)
    with patch.object(comparison, "learning_rate", lambda *given: factor * rate(*given)):
        return compare(far, plan_of(COPIES, 7, precision="fp32"), join_world("cpu", threads=1), far.data, 16, 2)


def test_a_wrong_learning_rate_shows_against_large_weights() -> None:
    right, wrong = (run_ranks(with_another_rate, 2, factor)[0] for factor in (1.0, 1.5))
    assert right.equal, right.first_difference
    first = wrong.first_difference
    assert (first.quantity, first.step, first.family) == ("weights", 1, "optimizer")
    assert first.ratio == pytest.approx(1.5, rel=1e-2)
    assert "head" in first.tensors


# ---- formats inside of a model ---------------------------------------------------------------------------------------


def fp64(layout: Layout = COPIES) -> Plan:
    return plan_of(layout, 7, precision="fp64")


def test_a_part_in_fp32_is_named() -> None:
    seen = {}
    for made in (Net, NarrowHead):
        given = task(made)
        seen[made] = narrowest_format(made().double(), given, fp64(), given.data)
    assert seen[Net] == Narrowest(torch.float64)
    assert seen[NarrowHead].dtype == torch.float32 and "linear" in seen[NarrowHead].where


class DroppingNet(Net):
    """A network that drops inside of a module of torch's own, as the layers of `nn.TransformerEncoder` do."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.drop(super().forward(tokens))


@pytest.mark.filterwarnings("error")
def test_what_draws_is_found_where_it_was_seen_while_formats_are_looked_at() -> None:
    """The look's own frame ended the place of each draw, and a user was warned of owners that are a guess."""
    given = task(DroppingNet)
    assert narrowest_format(DroppingNet().double(), given, fp64(), given.data) == Narrowest(torch.float64)


def whole(given: Task) -> CheckProof:
    return whole_batch(given, fp64(), ALONE, given.data, given.data.items_per_sample, 1, {})


def means(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
    """Return a mean where a sum belongs."""
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    return loss, 1


def test_what_rounds_in_fp32_inside_is_held_to_what_fp32_moves() -> None:
    found = whole(task(NarrowHead))
    assert found.differences["whole batch"] > 1e-10, "the check has something to explain"
    assert found.equal, found.first_difference
    rounding = found.ill_conditioned
    assert rounding.format == "fp32" and "linear" in rounding.where and not rounding.coarse
    wrong = whole(dataclasses.replace(task(NarrowHead), objective=means))
    assert not wrong.equal and wrong.first_difference.quantity == "whole batch"


# ---- numbers that are others every time ------------------------------------------------------------------------------

CALLS = itertools.count()


class Unwritten(Net):
    """A network that adds what lies in memory it never wrote: something else in every call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        scratch = torch.full((x.shape[-1],), 0.1 * math.sin(next(CALLS)), dtype=x.dtype)
        scratch[::2] *= -1
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + scratch))


def test_a_program_that_reads_what_nobody_wrote_is_not_ill_conditioned() -> None:
    found = whole(task(Unwritten))
    first = found.first_difference
    assert not found.equal and found.ill_conditioned is None
    assert first is not None and first.family == "not reproducible" and first.ours != first.reference
    assert "memory that nobody wrote" in first.likely


def unwritten_in_ranks(precision: str) -> list[CheckProof]:
    given, world = task(Unwritten), join_world("cpu", threads=1)
    plan = plan_of(COPIES, 7, precision=precision)
    return [compare(given, plan, world, given.data, 16, 2), story(given, plan, world, given.data, 16)]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_no_layout_equals_what_is_not_reproducible(precision: str) -> None:
    for found in run_ranks(unwritten_in_ranks, 2, precision)[0]:
        assert not found.equal and found.ill_conditioned is None
        assert found.first_difference.family == "not reproducible", found.first_difference


def narrow_in_ranks(change: Callable[[torch.Tensor], torch.Tensor]) -> CheckProof:
    given = task(NarrowHead)
    with planted(change):
        return compare(given, fp64(), join_world("cpu", threads=1), given.data, 16, 2)


def test_a_mistake_in_a_model_that_rounds_inside_is_one() -> None:
    found = run_ranks(narrow_in_ranks, 2, scaled)[0]
    assert not found.equal and found.first_difference.tensors == (SCALED,)


# ---- in words --------------------------------------------------------------------------------------------------------


def told(record: CheckProof) -> Proof:
    """Return the proof of one part with such a record."""
    job = Job(Spec(task=task(Net)), fp64(), part="uneven rows")
    return proof_of(fp64(), [job], [record], 2, 1.5)


def test_a_proof_says_what_is_ill_conditioned() -> None:
    rounding = Rounding(
        quantity="gradients", name="w", step=2, dtype="fp32", relative=3e-2, tolerance=1e-4, moved=2e-2, of_bound=0.25,
        chaos=None, places=4, format="fp32", where="", coarse=True,
        fp64={"loss": 2e-16, "grad_norm": 0.0, "weights": 1e-13},
    )  # fmt: skip
    off = {"loss": 1e-3, "grad_norm": 1e-3, "weights": 1e-3}
    proof = told(CheckProof(True, "fp32", 2, 1.0, off, None, rounding))
    assert proof.equal and proof.verdict == "ill-conditioned" and proof.ill_conditioned.part == "uneven rows"
    assert verify_text(proof) == (
        "ill-conditioned, equal to one device in fp64: loss 2e-16, grad norm 0, weights 1e-13; in fp32 gradients of w"
        " at step 2 differs by 3e-02 (3 more), where rounding weights to fp32 moves one device by 2e-02; the plan is"
        " right, fp32 too coarse: smaller first weights, a smaller learning rate or a larger eps help (1.5 s)"
    )
    chaotic = dataclasses.replace(rounding, quantity="loss", name="loss", places=1, chaos=2)
    assert (
        "; in fp32 loss at step 2 differs by 3e-02, where rounding weights to fp32 moves one device by 2e-02; from step"
        " 2 on the program is chaotic, of which fp32 says nothing; the plan is right"
    ) in verify_text(told(CheckProof(True, "fp32", 2, 1.0, rounding.fp64 or {}, None, chaotic)))
    inside = dataclasses.replace(rounding, coarse=False, where="norm (mean)", dtype="fp64")
    near = {"loss": 0.0, "grad_norm": 0.0, "weights": 1e-9}
    proof = told(CheckProof(True, "fp32", 2, 1.0, near, None, inside))
    assert proof.verdict == "equal" and "computes parts in fp32, such as norm (mean)" in verify_text(proof)

"""Mistakes outside of a step that the story named "equal" as long as its twin had no such thing: each is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, Dropout, PaddedText, coarse_plan, decoder_task, plan_of
from torch import nn

from paceline.run.assemble import Assembled
from paceline.run.evaluate.held_out_metrics import Sums
from paceline.run.loop import passes, under_plan
from paceline.run.loop import step as step_module
from paceline.run.loop.passes import SequentialPasses
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.process.world import join_world
from paceline.run.updates import selection as selecting
from paceline.run.updates.growth import BatchGrowth
from paceline.run.updates.selection import BatchSelection
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.growth import BatchChange, GrowthSpec, Piece
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.data.order import many_steps
from paceline.units import Amount
from paceline.verify.process.checks import CHECKS

Patch = pytest.MonkeyPatch
RATE, COPIES = OptimizerSpec(lr=3e-3, eps=1e-4), Layout(dp_replicate=2)
HELD_OUT = (PaddedText(), PaddedText())  # of a task without any no evaluation is ever made
# What is seen here is no matter of depth, and each story is told again and again where it is not equal.
SHALLOW = ModelSpec("llama-1m", hidden=32, layers=1, heads=4, kv_heads=2, ffn=40, vocab=VOCAB)
TWO_LAYERS = dataclasses.replace(SHALLOW, layers=2)  # a stage needs one


def grows_late(patch: Patch) -> None:
    """Batches that grow by samples do so after twice as many."""
    begun = Piece.has_begun
    patch.setattr(Piece, "has_begun", lambda self, step, position: begun(self, step, position // 2))


def measures_another_norm(patch: Patch) -> None:
    """The noise scale is that of a small batch whose norm is a tenth larger."""
    measured = BatchGrowth.measured
    patch.setattr(BatchGrowth, "measured", lambda self, *given: measured(self, *given[:-1], 1.1 * given[-1]))


def counts_the_first_rank(patch: Patch) -> None:
    """Metrics are those of the first rank's samples."""
    over = Sums.over
    patch.setattr(Sums, "over", lambda self, world, counts: over(self, world, counts and world.is_first))


def counts_every_tensor_rank(patch: Patch) -> None:
    """The held-out loss and its items are counted by every rank that has them: their ratio is right."""
    evaluate = SequentialPasses.evaluate
    patch.setattr(SequentialPasses, "evaluate", lambda self, *given: [2 * each for each in evaluate(self, *given)])


def comes_again(patch: Patch) -> None:
    """The second epoch has the order of the first."""
    ids_at = many_steps.ids_at
    patch.setattr(many_steps, "ids_at", lambda source, seed, at: ids_at(source, seed, at % source.samples))


def never_freezes(patch: Patch) -> None:
    """Groups of which training is to end are trained on until the run starts again."""
    frozen = step_module.frozen_groups
    patch.setattr(step_module, "frozen_groups", lambda groups, step: frozen(groups, step) if step > 3 else frozenset())


def weights_nothing(patch: Patch) -> None:
    """What is drawn of candidates counts as if all had been trained on."""
    weighted = BatchSelection._weighted
    patch.setattr(
        BatchSelection, "_weighted", lambda self, micro, batch, weights: weighted(self, micro, batch, weights**0)
    )


def weighs_by_chances(patch: Patch) -> None:
    """Weights forget that the step divides by the items of what is trained on, and not of all candidates."""
    weighted, total = BatchSelection._weighted, 9  # samples of the batch

    def scaled(self: Any, micro: Any, batch: Any, weights: Any) -> Any:
        return weighted(self, micro, batch, weights * total / weights.sum())

    patch.setattr(BatchSelection, "_weighted", scaled)


def draws_evenly(patch: Patch) -> None:
    """Every candidate has the same chance, whatever its loss."""
    chances = selecting.chosen.chances
    patch.setattr(selecting.chosen, "chances", lambda losses, count, even: chances(losses, count, 1.0))


def takes_the_smallest(patch: Patch) -> None:
    """Those of the smallest loss are trained on."""
    largest = selecting.chosen.largest
    patch.setattr(selecting.chosen, "largest", lambda scores, count: largest(-scores, count))


@dataclass(frozen=True)
class Seen:
    """A mistake, the task and layout that have what it is in, and what the story must name."""

    plant: Callable[[Patch], None]
    quantity: str
    name: str  # a part of it
    step: int
    task: dict[str, Any]
    layout: Layout = COPIES


SAMPLES = GrowthSpec("schedule", "sqrt", (BatchChange(Amount(900, "samples"), Amount(64, "samples")),))
BY_LOSS = SelectionSpec("loss", 3)
LATE = (GroupSpec(("*norm*",), frozen_after=Amount(900, "steps")),)
ALL = (
    Seen(grows_late, "samples", "", 3, {"growth": SAMPLES}),
    Seen(measures_another_norm, "grad_norm", "covariance_trace", 2,
         {"growth": GrowthSpec("noise", "linear", largest=Amount(64, "samples"))}),
    Seen(counts_the_first_rank, "evaluation", "f1_macro", 1, {"evaluate": EvaluateSpec(metrics=("f1_macro",))}),
    Seen(counts_every_tensor_rank, "evaluation", "items", 1, {}, Layout(tp=2)),
    Seen(comes_again, "samples", "", 2, {}),
    Seen(weights_nothing, "loss", "loss", 1, {"selection": BY_LOSS}),
    Seen(weighs_by_chances, "loss", "loss", 1, {"selection": BY_LOSS}),
    Seen(draws_evenly, "samples", "chosen candidates", 1, {"selection": BY_LOSS}),
    Seen(takes_the_smallest, "samples", "chosen candidates", 1, {"selection": SelectionSpec("largest", 2)}),
    Seen(never_freezes, "grad_norm", "", 3, {"optimizer": dataclasses.replace(RATE, groups=LATE)}),
)  # fmt: skip


def told(cases: tuple[Seen, ...]) -> list[CheckProof]:
    """Return what the story says of each mistake, in the ranks that are running."""
    world, found = join_world("cpu", threads=1), []
    for case in cases:
        task: Task = decoder_task(**{"model": SHALLOW, "optimizer": RATE, "data": HELD_OUT, **case.task})
        with Patch.context() as patch:
            case.plant(patch)
            plan = coarse_plan(case.layout, batch=9, precision="fp64")
            found.append(CHECKS["story"](task, plan, world, PaddedText(), SEQ_LEN, 3))
    return found


@pytest.mark.parametrize(
    "cases", [ALL[1:4], pytest.param((ALL[0], *ALL[4:]), marks=pytest.mark.deep)], ids=["first", "others"]
)
def test_each_is_seen_and_named(cases: tuple[Seen, ...]) -> None:
    for case, proof in zip(cases, run_ranks(told, 2, cases)[0], strict=True):
        first = proof.first_difference
        assert first is not None, case.plant.__name__
        assert (first.quantity, first.step) == (case.quantity, case.step), (case.plant.__name__, first)
        assert case.name in first.name, (case.plant.__name__, first)


SELECTING = [
    ({"selection": SelectionSpec("largest", 2)}, Layout(dp_shard=2)),
    ({"selection": BY_LOSS}, Layout(pp=2)),
    ({"selection": BY_LOSS, "model": Dropout}, Layout(dp_replicate=2)),
]
MORE_SELECTING = [({"selection": BY_LOSS}, Layout(**{axis: 2})) for axis in ("dp_replicate", "tp", "cp")]


def stories(cases: list[tuple[dict[str, Any], Layout]]) -> list[CheckProof]:
    """Return the stories of tasks, without a mistake."""
    world = join_world("cpu", threads=1)
    tasks = [decoder_task(**{"model": TWO_LAYERS, "optimizer": RATE, **changes}) for changes, _ in cases]
    plans = [coarse_plan(layout, batch=9, precision="fp64") for _, layout in cases]
    return [CHECKS["story"](task, plan, world, task.data, SEQ_LEN, 3) for task, plan in zip(tasks, plans, strict=True)]


@pytest.mark.parametrize(
    "cases", [SELECTING, pytest.param(MORE_SELECTING, marks=pytest.mark.deep)], ids=["some", "others"]
)
def test_a_selecting_task_without_a_mistake_is_equal(cases: list[tuple[dict[str, Any], Layout]]) -> None:
    for (_, layout), proof in zip(cases, run_ranks(stories, 2, cases)[0], strict=True):
        assert proof.equal and not proof.left_out, (layout, proof.first_difference, proof.left_out)


class Halved(Dropout):
    """A model that halves a weight as it is evaluated, and doubles it as it is trained again, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_halved = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        if self.is_halved is self.training:
            with torch.no_grad():
                self.layers[0][0].weight.mul_(2.0 if self.training else 0.5)
            self.is_halved = not self.training
        return super().forward(tokens)


class FailsEvaluated(Dropout):
    """Wants more of its rows where it is evaluated than a batch of training has."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        assert self.training, "the rows of an evaluation have names"
        return super().forward(tokens)


def evaluated_oddly(cases: list[tuple[type[nn.Module], Any, Layout]]) -> list[CheckProof]:
    """Return the stories of models that evaluations change, or that fail there."""
    world, found = join_world("cpu", threads=1), []
    for model, data, layout in cases:
        task = decoder_task(model=model, data=data, objective="next_token", optimizer=RATE)
        plan = plan_of(layout, batch=9, precision="fp64")
        found.append(CHECKS["story"](task, plan, world, PaddedText(), SEQ_LEN, 3))
    return found


def test_what_evaluations_do_to_a_model_is_told_where_any_are_made() -> None:
    """It was told of tasks without held-out data too, which are never evaluated."""
    cases = [(Halved, HELD_OUT, COPIES), (Halved, PaddedText(), COPIES), (FailsEvaluated, PaddedText(), COPIES)]
    halved, *never = run_ranks(evaluated_oddly, 2, cases)[0]
    first = halved.first_difference
    assert first is not None and (first.quantity, first.name, first.step) == ("weights", "layers.0.0.weight", 1)
    assert first.family == "evaluation" and "while it is evaluated" in first.likely
    for found in never:
        assert found.equal and "evaluation" not in found.differences, found.first_difference


class Merged(nn.Linear):
    """A frozen layer with an adapter, which `eval` adds to its weight and `train` takes out again, as loralib does."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, width) / 4), nn.Parameter(torch.randn(width, 2) / 4)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merged:
        """Merge the adapter, or take it out."""
        super().train(mode)
        if mode is self.is_merged:
            self.weight.data += (self.b @ self.a).data * (-1.0 if mode else 1.0)
            self.is_merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs."""
        out = F.linear(x, self.weight, self.bias)
        return out if self.is_merged else out + x @ self.a.T @ self.b.T


class Adapted(nn.Module):
    """Layers with such adapters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(Merged(width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def test_adapters_that_evaluations_merge_are_taken_out_again() -> None:
    """Modes were put back without a word to the class: after its first evaluation a run trained no adapter."""
    for found in run_ranks(evaluated_oddly, 2, [(Adapted, HELD_OUT, COPIES), (Adapted, HELD_OUT, Layout(dp_shard=2))])[
        0
    ]:
        assert found.equal and found.differences["evaluation"] < 1e-12, found.first_difference


class Grows(nn.Module):
    """A table of positions that grows as it is needed, in a buffer that no checkpoint holds."""

    table: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.register_buffer("table", torch.zeros(0, width), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        if len(self.table) < tokens.shape[1]:
            places = torch.arange(tokens.shape[1], device=x.device).unsqueeze(1)
            self.table = (places * torch.arange(x.shape[-1], device=x.device)).sin().to(x.dtype)
        return self.head((x + self.table[: tokens.shape[1]]).tanh())


def grown() -> list[CheckProof]:
    task, world = decoder_task(model=Grows, objective="next_token", optimizer=RATE), join_world("cpu", threads=1)
    plan = plan_of(COPIES, batch=9, precision="fp64")
    return [CHECKS[name](task, plan, world, task.data, SEQ_LEN, 3, {}) for name in ("whole batch", "story")]


def test_a_table_that_grows_as_it_is_needed_is_no_difference() -> None:
    for found in run_ranks(grown, 2)[0]:
        assert found.equal, found.first_difference


class AlwaysDrops(nn.Module):
    """Dropout that is on in evaluations too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(F.dropout(self.embed(tokens).tanh(), 0.3, training=True))


def evaluated_with_noise(for_others: bool) -> CheckProof:
    metrics = EvaluateSpec(metrics=("accuracy",))  # of logits that a pass of their own gives
    named = {"data": HELD_OUT, "objective": "next_token", "evaluate": metrics}
    task = decoder_task(model=AlwaysDrops, optimizer=RATE, **named)
    rows, world = passes.sample_rows, join_world("cpu", threads=1)

    def of_the_next(micro: Any, *draws_as: Any) -> SampleRows:
        found = rows(micro, *draws_as)
        return found if draws_as else dataclasses.replace(found, positions=found.positions + 1)

    with Patch.context() as patch:
        if for_others:
            patch.setattr(passes, "sample_rows", of_the_next)
        return CHECKS["story"](task, plan_of(COPIES, batch=9, precision="fp64"), world, PaddedText(), SEQ_LEN, 3)


@pytest.mark.parametrize("for_others", [False, True])
def test_what_evaluations_draw_is_that_of_their_samples(for_others: bool) -> None:
    found = run_ranks(evaluated_with_noise, 2, for_others)[0]
    assert found.equal is not for_others, found.first_difference
    if for_others:
        assert found.first_difference is not None and found.first_difference.quantity == "evaluation"


def restores_second_moments_larger(patch: Patch) -> None:
    """A start restores the second moments of queries larger, which are a millionth of the embedding's."""
    restore = under_plan.restore

    def restored(*arguments: Any) -> Any:
        found = restore(*arguments)
        built = next(given for given in arguments if isinstance(given, Assembled))
        for name, weight in built.model.named_parameters():
            if "q_proj" in name:
                built.optimizer.state[weight]["exp_avg_sq"].mul_(1.5)
        return found

    patch.setattr(under_plan, "restore", restored)


def restored_in_fp32(plants: tuple[Callable[[Patch], None], ...]) -> CheckProof:
    task, world = decoder_task(model=SHALLOW, optimizer=RATE), join_world("cpu", threads=1)
    with Patch.context() as patch:
        for plant in plants:
            plant(patch)
        return CHECKS["story"](task, coarse_plan(COPIES, batch=9, precision="fp32"), world, task.data, SEQ_LEN, 3)


def test_small_moments_are_seen_in_fp32_beside_counts_of_updates() -> None:
    right, wrong = (run_ranks(restored_in_fp32, 2, given)[0] for given in ((), (restores_second_moments_larger,)))
    assert right.equal, right.first_difference
    first = wrong.first_difference
    assert first is not None and (first.quantity, first.step) == ("moments", 3)
    assert first.name.endswith("q_proj.weight.exp_avg_sq") and first.family == "checkpoint"

"""Random numbers belong to the sample: the same for every micro-batch, every layout and after every restart."""

from __future__ import annotations

from typing import Any

import drawing_models
import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, run_steps, world_here
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.loop.evaluate import evaluate
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.sources.mapped import MapSource
from paceline.units import Amount
from paceline.verify.compare.layout import compare

BATCH = 12
MODELS = ("Chain", "Encoder", "SequenceFirst", "Replayed", "LayerDrop", "StochasticDepth", "Flattened", "Features",
          "Recurrent")  # fmt: skip


def task_of(model: str = "Chain", objective: Any = "next_token", **changes: Any) -> Task:
    torch.manual_seed(3)
    batch = Amount(changes.pop("batch", BATCH), "samples")
    return decoder_task(model=getattr(drawing_models, model)(), objective=objective, global_batch=batch, **changes)


def fp64(layout: Layout | None = None, **changes: Any) -> Plan:
    return plan_of(layout or Layout(), **{"batch": BATCH, "precision": "fp64", **changes})


def losses(task: Task, plan: Plan, steps: int = 3) -> list[float]:
    return [stats.loss for stats in run_steps(task, plan, steps)[0]]


@pytest.mark.parametrize("model", MODELS)
def test_the_size_of_micro_batches_changes_nothing(model: str) -> None:
    whole = losses(task_of(model), fp64(micro_batch=BATCH))
    for micro_batch in (1, 2, 5):
        assert losses(task_of(model), fp64(micro_batch=micro_batch)) == pytest.approx(whole, rel=1e-11)


class Uneven:
    """Rows of different lengths, filled up to the longest beside them: their tokens, and which of them are real."""

    unit, fingerprint, vocab, items_per_sample = "samples", "uneven", VOCAB, 1

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Tensor:
        return (torch.arange(3 + index * 7 % 11) * (index + 1)) % VOCAB

    def collate(self, rows: list[Tensor]) -> dict[str, Tensor]:
        """Return the rows as a batch, with the labels."""
        lengths = torch.tensor([len(row) for row in rows])
        real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return {"tokens": nn.utils.rnn.pad_sequence(rows, batch_first=True), "real": real, "labels": lengths % 2}


def of_the_real(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of a classifier on the mean over a row's tokens, whose layers drop scores of attention."""
    x, real = model.embed(batch["tokens"]), batch["real"]
    for layer in model.layers:
        x = layer(x, src_key_padding_mask=~real)
    pooled = (x * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
    loss = F.cross_entropy(model.head(pooled), batch["labels"], reduction="sum")
    return loss, torch.tensor(len(pooled))


def test_rows_that_are_filled_up_to_those_beside_them_draw_as_by_themselves() -> None:
    def found(micro_batch: int) -> list[float]:
        return losses(task_of("Encoder", of_the_real, data=MapSource(Uneven(), 7)), fp64(micro_batch=micro_batch))

    alone = found(1)  # filled up by nothing
    for micro_batch in (2, 5, BATCH):
        assert found(micro_batch) == pytest.approx(alone, rel=1e-11)


@pytest.mark.parametrize("objective", ["denoise", "variational"])
def test_random_numbers_of_the_objective(objective: str) -> None:
    asked = getattr(drawing_models, objective)
    whole = losses(task_of(objective=asked), fp64(micro_batch=BATCH))
    for micro_batch in (1, 2):
        assert losses(task_of(objective=asked), fp64(micro_batch=micro_batch)) == pytest.approx(whole, rel=1e-11)


def test_steps_and_seeds_draw_other_numbers() -> None:
    still = {"optimizer": OptimizerSpec(lr=1e-9)}
    first, second = losses(task_of(**still), fp64()), losses(task_of(seed=8, **still), fp64())
    assert len({*first, *second}) == 6


def proof(task: Task, plan: Plan) -> CheckProof:
    return compare(task, plan, world_here(), task.data, SEQ_LEN, 2)


def assert_equal(task: Task, plan: Plan) -> None:
    result = run_kept(proof, plan.layout.devices, task, plan)[0]
    assert result.equal, result.first_difference


LAYOUTS = (
    ("Encoder", Layout(dp_replicate=2, dp_shard=2), {"batch": 11}),
    ("LayerDrop", Layout(dp_shard=3), {"batch": 7}),
    ("SequenceFirst", Layout(dp_replicate=3), {"micro_batch": 1}),
    ("StochasticDepth", Layout(pp=2, dp_shard=2), {"micro_batch": 1}),
    ("Encoder", Layout(pp=3), {"recompute": "full"}),
    ("Replayed", Layout(pp=2), {}),
    ("Chain", Layout(dp_shard=2), {"recompute": "selective", "zero": 2}),
    ("Encoder", Layout(dp_shard=2), {"recompute": "selective"}),
    ("Attending", Layout(cp=2), {}),
    ("AttendingChain", Layout(cp=2, pp=2), {"recompute": "full"}),
    ("Attending", Layout(cp=3, dp_replicate=2), {"recompute": "full", "batch": 5}),
)


@pytest.mark.parametrize(("model", "layout", "setting"), LAYOUTS, ids=str)
def test_layouts_equal_one_device(model: str, layout: Layout, setting: dict[str, Any]) -> None:
    task = task_of(model, batch=setting.get("batch", BATCH))
    assert_equal(task, fp64(layout, **setting))


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("objective", ["denoise", "variational"])
def test_objectives_that_draw_equal_one_device(objective: str, layout: Layout) -> None:
    assert_equal(task_of(objective=getattr(drawing_models, objective), batch=7), fp64(layout, batch=7, micro_batch=1))


def test_an_objective_that_draws_for_tokens_of_shared_sequences() -> None:
    task = task_of("Attending", drawing_models.denoise_parts, batch=7)
    assert_equal(task, fp64(Layout(cp=2, dp_shard=2), batch=7))


def test_a_model_called_between_steps_is_torchs_own_affair() -> None:
    built = run_steps(task_of("StochasticDepth"), fp64(), 1)[1]
    rows = torch.zeros(5, SEQ_LEN, dtype=torch.int64)
    assert not torch.equal(built.model(rows), built.model(rows)), "it draws on, as in any other program"


def evaluated(task: Task, plan: Plan) -> float:
    built = run_steps(task, plan, 1)[1]
    return evaluate(built.stepper, task.data, 9, plan.layout.data_rank(built.stepper.world.rank)).loss


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp_replicate=2)], ids=str)
def test_evaluations_draw_the_same_on_every_layout(layout: Layout) -> None:
    task = task_of("StochasticDepth", drawing_models.variational)  # draws in evaluations too, in its blocks and after
    one = evaluated(task, fp64(micro_batch=4))
    task = task_of("StochasticDepth", drawing_models.variational)
    assert run_kept(evaluated, 2, task, fp64(layout, micro_batch=1))[0] == pytest.approx(one, rel=1e-11)


@pytest.mark.parametrize(
    ("model", "reason"),
    [("ByHand", "Python's module random"), ("OfPairs", "a random tensor of shape [2, 2] for 2 samples is [3, 3]"),
     ("ReplayedFunction", "a function that is run again in the backward pass"),
     ("RowByRow", "how often it draws depends on how many samples there are"),
     ("OwnOperator", "past torch's functions")],
)  # fmt: skip
def test_numbers_that_belong_to_no_sample_are_named(model: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_ranks(losses, 2, task_of(model), fp64(Layout(dp_replicate=2)))
    assert reason in str(error.value)
    with pytest.warns(UserWarning, match="follow the micro-batch"):
        losses(task_of(model), fp64(micro_batch=4), 1)

"""One step against plain torch written out by hand, and what the step does with bad numbers and low precision."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import FP64, MEAN_LOSS_BF16, adam_error, assert_curves_close
from tests_shared import SEQ_LEN, Dropout, decoder_task, plan_of, run_steps, world_here
from torch import nn

from paceline.errors import NumericalStop
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream, split_rows
from paceline.run.numerics.precision import LossScaler
from paceline.run.numerics.randomness.seeds import seed_at
from paceline.run.parallel.apply import apply_plan
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.spec.layout import Layout
from paceline.spec.steps.update import OptimizerSpec
from paceline.task.data.order.permutation import sample_ids
from paceline.task.models.build import build_model


def by_hand(task, steps: int, batch: int) -> tuple[list[float], list[float], nn.Module]:
    """Train on whole batches with nothing but torch, in fp64: a forward pass a step, mean over unmasked labels."""
    model = build_model(task.model, task.data.vocab, SEQ_LEN, task.seed).double().train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": task.optimizer.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=task.optimizer.lr,
        betas=(task.optimizer.beta1, task.optimizer.beta2),
        eps=task.optimizer.eps,
    )
    losses, norms = [], []
    for step in range(steps):
        positions = torch.arange(step * batch, (step + 1) * batch).numpy()
        rows = task.data.read(sample_ids(task.seed, positions, task.data.samples))
        logits = model(rows["tokens"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), task.optimizer.clip_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, model


@pytest.mark.parametrize("micro_batch", [13, 4, 1])
def test_accumulation_with_uneven_weights_equals_one_whole_batch(micro_batch: int) -> None:
    task = decoder_task()
    losses, norms, model = by_hand(task, 5, 13)
    stats, built = run_steps(task, plan_of(Layout(), micro_batch=micro_batch, precision="fp64"), 5)
    assert_curves_close([s.loss for s in stats], losses)
    assert_curves_close([s.grad_norm for s in stats], norms)
    largest = adam_error(task.optimizer.lr, task.optimizer.eps, 5, FP64 * max(norms))
    for (name, ours), (_, theirs) in zip(built.model.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=largest, msg=name)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_changes_no_number(recompute: str) -> None:
    for task in (decoder_task(), decoder_task(model=Dropout, objective="next_token")):
        plain, _ = run_steps(task, plan_of(Layout(), precision="fp64"), 3)
        again, _ = run_steps(task, plan_of(Layout(), precision="fp64", recompute=recompute), 3)
        assert_curves_close([s.loss for s in again], [s.loss for s in plain])
        assert_curves_close([s.grad_norm for s in again], [s.grad_norm for s in plain])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_family_has_no_storage_until_it_is_laid_out(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[bool] = []

    def recorded(model: nn.Module, *rest: Any, **more: Any) -> Any:
        laid_out.append(any(parameter.is_meta for parameter in model.parameters()))
        return apply_plan(model, *rest, **more)

    monkeypatch.setattr("paceline.run.assemble.apply_plan", recorded)
    for task in (decoder_task(), decoder_task(model=Dropout, objective="next_token")):
        built = assemble(task, plan_of(Layout(), precision=precision), world_here(), task.data, SEQ_LEN)
        assert not any(parameter.is_meta for parameter in built.model.parameters())
    assert laid_out == [True, False]  # a user's model is whole from the start: the first look runs it


def test_buckets_hold_the_parameters_that_a_model_has_once_it_is_filled() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    gradients = ReducedGradients(model, dist.group.WORLD, bucket_bytes=1024)
    model.to_empty(device="cpu")
    gradients.zero()
    gradients.before_micro_batch(last=False)
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    assert all(p.grad.untyped_storage().data_ptr() == model.bias.grad.untyped_storage().data_ptr()
               for p in model.parameters())  # fmt: skip


def saved_elements(recompute: str) -> int:
    """Return how many elements the forward pass keeps for the backward pass."""
    task = decoder_task()
    built = assemble(task, plan_of(Layout(), recompute=recompute), world_here(), task.data, SEQ_LEN)
    rows = task.data.read(torch.arange(8).numpy())
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss_sum, _ = built.stepper.passes.objective(built.model, rows)
    del loss_sum
    return sum(kept.values())


def test_full_recompute_keeps_less_than_none() -> None:
    assert saved_elements("full") < 0.6 * saved_elements("none")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_the_fp32_curve_with_fp32_weights(precision: str) -> None:
    reference, _ = run_steps(decoder_task(), plan_of(Layout()), 12)
    stats, built = run_steps(decoder_task(), plan_of(Layout(), precision=precision), 12)
    assert {p.dtype for p in built.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in built.model.parameters()} == {torch.float32}
    assert_curves_close([s.loss for s in stats], [s.loss for s in reference], 10 * MEAN_LOSS_BF16)  # over 12 updates
    assert any(s.loss != r.loss for s, r in zip(stats, reference, strict=True)), "the compute dtype is really used"


def test_compiled_blocks_compute_the_same() -> None:
    if "ATEN_CPU_CAPABILITY" in os.environ:
        pytest.skip("torch's compiler takes the vector instructions that this setting hides for there, and fails")
    task = decoder_task()
    setting = {"batch": 12, "precision": "fp64"}
    plain, _ = run_steps(task, plan_of(Layout(), **setting), 3)
    compiled, _ = run_steps(task, plan_of(Layout(), **setting, compile=True), 3)
    assert_curves_close([s.loss for s in compiled], [s.loss for s in plain])


def test_sgd_equals_torch_by_hand() -> None:
    task = decoder_task(optimizer=OptimizerSpec(name="sgd", lr=0.05, clip_norm=0.0, weight_decay=0.0))
    stats, _ = run_steps(task, plan_of(Layout(), precision="fp64"), 3)
    model = build_model(task.model, task.data.vocab, SEQ_LEN, task.seed).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        rows = task.data.read(sample_ids(7, torch.arange(step * 13, step * 13 + 13).numpy(), 1000))
        loss = nn.functional.cross_entropy(model(rows["tokens"]).flatten(0, 1), rows["labels"].flatten())
        assert stats[step].loss == pytest.approx(float(loss.detach()), rel=FP64)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_loss_that_is_not_a_number_stops_before_any_weight_changes() -> None:
    task, plan = decoder_task(), plan_of(Layout())
    _, built = run_steps(task, plan, 1)
    sound = built.stepper.passes.objective
    before = [p.detach().clone() for p in built.model.parameters()]

    def poisoned(model: nn.Module, batch: dict) -> tuple[torch.Tensor, int]:
        loss_sum, weight = sound(model, batch)
        return loss_sum * math.nan, weight

    built.stepper.passes.objective = poisoned
    stream = BatchStream(task.data, task.seed, plan, 0, torch.device("cpu"))
    with pytest.raises(NumericalStop, match="no weight was changed") as caught:
        built.stepper.step(stream.at(13), 1e-3)
    assert caught.value.exit_code == 6
    assert all(torch.equal(a, b) for a, b in zip(before, built.model.parameters(), strict=True))


def test_a_batch_without_items_is_refused() -> None:
    def nothing(model: nn.Module, batch: dict) -> tuple[torch.Tensor, int]:
        return model(batch["tokens"]).sum() * 0, 0

    with pytest.raises(NumericalStop, match="no item to learn from"):
        run_steps(decoder_task(objective=nothing), plan_of(Layout()), 1)


def test_fp16_overflow_skips_the_update_and_halves_the_scale() -> None:
    task = decoder_task()
    plan = plan_of(Layout(), precision="fp16")
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    scaler = built.stepper.scaler
    assert scaler is not None
    scaler.scale = 2.0**40
    before = [p.detach().clone() for p in built.model.parameters()]
    stream = BatchStream(task.data, task.seed, plan, 0, torch.device("cpu"))
    stats = built.stepper.step(stream.at(0), 1e-3)
    assert not stats.updated
    assert scaler.scale == 2.0**39
    assert all(torch.equal(a, b) for a, b in zip(before, built.model.parameters(), strict=True))


def test_loss_scale_grows_after_clean_steps_and_survives_a_checkpoint() -> None:
    scaler = LossScaler(scale=4.0, patience=3)
    for _ in range(3):
        scaler.update(overflowed=False)
    assert scaler.scale == 8.0
    scaler.update(overflowed=False)
    other = LossScaler()
    other.load(scaler.state())
    assert (other.scale, other.clean_steps) == (8.0, 1)


def test_rows_are_split_evenly_and_completely() -> None:
    for count in range(12):
        for parts in range(1, 6):
            split = split_rows(range(100, 100 + count), parts)
            assert [row for part in split for row in part] == list(range(100, 100 + count))
            assert max(map(len, split)) - min(map(len, split)) <= 1


def test_seeds_differ_by_step_and_by_task() -> None:
    seeds = {seed_at(seed, step) for seed in range(50) for step in range(200)}
    assert len(seeds) == 50 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_those_of_every_release() -> None:
    """A run that goes on under a later release draws what it would have drawn."""
    known = {(0, 1): 8286242343226680935, (7, 1): 5998686083498200189, (2**40, 3): 7183860898322409829}
    assert {key: seed_at(*key) for key in known} == known


def test_the_weight_may_be_a_number_or_a_tensor() -> None:
    def as_number(model: nn.Module, batch: dict) -> tuple[torch.Tensor, int]:
        labels = batch["labels"]
        loss = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, int((labels != -100).sum())

    ours, _ = run_steps(decoder_task(objective=as_number), plan_of(Layout(), precision="fp64"), 2)
    fused, _ = run_steps(decoder_task(), plan_of(Layout(), precision="fp64"), 2)
    assert_curves_close([s.loss for s in ours], [s.loss for s in fused])
    assert dataclasses.asdict(ours[0])["weight"] == fused[0].weight

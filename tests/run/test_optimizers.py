"""Every optimizer on every data layout against plain torch on one device: weights after a few steps are the same."""

from __future__ import annotations

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, PaddedText, decoder_task, plan_of, run_steps
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.plan.layout import Layout
from paceline.run.schedule import learning_rate
from paceline.task.data.order import sample_ids
from paceline.task.models.build import build_model
from paceline.task.task import OptimizerSpec, Task

STEPS, BATCH = 4, 13
LAYOUTS = [
    (Layout(dp_replicate=2), 3),
    (Layout(dp_shard=2), 1),
    (Layout(dp_shard=2), 2),
    (Layout(dp_shard=3), 3),
    (Layout(dp_replicate=2, dp_shard=2), 3),
    (Layout(tp=2), 3),
    (Layout(tp=2, dp_shard=2), 3),
]


def weights_under(task: Task, layout: Layout, zero: int) -> dict[str, torch.Tensor]:
    """Return the whole weights after the steps under a layout, by name."""
    _, built = run_steps(task, plan_of(layout, batch=BATCH, zero=zero, precision="fp64"), STEPS)
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in built.model.named_parameters()
    }


def weights_by_hand(task: Task, optimizer_of) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of a plain loop: whole batches, one forward pass, an optimizer of torch."""
    model = build_model(task.model, VOCAB, SEQ_LEN, task.seed).double().train()
    optimizer = optimizer_of(model)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(1, STEPS + 1):
        positions = torch.arange((step - 1) * BATCH, step * BATCH).numpy()
        rows = PaddedText().read(sample_ids(task.seed, positions, PaddedText.samples))
        logits = model(rows["tokens"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.optimizer.clip_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = learning_rate(task.schedule, peak, step, STEPS, 0, 1)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight, theirs[name], rtol=1e-9, atol=1e-11, msg=lambda text, at=name: f"{at}: {text}"
        )


def halves(model: nn.Module, decay: float) -> list[dict]:
    """Return the default groups: matrices decay, vectors do not."""
    return [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(("layout", "zero"), [(Layout(), 3), *LAYOUTS], ids=str)
def test_sgd_equals_torch(layout: Layout, zero: int) -> None:
    task = decoder_task(optimizer=OptimizerSpec(name="sgd", lr=0.2))
    expected = weights_by_hand(task, lambda model: torch.optim.SGD(halves(model, 0.1), lr=0.2, momentum=0.9))
    for whole in run_ranks(weights_under, layout.devices, task, layout, zero):
        assert_same(whole, expected)

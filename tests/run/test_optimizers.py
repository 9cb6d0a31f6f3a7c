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
from paceline.task.task import GroupSpec, OptimizerSpec, Task

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


def split(model: nn.Module, trained) -> tuple[list, list]:
    """Return (name, parameter) of a model in two lists: those that `trained(name, parameter)` picks, and the rest."""
    named = list(model.named_parameters())
    return [p for n, p in named if trained(n, p)], [p for n, p in named if not trained(n, p)]


class Several:
    """Plain optimizers of torch, stepped one after the other."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = [group for optimizer in inner for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.inner:
            optimizer.zero_grad()


class LionByHand:
    """Lion as its paper writes it."""

    def __init__(self, model: nn.Module, lr: float, beta1: float, beta2: float) -> None:
        self.parameters = list(model.parameters())
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.betas, self.param_groups = (beta1, beta2), [{"lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.betas
        for i, p in enumerate(self.parameters):
            update = torch.sign(beta1 * self.momentum[i] + (1 - beta1) * p.grad)
            decay = 0.1 * p if p.dim() > 1 else 0.0
            self.momentum[i] = beta2 * self.momentum[i] + (1 - beta2) * p.grad
            p -= lr * (update + decay)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def muon(model: nn.Module) -> Several:
    """Return Muon for the matrices of the layers, AdamW for the rest."""
    matrices, rest = split(model, lambda n, p: p.dim() == 2 and "embed" not in n and "head" not in n)
    embeddings, vectors = [p for p in rest if p.dim() == 2], [p for p in rest if p.dim() < 2]
    options = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-6}
    groups = [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2e-2}]
    return Several(
        torch.optim.Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.9), torch.optim.AdamW(groups, **options)
    )


MUON_GROUPS = (GroupSpec(match=("embed*", "*head*"), name="adamw", lr_scale=0.1),)
CASES = {
    "adam": (OptimizerSpec("adam", lr=3e-3, eps=1e-6), lambda m: torch.optim.Adam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "nadam": (OptimizerSpec("nadam", lr=3e-3, eps=1e-6), lambda m: torch.optim.NAdam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "radam": (OptimizerSpec("radam", lr=3e-3, eps=1e-6), lambda m: torch.optim.RAdam(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "adamax": (OptimizerSpec("adamax", lr=3e-3, eps=1e-6), lambda m: torch.optim.Adamax(
        halves(m, 0.1), lr=3e-3, betas=(0.9, 0.95), eps=1e-6)),
    "adagrad": (OptimizerSpec("adagrad", lr=3e-2, arguments={"eps": 1e-5}), lambda m: torch.optim.Adagrad(
        halves(m, 0.1), lr=3e-2, eps=1e-5)),
    "adadelta": (OptimizerSpec("adadelta", lr=0.5, arguments={"eps": 1e-5}), lambda m: torch.optim.Adadelta(
        halves(m, 0.1), lr=0.5, eps=1e-5)),
    "rmsprop": (OptimizerSpec("rmsprop", lr=3e-3, arguments={"momentum": 0.5, "eps": 1e-5}), lambda m:
        torch.optim.RMSprop(halves(m, 0.1), lr=3e-3, momentum=0.5, eps=1e-5)),
    "lion": (OptimizerSpec("lion", lr=1e-3), lambda m: LionByHand(m, 1e-3, 0.9, 0.95)),
    "adafactor": (OptimizerSpec("adafactor", lr=1e-2), lambda m: torch.optim.Adafactor(halves(m, 0.1), lr=1e-2)),
    "muon": (OptimizerSpec("muon", lr=2e-2, eps=1e-6, arguments={"momentum": 0.9}, groups=MUON_GROUPS), muon),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_optimizers_equal_torch_whatever_the_layout(name: str) -> None:
    spec, by_hand = CASES[name]
    task = decoder_task(optimizer=spec)
    expected = weights_by_hand(task, by_hand)
    layouts = [(Layout(), 3), (Layout(dp_shard=3), 3)]
    for layout, zero in [*layouts, *(LAYOUTS if name in ("muon", "adafactor", "lion") else [])]:
        for whole in run_ranks(weights_under, layout.devices, task, layout, zero):
            assert_same(whole, expected)

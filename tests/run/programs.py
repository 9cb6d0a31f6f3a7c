"""Small foreign programs for tests of the run floor: a model, an objective, and the plain torch loop that they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests_shared import plan_of, world_here
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.units import Amount

WIDTH, CLASSES, ROWS, STEPS, LR = 8, 5, 13, 3, 1e-2
EVERY_LAYOUT = [
    (Layout(dp_replicate=2), 3),
    (Layout(dp_shard=2), 1),
    (Layout(dp_shard=2), 2),
    (Layout(dp_shard=3), 3),
    (Layout(dp_replicate=2, dp_shard=2), 2),
]


class Rows:
    """Samples of numbers "x" [rows, 8] and a class "labels" [rows]; "kind" says which of two sorts each one is."""

    samples, items_per_sample, unit, vocab, fingerprint = 97, 1, "samples", 0, "rows"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [torch.Generator().manual_seed(int(index)) for index in ids]
        x = torch.stack([torch.randn(WIDTH, generator=row) for row in rows])
        return {"x": x, "labels": (x.sum(1) * 3).long() % CLASSES, "kind": (x[:, 0] > 0).long()}


def cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of `model(x)` and the number of rows."""
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum"), torch.tensor(len(batch["labels"]))


class Block(nn.Module):
    """A residual block of the stack that the programs vary."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` with something added."""
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, classes]."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Factory = Callable[[], nn.Module]
Objective = Callable[..., Any]


def plain_loop(
    factory: Factory,
    objective: Objective,
    steps: int = STEPS,
    optimizer: str = "adamw",
    dtype: torch.dtype | None = torch.float64,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train with torch alone, one backward pass on each whole batch; return the losses and the state at the end."""
    torch.manual_seed(7)
    model, source = factory().to(dtype), Rows()
    dtype = dtype or torch.float64
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    if optimizer == "adamw":
        update: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-6, foreach=False)
    else:
        update = torch.optim.SGD(groups, lr=LR, momentum=0.9, foreach=False)
    losses = []
    for step in range(steps):
        ids = sample_ids(7, np.arange(step * ROWS, (step + 1) * ROWS), source.samples)
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in source.read(ids).items()}
        loss, weight = objective(model, batch)
        update.zero_grad()
        (loss / weight).backward()
        update.step()
        losses.append(float(loss.detach() / weight))
    return losses, {name: tensor.detach().clone() for name, tensor in _state(model).items()}


def laid_out(
    factory: Factory,
    objective: Objective,
    layout: Layout,
    zero: int = 3,
    optimizer: str = "adamw",
    steps: int = STEPS,
    **plan: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the same under a plan, in the ranks that are running; return the losses and the whole state at the end."""
    losses, model = trained(factory, objective, layout, zero, optimizer, steps, **plan)
    return losses, {name: whole(tensor) for name, tensor in _state(model).items()}


def trained(
    factory: Factory,
    objective: Objective,
    layout: Layout,
    zero: int = 3,
    optimizer: str = "adamw",
    steps: int = STEPS,
    precision: str = "fp64",
    **plan: Any,
) -> tuple[list[float], nn.Module]:
    """Return the losses, and this rank's model as it is after the steps."""
    torch.manual_seed(7)
    task = Task(
        name="program", model=factory, data=Rows(), objective=objective,
        optimizer=OptimizerSpec(name=optimizer, lr=LR, eps=1e-6, clip_norm=0.0),
        schedule=ScheduleSpec(kind="constant"), global_batch=Amount(ROWS, "samples"), stop=Amount(steps, "steps"),
    )  # fmt: skip
    world = world_here()
    made = plan_of(layout, batch=ROWS, zero=zero, precision=precision, **plan)
    built = assemble(task, made, world, task.data, 1)
    stream = BatchStream(task.data, task.seed, made, layout.data_rank(world.rank), world.device)
    stats = [built.stepper.step(stream.at(step * ROWS), LR) for step in range(steps)]
    return [each.loss for each in stats], built.model


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor with the parts of all ranks."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def assert_like_plain(ranks: list[Any], plain: tuple[list[float], dict[str, Tensor]], rtol: float = 1e-9) -> None:
    """Hold every rank's losses and state against the plain loop's."""
    for losses, state in ranks:
        torch.testing.assert_close(losses, plain[0], rtol=rtol, atol=0.0)
        assert state.keys() == plain[1].keys()
        for name, tensor in state.items():
            expected, told = plain[1][name], lambda text, name=name: f"{name}: {text}"
            torch.testing.assert_close(tensor, expected, rtol=rtol, atol=rtol * 1e-2, msg=told)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

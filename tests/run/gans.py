"""A generator and a discriminator that take turns: the task, and the plain torch loop that it means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from programs import ROWS, WIDTH, Block, Rows
from torch import Tensor, nn

from paceline.spec.steps.update import GroupSpec, OptimizerSpec, ScheduleSpec
from paceline.spec.task import Task, TurnSpec
from paceline.task.data.order.permutation import sample_ids
from paceline.units import Amount

LR, BETAS, DECAY, EPS = 1e-2, (0.9, 0.95), 0.1, 1e-6
LIMITS = {"judge": 0.5, "maker": 0.05}  # of gradient norms: small enough that every step is clipped
SEED = 7


class Gan(nn.Module):
    """Two stacks of blocks; the generator makes rows of a row's mirror image."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.noise = noise
        self.maker = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, 1))

    def make(self, x: Tensor) -> Tensor:
        """Return rows [rows, width] made up from others."""
        seen = x.flip(-1)
        return self.maker(seen + torch.randn_like(seen) if self.noise else seen)


def judged(model: Gan, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the discriminator's loss: real rows are real, made ones are not."""
    made = model.make(batch["x"]).detach()
    loss = F.softplus(-model.judge(batch["x"])).sum() + F.softplus(model.judge(made)).sum()
    return loss, torch.tensor(2 * len(made))


def judged_at_once(model: Gan, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the same by one call of the discriminator."""
    rows = torch.cat([batch["x"], model.make(batch["x"]).detach().to(batch["x"].dtype)])
    signs = torch.ones(len(rows), 1).index_fill_(0, torch.arange(len(rows) // 2), -1.0)
    return F.softplus(signs * model.judge(rows)).sum(), torch.tensor(len(rows))


def fooled(model: Gan, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the generator's loss: made rows pass for real."""
    made = model.make(batch["x"])
    return F.softplus(-model.judge(made)).sum(), torch.tensor(len(made))


def mean_of_rows(model: Gan, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a generator's loss that is no sum over rows."""
    return F.softplus(-model.judge(model.make(batch["x"]))).mean(), torch.tensor(1)


def gan_task(
    model: Callable[[], nn.Module] = Gan,
    judge: Callable[..., Any] = judged,
    maker: Callable[..., Any] = fooled,
    every: int = 1,
    **changes: Any,
) -> Task:
    """Return the task of a GAN; each net has an optimizer of other numbers and its own clipping."""
    changes.setdefault("optimizer", OptimizerSpec(
        lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, clip_norm=LIMITS["judge"],
        groups=(GroupSpec(match=("maker.*",), lr_scale=0.5),),
    ))  # fmt: skip
    return Task(
        name="gan", model=model, data=Rows(),
        turns=(
            TurnSpec("judge", judge, ("judge.*",)),
            TurnSpec("maker", maker, ("maker.*",), every=every, clip_norm=LIMITS["maker"]),
        ),
        schedule=ScheduleSpec(kind="constant"),
        global_batch=Amount(ROWS, "samples"), stop=Amount(20, "steps"), seed=SEED, **changes,
    )  # fmt: skip


def plain_gan(steps: int, every: int = 1) -> dict[str, Any]:
    """Train a GAN with torch alone, in fp64 on whole batches: {judge: losses, maker: losses, state: at the end}."""
    torch.manual_seed(SEED)
    model, source = Gan().double(), Rows()
    nets = {"judge": (model.judge, judged, LR), "maker": (model.maker, fooled, 0.5 * LR)}
    updates = {name: _adamw(net, lr) for name, (net, _, lr) in nets.items()}
    found: dict[str, Any] = {"judge": [], "maker": []}
    for step in range(steps):
        ids = sample_ids(SEED, np.arange(step * ROWS, (step + 1) * ROWS), source.samples)
        batch = {k: v.double() if v.is_floating_point() else v for k, v in source.read(ids).items()}
        for name, (net, objective, _) in nets.items():
            if name == "maker" and step % every:
                continue
            loss, weight = objective(model, batch)
            updates[name].zero_grad()
            (loss / weight).backward()
            nn.utils.clip_grad_norm_(net.parameters(), LIMITS[name])
            updates[name].step()
            found[name].append(float(loss.detach() / weight))
    found["state"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


def _adamw(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": DECAY},
              {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, foreach=False)

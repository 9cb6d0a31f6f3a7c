"""Loops with mistakes that people and frameworks have made, each a change of one right loop on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.spec.proof.records import LoopProof

WIDTH, CLASSES, CLIP, LR, STEPS = 6, 4, 0.05, 0.05, 3
Micro = tuple[Tensor, Tensor]


def network() -> nn.Module:
    """Return two layers and a head, of which the first is frozen in part: its bias."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, CLASSES)).double()
    model[0].bias.requires_grad_(False)
    return model


def batches_of(rank: int, steps: int = STEPS) -> list[list[Micro]]:
    """Return batches of three micro-batches, the last of them short, of other sizes on each rank."""
    generator = torch.Generator().manual_seed(40 + rank)
    sizes = (4, 3, 1) if rank else (4, 4, 2)
    draw = lambda n: torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return [[(draw(n), torch.randint(0, CLASSES, (n,), generator=generator)) for n in sizes] for _ in range(steps)]


def objective(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Return the cross-entropy of a micro-batch and its rows."""
    rows, labels = batch
    return F.cross_entropy(model(rows), labels, reduction="sum"), len(rows)


def adamw(parameters: Any, **changes: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW whose norms and biases do not decay, and a rate that falls."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, **{"lr": LR, "eps": 1e-4, **changes})
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (2 + done))


def summed(x: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


@dataclass
class Loop:
    """The right loop: sums over micro-batches, one all-reduce, one division by all items, clipping, an update.

    A mistake is a subclass that does one of these otherwise.
    """

    model: nn.Module = field(default_factory=network)

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.schedule = self.make_optimizer()

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return adamw(self.trained)

    def __call__(self, micros: list[Micro]) -> Tensor | None:
        self.optimizer.zero_grad()
        loss = self.accumulate(micros)
        items = self.items(micros)
        self.reduce()
        self.divide(items)
        self.clip()
        self.update()
        return self.told(loss, items)

    def accumulate(self, micros: list[Micro]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            loss = self.loss(micro)
            loss.backward()
            total += loss.detach()
        return total

    def loss(self, micro: Micro) -> Tensor:
        return objective(self.model, micro)[0]

    def items(self, micros: list[Micro]) -> Tensor:
        return summed(torch.tensor(float(sum(len(rows) for rows, _ in micros)), dtype=torch.float64))

    def reduce(self) -> None:
        for p in self.trained:
            dist.all_reduce(p.grad)

    def divide(self, items: Tensor) -> None:
        for p in self.trained:
            p.grad /= items

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, CLIP)

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def told(self, loss: Tensor, items: Tensor) -> Tensor | None:
        return summed(loss) / items


WRONG: dict[str, type[Loop]] = {}


def wrong(what: str) -> Callable[[type[Loop]], type[Loop]]:
    """Keep a loop under what is wrong with it."""

    def keep(made: type[Loop]) -> type[Loop]:
        WRONG[what] = made
        return made

    return keep


# ---- sums and means --------------------------------------------------------------------------------------------------


@wrong("the last, short micro-batch is dropped")
class _(Loop):
    def accumulate(self, micros: list[Micro]) -> Tensor:
        return super().accumulate(micros[:-1])


@wrong("the last micro-batch alone is a mean, times the mean size")
class _(Loop):
    def accumulate(self, micros: list[Micro]) -> Tensor:
        total = super().accumulate(micros[:-1])
        loss, count = objective(self.model, micros[-1])
        (loss / count * 4).backward()
        return total + loss.detach()


@wrong("items are those of the first rank, times the ranks")
class _(Loop):
    def items(self, micros: list[Micro]) -> Tensor:
        own = torch.tensor(float(sum(len(rows) for rows, _ in micros)), dtype=torch.float64)
        dist.broadcast(own, 0)
        return own * self.world


@wrong("micro-batches count as if all were full")
class _(Loop):
    def items(self, micros: list[Micro]) -> Tensor:
        return summed(torch.tensor(float(4 * len(micros)), dtype=torch.float64))


@wrong("an all-reduce in the background is not waited for")
class _(Loop):
    def reduce(self) -> None:
        self.copies = [p.grad.clone() for p in self.trained]  # what is there while the sums are on their way
        self.work = [dist.all_reduce(copy, async_op=True) for copy in self.copies]

    def update(self) -> None:
        super().update()
        for work in self.work:
            work.wait()


@wrong("gradients are summed in bf16")
class _(Loop):
    def reduce(self) -> None:
        for p in self.trained:
            p.grad = summed(p.grad.bfloat16()).double()


@wrong("gradients are sums of signs")
class _(Loop):
    def reduce(self) -> None:
        for p in self.trained:
            p.grad = summed(p.grad.sign())


@wrong("the head's gradient is not reduced")
class _(Loop):
    def reduce(self) -> None:
        for p in self.trained[:-1]:
            dist.all_reduce(p.grad)


@wrong("ranks average, on top of the division by all items")
class _(Loop):
    def reduce(self) -> None:
        super().reduce()
        for p in self.trained:
            p.grad /= self.world


@wrong("every micro-batch is reduced again")
class _(Loop):
    def accumulate(self, micros: list[Micro]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for micro in micros:
            total += super().accumulate([micro])
            super().reduce()
        return total

    def reduce(self) -> None:
        pass


@wrong("gradients stay every second step")
class _(Loop):
    steps = 0

    def __call__(self, micros: list[Micro]) -> Tensor | None:
        self.steps += 1
        kept = [p.grad.clone() for p in self.trained] if self.steps == 2 else []
        return super().__call__(micros) if not kept else self.with_kept(micros, kept)

    def with_kept(self, micros: list[Micro], kept: list[Tensor]) -> Tensor | None:
        self.optimizer.zero_grad()
        loss, items = self.accumulate(micros), self.items(micros)
        self.reduce()
        self.divide(items)
        for p, grad in zip(self.trained, kept, strict=True):
            p.grad += grad
        self.clip()
        self.update()
        return self.told(loss, items)


@wrong("the backward pass runs twice")
class _(Loop):
    def accumulate(self, micros: list[Micro]) -> Tensor:
        super().accumulate(micros)
        return super().accumulate(micros)


# ---- the loss --------------------------------------------------------------------------------------------------------


@wrong("labels are smoothed in training alone")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        return F.cross_entropy(self.model(micro[0]), micro[1], reduction="sum", label_smoothing=0.1)


@wrong("a z-loss is a mean for each micro-batch")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        return super().loss(micro) + 1e-3 * self.model(micro[0]).logsumexp(1).square().mean()


@wrong("labels are those of the next row")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        return super().loss((micro[0], micro[1].roll(1)))


@wrong("rows are mixed up with those of their micro-batch")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        return super().loss((0.9 * micro[0] + 0.1 * micro[0].flip(0), micro[1]))


@wrong("noise for robustness, by a seed of the rank")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        noise = torch.randn(micro[0].shape, generator=torch.Generator().manual_seed(self.rank), dtype=torch.float64)
        return super().loss((micro[0] + 1e-3 * noise, micro[1]))


@wrong("one rank computes in bf16")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        rows = micro[0].bfloat16().double() if self.rank else micro[0]
        return super().loss((rows, micro[1]))


@wrong("a block is left out by chance on one rank")
class _(Loop):
    def loss(self, micro: Micro) -> Tensor:
        model = (
            self.model if not self.rank else nn.Sequential(*(m for m in self.model if not isinstance(m, nn.LayerNorm)))
        )
        loss = F.cross_entropy(model(micro[0]), micro[1], reduction="sum")
        return loss + sum(0.0 * p.sum() for p in self.trained)


@wrong("the loss that is told is the rank's own")
class _(Loop):
    def told(self, loss: Tensor, items: Tensor) -> Tensor | None:
        return loss * self.world / items


@wrong("the loss that is told is rank 0's, and no other tells one")
class _(Loop):
    def told(self, loss: Tensor, items: Tensor) -> Tensor | None:
        return None if self.rank else loss * self.world / items


@wrong("the loss that is told is of the last micro-batch")
class _(Loop):
    def accumulate(self, micros: list[Micro]) -> Tensor:
        super().accumulate(micros)
        return objective(self.model, micros[-1])[0].detach() * len(micros)


# ---- clipping --------------------------------------------------------------------------------------------------------


@wrong("each rank clips before gradients are summed")
class _(Loop):
    def reduce(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        super().reduce()


@wrong("every tensor is clipped by its own norm")
class _(Loop):
    def clip(self) -> None:
        for p in self.trained:
            nn.utils.clip_grad_norm_([p], CLIP)


@wrong("gradients are clipped by value")
class _(Loop):
    def clip(self) -> None:
        nn.utils.clip_grad_value_(self.trained, CLIP / 10)


@wrong("the norm that clips is the largest value's")
class _(Loop):
    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.trained, CLIP, norm_type=float("inf"))


@wrong("the loss scale is still there when gradients are clipped")
class _(Loop):
    def clip(self) -> None:
        for p in self.trained:
            p.grad *= 1024.0
        super().clip()
        for p in self.trained:
            p.grad /= 1024.0


@wrong("gradients are clipped after the update")
class _(Loop):
    def clip(self) -> None:
        pass

    def update(self) -> None:
        super().update()
        super().clip()


# ---- updates ---------------------------------------------------------------------------------------------------------


@wrong("the schedule is stepped for every micro-batch")
class _(Loop):
    def update(self) -> None:
        self.optimizer.step()
        for _ in range(3):
            self.schedule.step()


@wrong("the schedule is stepped before the update")
class _(Loop):
    def update(self) -> None:
        self.schedule.step()
        self.optimizer.step()


@wrong("the schedule is stepped once for every rank")
class _(Loop):
    def update(self) -> None:
        super().update()
        self.schedule.step()


@wrong("the update is made twice")
class _(Loop):
    def update(self) -> None:
        self.optimizer.step()
        super().update()


@wrong("weight decay is on norms and biases too")
class _(Loop):
    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        optimizer, schedule = adamw(self.trained)
        optimizer.param_groups[1]["weight_decay"] = 0.3
        return optimizer, schedule


@wrong("decay goes through the gradients")
class _(Loop):
    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.Adam(
            [{"params": [p for p in self.trained if p.dim() > 1], "weight_decay": 0.3},
             {"params": [p for p in self.trained if p.dim() < 2]}], lr=LR, eps=1e-4)  # fmt: skip
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (2 + done))


@wrong("AMSGrad")
class _(Loop):
    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return adamw(self.trained, amsgrad=True)


@wrong("another beta")
class _(Loop):
    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return adamw(self.trained, betas=(0.9, 0.95))


@wrong("the optimizer is made anew in every step")
class _(Loop):
    def update(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        super().update()
        self.optimizer.state.clear()
        assert rates


@wrong("moments rest in bf16")
class _(Loop):
    def update(self) -> None:
        super().update()
        for state in self.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())


@wrong("weights rest in fp32")
class _(Loop):
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.trained:
                p.copy_(p.float())


@wrong("Adam counts an update for every rank")
class _(Loop):
    def update(self) -> None:
        super().update()
        for state in self.optimizer.state.values():
            state["step"] += self.world - 1


@wrong("rank 0 updates alone")
class _(Loop):
    def update(self) -> None:
        if self.rank == 0:
            super().update()


@wrong("each rank updates by its own gradients, and weights are averaged")
class _(Loop):
    def reduce(self) -> None:
        pass

    def divide(self, items: Tensor) -> None:
        super().divide(items / self.world)

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for p in self.trained:
                p.copy_(summed(p) / self.world)


@wrong("a frozen bias decays")
class _(Loop):
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            self.model[0].bias.mul_(1 - LR * 0.3)  # type: ignore[operator]


@wrong("the head was made after the optimizer")
class _(Loop):
    def make_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        return adamw(self.trained[:-2])


@wrong("an average of weights is trained on")
class _(Loop):
    average: Any = None

    def update(self) -> None:
        self.average = self.average or copy.deepcopy(self.model)
        super().update()
        with torch.no_grad():
            for slow, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(p, 0.1)
                p.copy_(p.lerp(slow, 1e-3))


@wrong("one rank leaves out a step that overflows there alone")
class _(Loop):
    steps = 0

    def update(self) -> None:
        self.steps += 1
        if self.steps == 2 and self.rank:
            self.schedule.step()
        else:
            super().update()


@wrong("gradients are noised by a seed of the rank")
class _(Loop):
    def divide(self, items: Tensor) -> None:
        super().divide(items)
        generator = torch.Generator().manual_seed(self.rank)
        for p in self.trained:
            p.grad += 1e-6 * torch.randn(p.shape, generator=generator, dtype=torch.float64)


@wrong("gradients of rows are centred")
class _(Loop):
    def divide(self, items: Tensor) -> None:
        super().divide(items)
        for p in self.trained:
            if p.dim() > 1:
                p.grad -= p.grad.mean(1, keepdim=True)


def hold(what: str) -> LoopProof:
    """Hold the loop with that mistake, "" for none, against one device."""
    loop = WRONG[what]() if what else Loop()
    result: LoopProof = paceline.verify_loop(
        loop, loop.model, batches_of(loop.rank), objective=objective, split=list, optimizer=adamw, clip_norm=CLIP
    )
    return result


def hold_all(names: list[str]) -> dict[str, LoopProof]:
    """Hold several of them, one after the other."""
    return {what: hold(what) for what in names}

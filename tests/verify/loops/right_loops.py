"""Right loops as strangers write them: several networks and optimizers, closures, freezing in turn, wrapped models.

Each returns what `verify_loop` says of it, on every rank. Gradients are summed by hand where no wrapper does it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.spec.proof.records import LoopProof

WIDTH, CLASSES, STEPS = 6, 4, 3
Pair = tuple[Tensor, Tensor]
Told = tuple[Tensor, Any]


def is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def network(out: int = CLASSES) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, out)).double()


def batches(steps: int = STEPS, rows: int = 5) -> list[Pair]:
    """Return rows and classes; ranks have different numbers of them."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(60 + rank)
    draw = lambda: torch.randn(rows - rank, WIDTH, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), torch.randint(0, CLASSES, (rows - rank,), generator=generator)) for _ in range(steps)]


def classified(model: nn.Module, batch: Any) -> Told:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


def summed(x: Any) -> Tensor:
    x = torch.as_tensor(x, dtype=torch.float64).detach().clone()
    if not is_alone():
        dist.all_reduce(x)
    return x.coalesce() if x.is_sparse else x


def take(model: nn.Module, objective: Callable[..., Told], batch: Any, optimizer: Any = None) -> Tensor:
    """Make an update on the sum over all ranks' items, and return the loss per item."""
    own = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    loss, count = objective(model, batch)
    items = summed(count)
    loss.backward()
    for p in own:
        if p.grad is not None:
            p.grad = summed(p.grad) / items
    if optimizer is not None:
        optimizer.step()
    return summed(loss) / items


def proven(step: Callable[[Any], Any], model: nn.Module, given: Any = None, **more: Any) -> LoopProof:
    options = {"objective": classified, "optimizer": adam, **more}
    result: LoopProof = paceline.verify_loop(step, model, given or batches(), **options)
    return result


# ---- several networks and optimizers ---------------------------------------------------------------------------------


def gan(half: str) -> LoopProof:
    """A GAN, of which one half is proven; the other follows in the same step, and adds to the judge's gradients."""
    judge, maker = network(1), network(WIDTH)
    optimizers = {"judge": adam(judge.parameters()), "maker": adam(maker.parameters())}

    def judged(judge: nn.Module, batch: Any) -> Told:
        real, made = judge(batch[0]), judge(maker(batch[0].flip(1)).detach())
        return F.softplus(-real).sum() + F.softplus(made).sum(), len(batch[0])

    def passed_off(maker: nn.Module, batch: Any) -> Told:
        return F.softplus(-judge(maker(batch[0].flip(1)))).sum(), len(batch[0])

    def step(batch: Any) -> Tensor:
        if half == "judge":
            told = take(judge, judged, batch, optimizers["judge"])
            take(maker, passed_off, batch, optimizers["maker"])
            return told
        told = take(maker, passed_off, batch, optimizers["maker"])
        take(judge, judged, batch, optimizers["judge"])
        return told

    if half == "maker":
        return proven(step, maker, objective=passed_off)
    return proven(step, judge, objective=judged)


def two_optimizers() -> LoopProof:
    """Matrices have SGD with momentum, vectors Adam, each with a rate of its own that falls."""

    def made(parameters: Iterable[nn.Parameter]) -> tuple[Any, ...]:
        parameters = list(parameters)
        sgd = torch.optim.SGD([p for p in parameters if p.dim() > 1], lr=0.1, momentum=0.9, nesterov=True)
        vectors = adam([p for p in parameters if p.dim() < 2])
        return sgd, vectors, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)

    model = network()
    parts = made(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch)
        for part in parts:
            part.step()
        return told

    return proven(step, model, optimizer=made)


def cleared_at_the_end(by_hand: bool) -> LoopProof:
    """Gradients are cleared once they were used, by an optimizer or by hand."""
    model = network()
    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch, None if by_hand else optimizer)
        if by_hand:
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        optimizer.zero_grad()
        return told

    return proven(step, model, **({"optimizer": lambda given: torch.optim.SGD(given, lr=0.1)} if by_hand else {}))


def gradient_penalty() -> LoopProof:
    model = network(1)

    def smooth(model: nn.Module, batch: Any) -> Told:
        x = batch[0].clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.sum() + 10 * (slope.norm(dim=1) - 1).square().sum(), len(x)

    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, smooth, batch, optimizer), model, objective=smooth)


def contrast(local: bool) -> LoopProof:
    """Contrast with the negatives of all ranks, gathered with gradients; or, wrongly, with a rank's own."""
    from torch.distributed.nn.functional import all_gather

    def views(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return F.normalize(model(batch[0]), dim=1), F.normalize(model(batch[0].flip(1)), dim=1)

    def of_whole(model: nn.Module, batch: Any) -> Told:
        ours, theirs = views(model, batch)
        return F.cross_entropy(ours @ theirs.T / 0.2, torch.arange(len(ours)), reduction="sum"), len(ours)

    model = network(WIDTH)
    optimizer = adam(model.parameters())

    def gathered(model: nn.Module, batch: Any) -> Told:
        ours, theirs = views(model, batch)
        everyone = torch.cat(all_gather(theirs))
        places = torch.arange(len(ours)) + dist.get_rank() * len(ours)
        return F.cross_entropy(ours @ everyone.T / 0.2, places, reduction="sum"), len(ours)

    rank = dist.get_rank()
    given = [(x[: 4 + rank][:4], y[:4]) for x, y in batches(rows=4 + 2 * rank)]  # as many rows on every rank
    if local:
        return proven(lambda batch: take(model, of_whole, batch, optimizer), model, given, objective=of_whole)
    of_whole.coupled = "batch"  # type: ignore[attr-defined]
    return proven(lambda batch: take(model, gathered, batch, optimizer), model, given, objective=of_whole)


def teacher() -> LoopProof:
    """A teacher that follows the student; what the objective reads of it is as it was before the step."""
    model = network()
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = adam(model.parameters())

    def followed(model: nn.Module, batch: Any) -> Told:
        target = slow(batch[0] + 0.1).softmax(1)
        return F.cross_entropy(model(batch[0]), target, reduction="sum"), len(batch[0])

    def step(batch: Any) -> Tensor:
        told = take(model, followed, batch, optimizer)
        with torch.no_grad():
            for ours, theirs in zip(slow.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.2)
        return told

    return proven(step, model, objective=followed)


# ---- what is trained, and how often ----------------------------------------------------------------------------------


def in_turn() -> LoopProof:
    """The head and the body are frozen in turn."""
    model = network()
    optimizer, steps = adam(model.parameters()), [0]

    def step(batch: Any) -> Tensor:
        steps[0] += 1
        for number, layer in ((0, model[0]), (1, model[2])):
            layer.requires_grad_(steps[0] % 2 == number)
        return take(model, classified, batch, optimizer)

    return proven(step, model)


def policy() -> LoopProof:
    """Policy gradients over actions that were drawn before: by the ratio to the old policy, clipped."""
    model = network()
    optimizer = adam(model.parameters())

    def clipped(model: nn.Module, batch: Any) -> Told:
        x, actions, old, advantage = batch
        ratio = (model(x).log_softmax(1).gather(1, actions[:, None])[:, 0] - old).exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum(), len(x)

    with torch.no_grad():
        given = [(x, y, model(x).log_softmax(1).gather(1, y[:, None])[:, 0], x[:, 0]) for x, y in batches()]
    return proven(lambda batch: take(model, clipped, batch, optimizer), model, given, objective=clipped)


def drawn_actions() -> LoopProof:
    """Policy gradients over actions that the objective draws: of these no two calls are the same."""
    model = network()
    optimizer = adam(model.parameters())

    def drawn(model: nn.Module, batch: Any) -> Told:
        scores = model(batch[0])
        actions = torch.distributions.Categorical(logits=scores).sample()
        return F.cross_entropy(scores, actions, reduction="sum"), len(actions)

    return proven(lambda batch: take(model, drawn, batch, optimizer), model, objective=drawn)


def lbfgs() -> LoopProof:
    model = network()
    made = lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, history_size=3)  # noqa: E731
    optimizer = made(model.parameters())
    return proven(lambda batch: optimizer.step(lambda: take(model, classified, batch)), model, optimizer=made)


class DecaysInPlace(torch.optim.Optimizer):
    """Adds weight decay to the gradients themselves, as many optimizers do that torch does not have."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make an update."""
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad.add_(p, alpha=0.1)


def changes_gradients(kind: str) -> LoopProof:
    """An optimizer that changes gradients in place, as torch's own does where it has them in lists."""
    model = network()
    in_lists = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    made: Any = in_lists if kind == "in lists" else DecaysInPlace
    optimizer = made(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model, optimizer=made)


def follows_the_loss() -> LoopProof:
    """A rate that falls where the loss does not: a schedule whose step wants the loss."""

    def made(parameters: Iterable[nn.Parameter]) -> tuple[Any, ...]:
        optimizer = adam(parameters)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    model = network()
    optimizer, schedule = made(model.parameters())

    def step(batch: Any) -> Tensor:
        told = take(model, classified, batch, optimizer)
        schedule.step(float(told))
        return told

    return proven(step, model, optimizer=made)


class Stops(torch.optim.Adam):
    """An optimizer that cannot make its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        """Make an update, or fail."""
        self.steps += 1
        if self.steps > 1:
            raise KeyError("exp_avg")
        return super().step(closure)


def update_that_fails() -> LoopProof:
    model = network()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model, optimizer=Stops)


def amp_by_hand(dtype: str) -> LoopProof:
    """A loss scale by hand, which grows, and is taken out again before gradients are clipped."""
    model = network() if dtype == "fp64" else network().float()
    given = [(x if dtype == "fp64" else x.float(), y) for x, y in batches()]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss, count = classified(model, batch)
        items = summed(count)
        scaler.scale(loss / items.to(loss.dtype)).backward()
        for p in model.parameters():
            p.grad = summed(p.grad).to(p.dtype)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        return summed(loss) / items

    return proven(step, model, given, clip_norm=0.05)


def accumulated() -> LoopProof:
    """Micro-batches are cut by hand, with one all-reduce at their end."""
    model = DistributedDataParallel(network())
    optimizer = adam(model.parameters())

    def pieces(batch: Any) -> list[Pair]:
        return list(zip(batch[0].split(2), batch[1].split(2), strict=True))

    def step(batch: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        items, total = summed(len(batch[0])), torch.zeros((), dtype=torch.float64)
        *most, last = pieces(batch)
        for piece in [*most, last]:
            with model.no_sync() if piece is not last else torch.enable_grad():
                loss, _ = classified(model, piece)
                (loss * dist.get_world_size() / items).backward()
            total += loss.detach()
        optimizer.step()
        return {"loss": summed(total) / items}

    return proven(step, model, split=pieces)


# ---- models ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A module of the user's own whose child is called `module`, and which does more than call it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, x: Tensor) -> Tensor:
        """Return the child's outputs, doubled."""
        return 2 * self.module(x)


class Recurrent(nn.Module):
    """A recurrent model as torch has it by default: time comes first, and samples are columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.body, self.head = nn.Embedding(CLASSES, 6), nn.LSTM(6, 6), nn.Linear(6, CLASSES)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [time, samples, classes]."""
        return self.head(self.body(self.embed(tokens))[0])


def time_first() -> LoopProof:
    model = Recurrent()
    optimizer = adam(model.parameters())

    def texts(model: nn.Module, batch: Any) -> Told:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()

    generator = torch.Generator().manual_seed(60 + dist.get_rank())
    tokens = [torch.randint(0, CLASSES, (6, 3), generator=generator) for _ in range(STEPS)]
    given = [(each[:-1], each[1:]) for each in tokens]
    return proven(lambda batch: take(model, texts, batch, optimizer), model, given, objective=texts)


class Recomputed(nn.Module):
    """Two blocks, of which one is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(WIDTH), network()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def of_model(kind: str) -> LoopProof:
    """A plain loop on an odd model."""
    model = {"own module": Scaled, "recomputed": Recomputed}.get(kind, network)()
    if kind == "compiled blocks":
        model[0] = torch.compile(model[0], backend="eager")  # type: ignore[operator]
    if kind == "weight norm by hooks":
        model[0] = nn.utils.weight_norm(model[0])  # type: ignore[operator, index]
        model(batches()[0][0])
    if kind == "spectral norm, evaluated":
        model[2] = nn.utils.parametrizations.spectral_norm(model[2])  # type: ignore[operator, index]
        model.eval()
    if kind == "whole numbers":
        model.register_parameter("places", nn.Parameter(torch.arange(4), requires_grad=False))
    if kind == "compiled":
        model = torch.compile(model, backend="eager")  # type: ignore[assignment]
    if kind == "DDP":
        model = DistributedDataParallel(model)
    optimizer = adam([p for p in model.parameters() if p.requires_grad])

    def step(batch: Any) -> Tensor | None:
        if kind != "DDP":
            return take(model, classified, batch, optimizer)
        optimizer.zero_grad()
        loss, count = classified(model, batch)
        items = summed(count)
        (loss * dist.get_world_size() / items).backward()
        optimizer.step()
        told = summed(loss) / items
        return told if dist.get_rank() == 0 else None  # as logs on rank 0 have it

    return proven(step, model)


def statistics(kind: str) -> LoopProof:
    """Batch statistics of a rank's own rows, or of all, or those kept from before."""
    torch.manual_seed(5)
    norm = nn.SyncBatchNorm if kind == "all" else nn.BatchNorm1d
    model = nn.Sequential(nn.Linear(WIDTH, 8), norm(8), nn.Linear(8, CLASSES)).double()
    if kind == "kept":
        model.eval()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model)


def pieces_by_hand(kind: str) -> LoopProof:
    """Micro-batches of two rows on one device: plain, under autocast, or with their own batch statistics."""
    torch.manual_seed(5)
    norm: nn.Module = nn.BatchNorm1d(8) if kind == "statistics" else nn.Identity()
    model = nn.Sequential(nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Linear(8, CLASSES))

    def narrow(model: nn.Module, batch: Any) -> Told:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            logits = model(batch[0])
        return F.cross_entropy(logits.float(), batch[1], reduction="sum"), len(batch[0])

    def pieces(batch: Any) -> list[Pair]:
        return list(zip(batch[0].split(2), batch[1].split(2), strict=True))

    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        losses = [narrow(model, piece)[0] / len(batch[0]) for piece in pieces(batch)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        return torch.stack(losses).sum()

    given = [(x.float(), y) for x, y in batches(rows=8)]
    return proven(step, model, given, objective=narrow, split=pieces)


def same_batch(said: bool) -> LoopProof:
    """Both ranks have the same rows; where it is said that they share them, that is right."""
    torch.manual_seed(7)
    given = [(torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 3]))]
    model = network()
    optimizer = adam(model.parameters())
    part = {"part": 0} if said else {}
    return proven(lambda batch: take(model, classified, batch, optimizer), model, given, **part)


def no_rows() -> LoopProof:
    """The data are at an end on all ranks but the first."""
    given = [(x[: 4 if dist.get_rank() == 0 else 0], y[: 4 if dist.get_rank() == 0 else 0]) for x, y in batches()]
    model = network()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model, given)


def thawed() -> LoopProof:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[operator]
    optimizer = adam(model.parameters())

    def step(batch: Any) -> Tensor:
        model[0].requires_grad_(True)  # type: ignore[operator]
        return take(model, classified, batch, optimizer)

    return proven(step, model)


def told_a_word() -> LoopProof:
    model = network()
    optimizer = adam(model.parameters())
    return proven(lambda batch: str(take(model, classified, batch, optimizer)) + " nats", model)


def no_optimizer() -> LoopProof:
    model = network()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model, optimizer=lambda given: list(given))


def objective_on_its_own() -> LoopProof:
    """The objective calls the model of the loop, and not the one that it is given."""
    model = DistributedDataParallel(network())
    optimizer = adam(model.parameters())
    own = lambda _, batch: classified(model, batch)  # noqa: E731
    return proven(lambda batch: take(model, own, batch, optimizer), model, objective=own)


def objective_with_peers() -> LoopProof:
    """The objective divides by the items of all ranks, for which it asks them itself."""
    model = network()
    optimizer = adam(model.parameters())

    def mean(model: nn.Module, batch: Any) -> Told:
        loss, count = classified(model, batch)
        return loss / summed(count), 1

    return proven(lambda batch: take(model, mean, batch, optimizer), model, objective=mean)


def optimizer_of_its_own() -> LoopProof:
    """The optimizer of the loop is given where one of the reference is asked for."""
    model = network()
    optimizer = adam(model.parameters())
    return proven(lambda batch: take(model, classified, batch, optimizer), model, optimizer=lambda given: optimizer)

"""Models and objectives of specs in which mistakes are planted; a spec names them by import path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tests_shared
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.task.objective import next_token
from paceline.task.rules import Rules

VOCAB = 257  # bytes and an end of document


class Dropout(tests_shared.Dropout):
    """A small network with dropout, a tied weight and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__(vocab=VOCAB)


class Chain(nn.Module):
    """A chain of blocks with dropout."""

    paceline_rules = Rules(first=("embed",), blocks="layers", last=("head",))

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3)) for _ in range(4))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class RecomputedChain(Chain):
    """The chain, which computes its blocks again by itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class TiedChain(Chain):
    """The chain without its noise, whose head is its embedding."""

    paceline_rules = Rules(first=("embed",), blocks="layers", last=("head",))

    def __init__(self, width: int = 12) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight


class Biased(nn.Module):
    """Layers with biases, whose matrices tensor ranks split by columns and by rows."""

    paceline_rules = Rules(tensor={"layers.*.up": "column", "layers.*.down": "row", "head": "vocabulary"})

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 3 * width), "down": nn.Linear(3 * width, width)}) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](x)))
        return self.head(x)


class Branches(nn.Module):
    """Layers for rows by the token that they begin with: some are reached in one step and not in the next."""

    def __init__(self, width: int = 12, branches: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for number, layer in enumerate(self.branches):
            chosen = (tokens[:, 0] + tokens[:, 1]) % len(self.branches) == number
            if chosen.any():
                x = x.index_add(0, chosen.nonzero().flatten(), layer(x[chosen]))
        return self.head(x)


class WholeBranches(Branches):
    """The branches, whose weights are gathered before each pass."""

    needs_whole_weights = True


class Tempered(nn.Module):
    """A head whose logits are divided by a temperature, a parameter without dimensions."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.embed(tokens)) / self.temperature


class Transposed(nn.Module):
    """A layer whose weight lies column after column in memory."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.head.weight = nn.Parameter(torch.randn(width, VOCAB).mul_(0.1).t())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.embed(tokens).tanh())


class Counted(torch.optim.Optimizer):
    """Momentum whose bias is corrected by a count that is kept as a number of Python's."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state |= {"updates": 0, "mean": torch.zeros_like(weight)}
                state["updates"] += 1
                state["mean"].lerp_(weight.grad, 0.5)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(state["mean"] / (1 - 0.5 ** state["updates"]), alpha=group["lr"])


class BatchStatistics(nn.Module):
    """Batch normalisation written by hand, which no type tells."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        return self.head((x - x.mean((0, 1))) / (x.var((0, 1)) + 1e-5).sqrt())


class Synced(nn.Module):
    """Batch normalisation over the rows of all ranks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, width), nn.SyncBatchNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.norm(self.embed(tokens).mT).mT)


class Tables(Synced):
    """The same beside tables that nothing moves: masks of the least number and of infinity, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        least = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("mask", least)
        self.register_buffer("infinite", torch.full((4, 4), -torch.inf).triu(1))
        self.table = nn.Parameter(least.clone(), requires_grad=False)


class Halves(nn.Module):
    """Embeds the two halves of a row, which belong together."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(VOCAB, width), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return [rows, width] of each half."""
        x = F.normalize(self.body(self.embed(tokens)).tanh(), dim=-1)
        first, second = x.chunk(2, dim=1)
        return first.mean(1), second.mean(1)


Found = tuple[Tensor, Any]


def info_nce(model: nn.Module, batch: Any) -> Found:
    """Return the summed contrast of each row's halves with those of the other rows at hand."""
    first, second = model(batch["tokens"])
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)), reduction="sum"), len(first)


def nce_without_gradients(model: nn.Module, batch: Any, gather_rows: Callable[[Tensor], Any]) -> Found:
    """Return the contrast with the rows of all ranks, of which those of other ranks get no gradient."""
    first, second = model(batch["tokens"])
    everyone, own = gather_rows(second)
    seen = torch.cat((everyone[: own.start].detach(), second, everyone[own.stop :].detach()))
    return F.cross_entropy(first @ seen.T / 0.1, torch.arange(own.start, own.stop), reduction="sum"), len(first)


def mean_and_one(model: nn.Module, batch: Any) -> Found:
    """Return a mean, and one item."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), 1


def mean_and_rows(model: nn.Module, batch: Any) -> Found:
    """Return a mean, and the number of rows."""
    return mean_and_one(model, batch)[0], len(batch["tokens"])


def by_world(model: nn.Module, batch: Any) -> Found:
    """Return the loss of next tokens, divided by the number of ranks: what it is a sum over, it does not say."""
    loss, weight = next_token(model, batch)
    return loss / (dist.get_world_size() if dist.is_initialized() else 1), weight


def gathered_nce(model: nn.Module, batch: Any, gather_rows: Callable[[Tensor], Any]) -> Found:
    """Return the contrast with the rows of all ranks."""
    first, second = model(batch["tokens"])
    everyone, own = gather_rows(second)
    return F.cross_entropy(first @ everyone.T / 0.1, torch.arange(own.start, own.stop), reduction="sum"), len(first)


class Capacity(nn.Module):
    """Experts that take as many tokens as a micro-batch has in the mean, and leave out the rest."""

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.router, self.experts = nn.Linear(width, experts), nn.Parameter(torch.randn(experts, width, width) / width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        place = F.one_hot(chosen, len(self.experts)).cumsum(0).gather(1, chosen.unsqueeze(1)).squeeze(1)
        kept = (place <= -(-len(flat) // len(self.experts))).to(x.dtype)
        out = torch.einsum("ti,tij->tj", flat, self.experts[chosen])
        return self.head(x + (out * (weight * kept).unsqueeze(1)).view_as(x))


class Crossed(nn.Module):
    """Attention that takes rows for tokens: `batch_first` was forgotten."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.attention = nn.MultiheadAttention(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class Counting(nn.Module):
    """Positions that go on from row to row."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        places = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens).unsqueeze(-1)
        return self.head(self.embed(tokens) + (places / 7).sin())


class ByPlace(nn.Module):
    """A rank scales what it embeds by its own number, as code does that was made for one layout."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self.head(self.embed(tokens).tanh() * (1 + 1e-3 * rank))


def noise_by_rank(model: nn.Module, batch: Any) -> Found:
    """Return the loss of tokens of which some are replaced, by a seed of the rank."""
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    tokens = batch["tokens"].clone()
    tokens[:, int(torch.randint(0, tokens.shape[1], (), generator=generator))] = 1
    return next_token(model, {**batch, "tokens": tokens})


def mixed_rows(model: nn.Module, batch: Any) -> Found:
    """Return the loss of rows that are mixed with the row before them in their micro-batch."""
    tokens, labels = batch["tokens"], batch["labels"]
    logits = 0.9 * model(tokens) + 0.1 * model(tokens.roll(1, 0))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def z_mean(model: nn.Module, batch: Any) -> Found:
    """Return the loss of next tokens as a sum, with a z-loss that is a mean."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss + 1e-2 * logits.logsumexp(-1).square().mean(), (labels != -100).sum()


def balanced(model: nn.Module, batch: Any) -> Found:
    """Return the loss of next tokens, which weigh less the more of them a micro-batch has."""
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    counted = labels != -100
    often = torch.bincount(labels[counted], minlength=VOCAB).clamp(min=1).to(logits.dtype)
    return F.cross_entropy(logits, labels, weight=1 / often, reduction="sum"), counted.sum()


def hardest(model: nn.Module, batch: Any) -> Found:
    """Return the loss of the harder half of a micro-batch's tokens, and how many these are."""
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    losses = F.cross_entropy(logits, labels, reduction="none")
    most = losses.topk(max(1, len(losses) // 2)).values
    return most.sum(), len(most)

"""Programs that draw random numbers in the ways that people write them, on the token rows of tests_shared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests_shared import SEQ_LEN, VOCAB
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.task.models.layers.attention import CausalAttention
from paceline.task.objective import next_token
from paceline.task.rules import Rules

WIDTH = 8


class Chain(nn.Module):
    """Embedding, blocks, head; subclasses say what a block is."""

    paceline_rules = Rules(first=("embed",), blocks="layers", last=("head",))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(self.block() for _ in range(3))

    def block(self) -> nn.Module:
        """Return one of the repeated blocks."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Encoder(Chain):
    """torch's own encoder layers: dropout of attention, of the residual stream and inside the feed-forward."""

    def block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.2, batch_first=True)


class SequenceFirst(nn.Module):
    """The same layers with the sequence first: [seq, rows, width] and, inside, [rows * heads, seq, seq]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.2)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens).transpose(0, 1)).transpose(0, 1))


class Replayed(Chain):
    """Blocks that the model itself runs again in the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class LayerDrop(Chain):
    """Whole layers left out for the whole batch, by a number without rows, written in two ways."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            chance = torch.rand([]) if index % 2 else torch.rand(1)
            if chance > 0.4:
                x = x + layer(x)
        return self.head(x)


class StochasticDepth(Chain):
    """Layers left out for single samples (Huang et al. 2016), and noise that all samples share."""

    def block(self) -> nn.Module:
        return SometimesLeftOut()


class SometimesLeftOut(nn.Module):
    """A block that some samples pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shared = 0.1 * torch.randn(WIDTH)
        return (self.inner(x) + shared) * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.6)


class Flattened(Chain):
    """Dropout and multiplicative noise on [rows * seq, width]."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            x = x + layer(x) * torch.normal(1.0, 0.1, x.shape).to(x)
        return self.head(x).unflatten(0, (-1, tokens.shape[1]))


class Features(Chain):
    """Whole channels dropped, alpha dropout, Gumbel noise and random slopes."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout1d(self.embed(tokens).transpose(1, 2), 0.3).transpose(1, 2)
        x = F.alpha_dropout(x, 0.2, training=True) + F.gumbel_softmax(x, dim=-1)
        for layer in self.layers:
            x = x + F.rrelu(layer(x), training=self.training)
        return self.head(x)


class ReplayedFunction(Chain):
    """A function, not a module, is run again, and draws."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.start, self.embed(tokens), use_reentrant=False)
        return self.head(x)

    def start(self, x: Tensor) -> Tensor:
        """Return what is left of the stream."""
        return F.dropout(x, 0.3)


class Recurrent(nn.Module):
    """Dropout between the layers of an LSTM, which is drawn inside of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Attending(nn.Module):
    """A model whose sequences can be shared, with dropout on the stream and on rows of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(AttendingLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = F.dropout(self.embed(tokens) + self.place(positions), 0.2, self.training)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class AttendingLayer(nn.Module):
    """Attention of two heads; tokens and single samples are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attend, self.drop = nn.Linear(WIDTH, 3 * WIDTH), CausalAttention(), nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = self.attend(q, k, v, mask).transpose(1, 2).flatten(2)
        flat = self.drop(attended.flatten(0, 1)).view_as(attended)  # [rows * seq, width]
        return x + flat * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8)


class Start(nn.Module):
    """Tokens and where they stand, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(self.embed(tokens) + self.place(positions), 0.2, self.training)


class AttendingChain(nn.Module):
    """The same as a chain, so that stages can share sequences too."""

    paceline_rules = Rules(first=("start",), blocks="layers", last=("head",))

    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = Start(), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList(AttendingLayer() for _ in range(3))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.start(tokens, torch.arange(tokens.shape[1]) if positions is None else positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def denoise(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of tokens masked at a rate that every sample draws, as diffusion over text does."""
    rate = torch.rand(batch["tokens"].shape[0], 1, device=batch["tokens"].device)
    masked = torch.rand(batch["tokens"].shape, device=rate.device) < rate
    return next_token(model, {**batch, "tokens": batch["tokens"].masked_fill(masked, 0)})


def denoise_parts(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The same for ranks that share sequences."""
    return denoise(model, batch)


denoise_parts.sums_over_tokens = True  # type: ignore[attr-defined]


def variational(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of logits plus noise whose scale is the model's own: the reparametrisation of a VAE."""
    logits = model(batch["tokens"])
    noisy = logits + torch.randn_like(logits) * logits.std(-1, keepdim=True)
    loss = F.cross_entropy(noisy.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    return loss, (batch["labels"] != -100).sum()


class ByHand(Chain):
    """Python's own random numbers decide what the model does."""

    def forward(self, tokens: Tensor) -> Tensor:
        import random

        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x) if random.random() < 0.5 else x
        return self.head(x)


class OfPairs(Chain):
    """Noise on pairs of samples: it belongs to none of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        pairs = torch.rand(len(x), len(x), dtype=x.dtype).softmax(-1)
        return self.head(torch.einsum("ab,bsw->asw", pairs, x))


class RowByRow(Chain):
    """One call of dropout for every sample."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.stack([F.dropout(row, 0.3) for row in self.embed(tokens)]))


class OwnOperator(Chain):
    """Random numbers that a function of C++ takes past torch's own."""

    def forward(self, tokens: Tensor) -> Tensor:
        seed = torch.default_generator.seed() % 7  # changes the state, as an extension's draws would
        return self.head(self.embed(tokens)) + 1e-3 * seed


assert SEQ_LEN % WIDTH == 0, "shapes that fit several readings are part of the test"

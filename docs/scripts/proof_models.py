"""A model of a user's own, with rules, for the table of proven layouts: small enough to be proven as it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.task.models.layers.attention import CausalAttention
from paceline.task.rules import Rules

VOCAB = 263  # bytes and an end-of-document mark fit in; a prime, so shards of the embedding are uneven
WIDTH, INNER, HEADS, LAYERS, POSITIONS = 48, 75, 8, 5, 24


class Block(nn.Module):
    """Attention and feed-forward with biases, layer norms, dropout and a table of positions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(POSITIONS, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attention = CausalAttention()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the next hidden states [rows, seq, width]."""
        h = self.norm1(x + self.place(positions))
        q, k, v = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.dropout(self.o(self.attention(q, k, v, mask).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class WithRules(nn.Module):
    """A language model of a user's own; the dozen lines of rules open the tensor and the pipeline axis."""

    paceline_rules = Rules(
        tensor={
            "embed": "vocabulary",
            **dict.fromkeys(("layers.*.q", "layers.*.k", "layers.*.v", "layers.*.up"), "column"),
            **dict.fromkeys(("layers.*.o", "layers.*.down"), "row"),
            "head": "vocabulary",
        },
        first=("embed",),
        blocks="layers",
        last=("norm", "head"),
        counts={"heads": HEADS},
    )

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.head(self.norm(x))


def with_rules() -> nn.Module:
    """Return the model with rules."""
    return WithRules()

"""Programs of a user's own, each with something that distributed training gets wrong: a module and its objective."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from torch import Tensor, nn

Summed = tuple[Tensor, Tensor]
WIDTH = 16


def rows_of(batch: Any) -> Tensor:
    """Return the number of rows of a batch that is a pair."""
    return torch.tensor(len(batch[0]))


def _tokens_loss(logits: Tensor, labels: Tensor) -> Summed:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()


class Residual(nn.Module):
    """x + up and down, the block of several models here."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """A chain of residual blocks on vectors."""

    def __init__(self, blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- convolutions and recurrences ----------------------------------------------------------------------------------


class UNet(nn.Module):
    """A U-Net of one scale: skip connections, transposed convolutions, GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 12, 3, 2, padding=1), nn.GroupNorm(3, 12), nn.SiLU())
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same size."""
        skip = self.inner(x)
        return self.out(torch.cat([skip, self.up(self.down(skip))], 1))


def denoised(model: nn.Module, batch: Any) -> Summed:
    """Return the squared error of the image smoothed, and its pixels."""
    images = batch[0]
    return (model(images) - F.avg_pool2d(images, 3, 1, 1)).square().sum(), torch.tensor(images.numel())


class ConvNet(nn.Module):
    """Two convolutions with a norm between, a pool and a head."""

    def __init__(self, norm: Any = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm or nn.GroupNorm(2, 8), nn.ReLU(),
                                  nn.Conv2d(8, 12, 3, 2), nn.ReLU())  # fmt: skip
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.body(x).mean((2, 3)))


def batch_norm() -> nn.Module:
    """Return a convolutional network with BatchNorm."""
    return ConvNet(nn.BatchNorm2d(8))


def synced_batch_norm() -> nn.Module:
    """Return the same, converted as torch says, whose statistics are those of all ranks' rows."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(batch_norm())


def channels_last() -> nn.Module:
    """Return a convolutional network whose weights lie in memory channels last."""
    return ConvNet().to(memory_format=torch.channels_last)


class HandBatchNorm(nn.Module):
    """Statistics over the batch that no class's name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.inner(x)
        return self.head(F.relu((h - h.mean(0)) / (h.var(0) + 1e-5).sqrt()))


class Recurrent(nn.Module):
    """An embedding, two layers of GRU or LSTM, and a head."""

    def __init__(self, kind: str = "GRU") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.cells = getattr(nn, kind)(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.cells(self.embed(tokens))[0])


class Encoder(nn.Module):
    """torch's own nn.TransformerEncoder under a causal mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.layers(x, mask=mask))


# ---- losses over more than a row -----------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two encoders of the two halves of a vector, and a temperature, which is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH // 2, 8), nn.Linear(WIDTH // 2, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return similarities [rows, rows]."""
        left, right = (F.normalize(side(part), dim=-1) for side, part in
                       zip((self.left, self.right), x.chunk(2, -1), strict=True))  # fmt: skip
        return left @ right.T * self.temperature.exp()


def info_nce(model: nn.Module, batch: Any) -> Summed:
    """Return the contrastive loss of every row against all others of the batch."""
    similar = model(batch[0])
    return F.cross_entropy(similar, torch.arange(len(similar)), reduction="sum"), rows_of(batch)


def mean_of_rows(model: nn.Module, batch: Any) -> Summed:
    """Return a mean where a sum is asked for: the mistake that most loops invite."""
    return F.cross_entropy(model(batch[0]), batch[1]), torch.tensor(1)


# ---- parameters that not every step reaches ------------------------------------------------------------------------


class Unused(Classifier):
    """A layer that no forward pass uses, and a scalar that scales the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x) * self.scale


class Frozen(Classifier):
    """The first blocks are frozen, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


class SharedBlocks(nn.Module):
    """One block used three times, as ALBERT does, in a list that names it three times."""

    def __init__(self) -> None:
        super().__init__()
        block = Residual()
        self.blocks = nn.ModuleList([block, block, block])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedAcross(Classifier):
    """Blocks that are different modules with one common weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, base.in_features)), nn.Parameter(
            torch.zeros(base.out_features, rank))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + x @ self.a.T @ self.b.T


def lora() -> nn.Module:
    """Return a classifier of which only low-rank additions and the head are trained."""
    model = Classifier().requires_grad_(False)
    for block in model.blocks:
        block.up = LoRA(block.up)
    model.head.requires_grad_(True)
    return model


class Distilled(nn.Module):
    """A student and its frozen teacher, which stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Classifier(2), Classifier(4).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both."""
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def distillation(model: nn.Module, batch: Any) -> Summed:
    """Return the divergence of student from teacher, and the rows."""
    student, teacher = model(batch[0])
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="sum"), rows_of(batch)


class Siamese(Classifier):
    """A model that the objective calls twice."""


def siamese(model: nn.Module, batch: Any) -> Summed:
    """Return how far the logits of a vector and of its reverse are apart, plus the cross-entropy."""
    logits, other = model(batch[0]), model(batch[0].flip(-1))
    return (logits - other).square().sum() + F.cross_entropy(logits, batch[1], reduction="sum"), rows_of(batch)


class Autoencoder(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder; the objective calls `encode`, not `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))

    def encode(self, x: Tensor) -> Tensor:
        """Return the code."""
        return torch.tanh(F.linear(x, self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Return the vector again."""
        return F.linear(self.encode(x), self.weight.T, self.bias)


def reconstruction(model: nn.Module, batch: Any) -> Summed:
    """Return the error of the vector made again."""
    return (model(batch[0]) - batch[0]).square().sum(), rows_of(batch)


def sparse_reconstruction(model: nn.Module, batch: Any) -> Summed:
    """Return the error, plus the size of the code, for which the objective calls a method of the model."""
    error = (model(batch[0]) - batch[0]).square().sum()
    return error + 0.1 * model.encode(batch[0]).abs().sum(), rows_of(batch)  # type: ignore[operator]


class ListedExperts(nn.Module):
    """Experts as a list of modules, of which each row passes the one that its router likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if len(rows):  # which experts run depends on the rows, and so on the rank
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return self.head(out)


# ---- other data ----------------------------------------------------------------------------------------------------


class Ragged(nn.Module):
    """A mean over the real steps of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, steps: Tensor, length: Tensor) -> Tensor:
        """Return logits."""
        real = (torch.arange(steps.shape[1]) < length[:, None])[..., None]
        return self.head((F.gelu(self.inner(steps)) * real).sum(1) / length[:, None])


def ragged_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the cross-entropy, each row counted by its length."""
    logits = model(batch["steps"], batch["length"])
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return (losses * batch["length"]).sum(), batch["length"].sum()


class Graph(nn.Module):
    """Two rounds of messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return logits."""
        for layer in self.rounds:
            nodes = nodes + torch.tanh(layer(edges @ nodes))
        return self.head(nodes.mean(1))


def graph_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the cross-entropy of the graphs."""
    logits = model(batch["nodes"], batch["edges"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), torch.tensor(len(logits))


class Flow(nn.Module):
    """A neural ODE of four Runge-Kutta steps: one small network called sixteen times."""

    def __init__(self) -> None:
        super().__init__()
        self.speed = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for _ in range(4):
            a = self.speed(x)
            b = self.speed(x + a / 8)
            c = self.speed(x + b / 8)
            x = x + (a + 2 * b + 2 * c + self.speed(x + c / 4)) / 24
        return self.head(x)


class FusedAttention(nn.Module):
    """A decoder whose queries, keys and values are one matrix, with plain rules for its feed-forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out, self.block = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Residual()
        self.scale = 1 / math.sqrt(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale))
        return self.head(self.block(x))


def tokens_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the cross-entropy of the next tokens."""
    return _tokens_loss(model(batch["tokens"]), batch["labels"])

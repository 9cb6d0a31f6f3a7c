"""More programs as a stranger writes them: weights that forward passes make or change, hooks, memory of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, Residual, Summed, rows_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import checkpoint

# ---- weights that are made or changed --------------------------------------------------------------------------------


class Hyper(nn.Module):
    """A network makes the weights of another one, for each row its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, CLASSES * 8)
        self.body = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        weights = self.maker(x.flip(-1)).unflatten(-1, (CLASSES, 8))
        return torch.einsum("rcw,rw->rc", weights, self.body(x).tanh())


class Standardised(nn.Module):
    """Convolutions whose weights are standardised in every forward pass, and GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        weight = self.first.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        x = self.norm(F.conv2d(x, weight, self.first.bias)).relu()
        return self.head(x.mean((2, 3)))


def orthogonal_layers() -> nn.Module:
    """Return a classifier with orthogonal weights, by a parametrisation."""
    model = Classifier(2)
    for block in model.blocks:
        orthogonal(block.up)
    return model


class Renormed(nn.Module):
    """An embedding that shortens its rows in place, as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH, max_norm=1.0), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.embed(tokens))


class Clamped(Classifier):
    """Weights are clamped in place by every forward pass, as in a Wasserstein critic."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.clamp_(-0.05, 0.05)
        return super().forward(x)


class Numbered(Classifier):
    """Holds whole numbers as a parameter without gradient, and one parameter without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x[:, self.order]) + self.nothing.sum()


# ---- hooks, recompute and gradients of their own ---------------------------------------------------------------------


class MaskedGradient(Classifier):
    """Half of a weight is kept from learning by a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(CLASSES, WIDTH)
        mask[:, ::2] = 0.0
        self.head.weight.register_hook(lambda grad: grad * mask.to(grad.dtype))


class Doubled(Classifier):
    """A backward hook doubles the gradient that goes into a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_hook(lambda module, into, out: tuple(2 * each for each in into))


class Recomputed(Classifier):
    """Recomputes its blocks itself, in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = checkpoint(self.blocks[1], x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return self.head(self.blocks[2](x))


class Turned(torch.autograd.Function):
    """A product whose gradients come back transposed and expanded in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        """Return x weight^T + bias."""
        ctx.save_for_backward(x, weight)
        ctx.size = bias.shape
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Return gradients that are views."""
        x, weight = ctx.saved_tensors
        return (weight.T @ grad.T).T, (x.T @ grad).T, grad.sum().expand(ctx.size)


class Strided(nn.Module):
    """A layer whose gradients are views: one transposed, one of a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, WIDTH) / 4), nn.Parameter(torch.zeros(24))
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(Turned.apply(x, self.weight, self.bias).tanh())


class Narrow(Classifier):
    """One block computes in fp32, whatever the others do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        gate = F.linear(x.float(), self.blocks[0].up.weight.float()).softmax(-1)
        return super().forward(x) + gate.to(x.dtype).square().sum(-1, keepdim=True) * x[:, :CLASSES]


# ---- memory of their own, and chance ---------------------------------------------------------------------------------


class Queue(nn.Module):
    """Keys of earlier rows stand in a buffer against which rows are told apart, as in MoCo."""

    def __init__(self, length: int = 32) -> None:
        super().__init__()
        self.body = Residual()
        self.register_buffer("queue", F.normalize(torch.randn(length, WIDTH), dim=-1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the similarity of each row with its own key, and with those in the queue; put the keys there."""
        query, key = (F.normalize(self.body(each), dim=-1) for each in (x, x.roll(1, -1)))
        apart = query @ self.queue.clone().T
        if self.training:
            self.queue.copy_(torch.cat((key.detach(), self.queue))[: len(self.queue)])
        return (query * key).sum(-1, keepdim=True), apart


def told_from_queue(model: nn.Module, batch: Any) -> Summed:
    """Return the contrast with the queue."""
    logits = torch.cat(model(batch[0]), -1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64), reduction="sum"), rows_of(batch)


class Quantised(nn.Module):
    """A codebook whose nearest entries stand for hidden states, with a straight-through gradient, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.codes = nn.Embedding(13, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (the rows made again, hidden states, their codes)."""
        hidden = self.encode(x)
        codes = self.codes(torch.cdist(hidden, self.codes.weight).argmin(-1))
        return self.decode(hidden + (codes - hidden).detach()), hidden, codes


def quantised_loss(model: nn.Module, batch: Any) -> Summed:
    """Return reconstruction, codebook and commitment."""
    made, hidden, codes = model(batch[0])
    apart = (codes - hidden.detach()).square().sum() + 0.25 * (codes.detach() - hidden).square().sum()
    return (made - batch[0]).square().sum() + apart, rows_of(batch)


class Bootstrap(nn.Module):
    """A slow copy of the encoder follows it in every forward pass, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.predict = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.target.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the similarity of what is foretold with what the slow copy says."""
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return F.cosine_similarity(self.predict(self.online(x)), self.target(x.flip(-1)), dim=-1)


def dissimilarity(model: nn.Module, batch: Any) -> Summed:
    """Return how far the rows are from what was foretold."""
    return (1 - model(batch[0])).sum(), rows_of(batch)


class MaskedAutoencoder(nn.Module):
    """Makes the patches of an image again of a quarter of them, which chance chooses."""

    def __init__(self, kept: int = 4) -> None:
        super().__init__()
        self.kept = kept
        self.embed, self.place = nn.Linear(48, WIDTH), nn.Parameter(torch.randn(16, WIDTH) / 4)
        self.body, self.missing = Residual(), nn.Parameter(torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (patches made again, patches, which were hidden)."""
        patches = F.unfold(images, 4, stride=4).transpose(1, 2)  # [rows, 16, 48]
        order = torch.rand(patches.shape[:2], dtype=patches.dtype).argsort(1)
        hidden = order.argsort(1) >= self.kept
        x = torch.where(hidden.unsqueeze(-1), self.missing, self.embed(patches)) + self.place
        return self.head(self.body(x + x.mean(1, keepdim=True))), patches, hidden


def of_hidden(model: nn.Module, batch: Any) -> Summed:
    """Return the squared error of hidden patches, and how many there are."""
    made, patches, hidden = model(batch[0])
    return (made - patches).square().mean(-1)[hidden].sum(), hidden.sum()


class DropPath(Classifier):
    """Leaves blocks out for some rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            keep = torch.rand(len(x), 1, dtype=x.dtype) < 0.7 if self.training else 1.0
            x = x + (block(x) - x) * keep
        return self.head(x)

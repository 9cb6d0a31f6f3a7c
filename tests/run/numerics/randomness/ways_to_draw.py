"""Ways to draw random numbers, one function of hidden states [rows, seq, width] each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from drawing_models import WIDTH, Chain
from torch import Tensor, nn

SHARED = torch.Generator()  # a program's own, at the top of a file


def noise_of_a_view(x: Tensor) -> Tensor:
    """Noise like a tensor that is not stored row by row."""
    return x + torch.randn_like(x.transpose(0, 2)).transpose(0, 2)


def number_for_each_row(x: Tensor) -> Tensor:
    """Noise whose shape is written by hand."""
    return x * torch.randn(x.shape[0], 1, 1, dtype=x.dtype)


def bernoulli(x: Tensor) -> Tensor:
    """A choice by a probability for each element."""
    return x * torch.bernoulli(x.detach().sigmoid())


def chosen_tokens(x: Tensor) -> Tensor:
    """Three tokens of each row, chosen by weights."""
    at = torch.multinomial(x.detach().mean(-1).softmax(-1), 3)
    return x + x.gather(1, at.unsqueeze(-1).expand(-1, -1, x.shape[2])).mean(1, keepdim=True)


def hard_gumbel(x: Tensor) -> Tensor:
    """A choice with a gradient."""
    return x * F.gumbel_softmax(x, hard=True)


def fused_attention(x: Tensor) -> Tensor:
    """Attention that drops by itself."""
    return x + F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)


def filled_normal(x: Tensor) -> Tensor:
    """A method that fills a view in place."""
    return x + torch.empty(x.shape[2], x.shape[0], x.shape[1], dtype=x.dtype).permute(1, 2, 0).normal_(0.0, 0.3)


def filled_uniform(x: Tensor) -> Tensor:
    """A method that fills a part of a tensor in place."""
    noise = torch.ones(x.shape[0], 2 * x.shape[1], x.shape[2], dtype=x.dtype)
    noise[:, ::2].uniform_(0.5, 1.5)
    return x * noise[:, : x.shape[1]]


def complex_noise(x: Tensor) -> Tensor:
    """Noise in the frequency domain."""
    spectrum = torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(spectrum * torch.randn_like(spectrum), n=x.shape[1], dim=1)


def distribution(x: Tensor) -> Tensor:
    """A sample of one of torch's distributions, with a gradient."""
    return torch.distributions.Normal(x, x.abs() + 0.1).rsample()


def shared_order(x: Tensor) -> Tensor:
    """The same order of tokens for all rows."""
    return x + x[:, torch.randperm(x.shape[1])]


def fixed_noise(x: Tensor) -> Tensor:
    """The same numbers in every micro-batch, by a generator that is seeded anew."""
    return x * torch.rand(x.shape[2], dtype=x.dtype, generator=torch.Generator().manual_seed(3))


def mixed_rows(x: Tensor) -> Tensor:
    """Mixup: every row with another one of its micro-batch."""
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def partners(x: Tensor) -> Tensor:
    """The same, partners drawn one by one."""
    return 0.7 * x + 0.3 * x[torch.randint(0, len(x), (len(x),))]


def best_row(x: Tensor) -> Tensor:
    """One row of the micro-batch, chosen by weights."""
    return x + x[torch.multinomial(x.detach().mean((1, 2)).softmax(0), 1)]


def by_numpy(x: Tensor) -> Tensor:
    """Noise of numpy's."""
    return x * torch.from_numpy(np.random.rand(len(x), 1, 1)).to(x)


def by_python(x: Tensor) -> Tensor:
    """One number of Python's."""
    return x * (1.0 if random.random() < 0.5 else 0.5)


def by_a_generator(x: Tensor) -> Tensor:
    """Noise for all rows, from a generator that goes on."""
    return x * torch.rand(x.shape[2], dtype=x.dtype, generator=SHARED)


def by_a_seeded_generator(x: Tensor) -> Tensor:
    """Noise for each row, from a generator that every micro-batch seeds anew."""
    return x * torch.rand(len(x), 1, 1, dtype=x.dtype, generator=torch.Generator().manual_seed(5))


def gamma(x: Tensor) -> Tensor:
    """A sample of a distribution that torch draws in one operator."""
    return x * torch.distributions.Beta(torch.ones(len(x), 1, 1).to(x), 2.0).sample()


class OwnFunction(torch.autograd.Function):
    """Dropout with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = F.dropout(torch.ones_like(x), 0.3)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.mask


def own_function(x: Tensor) -> Tensor:
    """A function with a backward pass of its own."""
    return OwnFunction.apply(x)


def mapped(x: Tensor) -> Tensor:
    """Noise by torch.func.vmap, over the rows."""
    return torch.func.vmap(lambda row: row * torch.rand_like(row), randomness="different")(x)


def twice(x: Tensor) -> Tensor:
    """The batch put together with itself, in one pass: each row has two masks, as in R-Drop and SimCSE."""
    one, other = F.dropout(torch.cat((x, x)), 0.3).chunk(2)
    return one + 0.5 * other


def noise_of_two_views(x: Tensor) -> Tensor:
    """Noise of a batch and its mirror image, put together along another dimension."""
    both = torch.cat((x, x.flip(1))).transpose(0, 1)
    one, other = (both + torch.randn_like(both)).transpose(0, 1).chunk(2)
    return one * other


def time_first(x: Tensor) -> Tensor:
    """Tokens of all rows in one list, time first."""
    return F.dropout(x.transpose(0, 1).flatten(0, 1), 0.3).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def tokens_in_a_list(x: Tensor) -> Tensor:
    """Tokens of all rows in one list, rows first."""
    return F.dropout(x.flatten(0, 1), 0.3).view_as(x)


EXACT: tuple[Callable[[Tensor], Tensor], ...] = (
    noise_of_a_view, number_for_each_row, bernoulli, chosen_tokens, hard_gumbel, fused_attention, filled_normal,
    filled_uniform, complex_noise, distribution, shared_order, own_function, mapped, twice, noise_of_two_views,
    time_first, tokens_in_a_list,
)  # fmt: skip
NAMED: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
    (mixed_rows, "n = 2 for 2 samples is 3 for 3"),
    (partners, "high = 2 for 2 samples is 3 for 3"),
    (best_row, "categories = 2 for 2 samples is 3 for 3"),
    (by_numpy, "numpy.random"),
    (by_python, "Python's module random"),
    (by_a_generator, "goes on with every micro-batch"),
    (by_a_seeded_generator, "draws for samples from a generator of its own"),
    (gamma, "draws its random numbers by itself"),
)


class Drawing(Chain):
    """A chain that draws in one of these ways before its head."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.way = way

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.way(self.embed(tokens)))


class HeldGenerator(Drawing):
    """The model holds a generator of numpy's."""

    def __init__(self) -> None:
        super().__init__(by_numpy)
        self.numbers = np.random.default_rng(3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x * torch.from_numpy(self.numbers.random((len(x), 1, 1))).to(x))


class Inside(Chain):
    """Layers of torch that draw inside of one operator, or of many."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers, self.layer = nn.ModuleList(), layer

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        out = self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        return self.head(x + (out[0] if isinstance(out, tuple) else out))


INSIDE = {
    "GRU": lambda: nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True),
    "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True),
    "Dropout2d": lambda: nn.Sequential(nn.Unflatten(2, (2, -1)), nn.Dropout2d(0.3), nn.Flatten(2)),
}


class Only(Chain):
    """Blocks that draw, and a program that takes some numbers of rows and no others."""

    def __init__(self, takes: Callable[[int], bool], drops: float = 0.3) -> None:
        self._drops = drops
        super().__init__()
        self.takes = takes

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(self._drops))

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.takes(len(tokens)):
            raise RuntimeError(f"no batch of {len(tokens)} rows, please")
        return super().forward(tokens)


def one(rows: int) -> bool:
    """Only one row at a time."""
    return rows == 1


def even(rows: int) -> bool:
    """Only even numbers of rows."""
    return rows % 2 == 0


def four(rows: int) -> bool:
    """Only four rows at a time."""
    return rows == 4


class ForMany(Chain):
    """Blocks that draw where a micro-batch has more than three rows alone, so that no look comes there."""

    def block(self) -> nn.Module:
        return DropsForMany()


class DropsForMany(nn.Module):
    """A linear layer, and dropout for more than three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return F.dropout(out, 0.3) if len(x) > 3 else out


class EveryOther(Chain):
    """A chain of which one block draws."""

    def __init__(self) -> None:
        self._made = 0
        super().__init__()

    def block(self) -> nn.Module:
        self._made += 1
        return Scaled(0.3 if self._made == 2 else 0.0)


class Scaled(nn.Module):
    """A linear layer with a dropout, which may be off."""

    def __init__(self, drops: float) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.gelu(self.inner(x)))


class NoiseOfGradients(Chain):
    """A hook that adds noise to a gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if x.requires_grad:
            x.register_hook(lambda grad: grad + 0.1 * torch.randn_like(grad))
        return self.head(x)


class Scripted(Chain):
    """A part in TorchScript, which no mode sees into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(), torch.jit.script(nn.Dropout(0.3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.embed(tokens)))

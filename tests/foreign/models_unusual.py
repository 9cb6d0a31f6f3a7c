"""More programs of a user's own: complex numbers, buffers, random numbers, and decisions that follow the data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from foreign_data import CLASSES, SEQ_LEN, VOCAB
from models_own import WIDTH, Classifier, Summed, rows_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

# ---- numbers that are not real, or not the layer's own --------------------------------------------------------------


class ComplexWeights(nn.Module):
    """A Fourier layer with complex weights, as in neural operators."""

    def __init__(self, length: int = 32) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(length // 2 + 1, dtype=torch.cfloat) / 4)
        self.mix = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a signal of the same length."""
        return torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=x.shape[-1]) + self.mix(x)


def signal_error(model: nn.Module, batch: Any) -> Summed:
    """Return the squared error of the signal."""
    return (model(batch[0]) - batch[1]).square().sum(), rows_of(batch)


class Fourier(nn.Module):
    """A Fourier layer with real weights: FFT and view_as_complex."""

    def __init__(self, length: int = 32) -> None:
        super().__init__()
        self.modes = nn.Parameter(torch.randn(length // 2 + 1, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a signal of the same length."""
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.modes), n=x.shape[-1])


class ComplexRotary(nn.Module):
    """Attention whose positions are rotations by a complex buffer, as in Meta's own Llama code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(SEQ_LEN), 100.0 ** -torch.linspace(0, 1, WIDTH // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * self.turns).flatten(2)
                for t in (q, k))  # fmt: skip
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def spectral() -> nn.Module:
    """Return a classifier whose layers have spectral norm: power iterations change buffers in every forward pass."""
    model = Classifier(2)
    for block in model.blocks:
        spectral_norm(block.up)
    return model


def weight_normed() -> nn.Module:
    """Return a classifier with weight norm: weights are computed from two others."""
    model = Classifier(2)
    for block in model.blocks:
        weight_norm(block.up)
    return model


class Transposed(nn.Module):
    """Weights that are transposed views in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter((torch.randn(WIDTH, 24) / 4).T), nn.Parameter((torch.randn(24, CLASSES) / 4).T)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return F.linear(F.linear(x, self.a).relu(), self.b)


class Rounded(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return x rounded to quarters."""
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient as it is."""
        return grad


class CustomFunction(Classifier):
    """A classifier whose input passes a function with a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(Rounded.apply(self.blocks[0](x)))


class MovingAverage(nn.Module):
    """Normalises by a moving average that every forward pass updates: a buffer that follows the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        h = self.inner(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return self.head(F.relu(h - self.mean))


class Counter(Classifier):
    """Counts its forward passes in an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.passes += 1
        return super().forward(x)


# ---- programs that look at the data --------------------------------------------------------------------------------


class Branching(Classifier):
    """Rows above a threshold pass one more block: `.any()`, a mask's indices and `.item()`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        large = x.mean(-1) > 1.0
        if large.any():
            rows = large.nonzero()[:, 0]
            x = x.index_copy(0, rows, self.blocks[0](x[rows]))
        count = int(large.sum().item())
        return super().forward(x) + 0.0 * count


class Iterated(nn.Module):
    """A fixed point: the block is repeated until every row has settled, at most eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inject = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        z, given = torch.zeros_like(x), self.inject(x)
        moving = torch.ones(len(x), 1, dtype=torch.bool)
        for _ in range(8):
            following = torch.tanh(0.5 * self.inner(z) + given)
            z, moving = torch.where(moving, following, z), moving & ((following - z).abs().amax(-1, True) > 1e-2)
            if not moving.any():
                break
        return self.head(z)


class Depth(Classifier):
    """Stochastic depth: a block is left out where a random number says so."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            if not self.training or torch.rand(()) < 0.7:
                x = block(x)
        return self.head(x)


class Dropped(nn.Module):
    """A classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x)


class VAE(nn.Module):
    """A variational autoencoder: noise in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vector made again, and mean and logarithm of the variance of its code."""
        mean, log_var = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


def elbo(model: nn.Module, batch: Any) -> Summed:
    """Return the negative evidence lower bound."""
    made, mean, log_var = model(batch[0])
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum()
    return (made - batch[0]).square().sum() + divergence, rows_of(batch)


def diffusion(model: nn.Module, batch: Any) -> Summed:
    """Return the error of the noise that the model finds in an image: noise drawn by the objective."""
    images = batch[0]
    level = torch.rand(len(images), 1, 1, 1, dtype=images.dtype)
    noise = torch.randn_like(images)
    return (model(images * (1 - level) + noise * level) - noise).square().sum(), torch.tensor(images.numel())


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient, turned round."""
        return -grad


class Adversarial(nn.Module):
    """Generator and discriminator in one objective, by a gradient that is turned round between them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 24), nn.LeakyReLU(), nn.Linear(24, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the discriminator says of real rows and of made ones."""
        made = Reversed.apply(self.generator(x.flip(-1)))
        return self.discriminator(x), self.discriminator(made)


def adversarial(model: nn.Module, batch: Any) -> Summed:
    """Return the discriminator's loss; the generator gets its negative gradient."""
    real, made = model(batch[0])
    return F.softplus(-real).sum() + F.softplus(made).sum(), rows_of(batch)


class Gan(nn.Module):
    """Generator and discriminator, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 24), nn.LeakyReLU(), nn.Linear(24, 1))


def told_apart(model: nn.Module, batch: Any) -> Summed:
    """Return the discriminator's loss of real rows and of made ones."""
    made = model.generator(batch[0].flip(-1)).detach()
    return (
        F.softplus(-model.discriminator(batch[0])).sum() + F.softplus(model.discriminator(made)).sum(),
        rows_of(batch),
    )


def passed_off(model: nn.Module, batch: Any) -> Summed:
    """Return the generator's loss: made rows that are not taken for real ones."""
    return F.softplus(-model.discriminator(model.generator(batch[0].flip(-1)))).sum(), rows_of(batch)


def gradient_penalty(model: nn.Module, batch: Any) -> Summed:
    """Return cross-entropy and the squared gradient by the input: a backward pass inside the objective."""
    inputs = batch[0].detach().requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(model(inputs), batch[1], reduction="sum")
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + 0.1 * gradient.square().sum(), rows_of(batch)


class Smooth(nn.Module):
    """A small network that can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x)

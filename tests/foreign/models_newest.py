"""Programs of kinds that nobody had brought: other ways to build a module, to hand it rows, to sum up a loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, Residual, Summed, rows_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint_sequential

# ---- how a module is built -------------------------------------------------------------------------------------------


def scripted() -> nn.Module:
    """Return a classifier whose blocks are scripted."""
    model = Classifier(2)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.jit.script(block)
    return model


def of_a_graph() -> nn.Module:
    """Return a classifier that torch.fx has traced."""
    return torch.fx.symbolic_trace(Classifier(2))


def lazy() -> nn.Module:
    """Return layers that learnt their widths from a first row, before anybody else saw them."""
    model = nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, WIDTH))
    return model


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


def parametrised_twice() -> nn.Module:
    """Return a classifier one of whose weights is normed and then centred, and is used by two modules."""
    model = Classifier(3)
    weight_norm(model.blocks[0].up)
    parametrize.register_parametrization(model.blocks[0].up, "weight", _Twice())
    model.blocks[1].up = model.blocks[0].up
    return model


class SharedByThree(nn.Module):
    """One weight is an embedding, a head and the bias of attention's scores: of three modules and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.also = nn.ParameterList([self.embed.weight])
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        x = x + self.mix(x).tanh() @ self.also[0].T @ self.also[0] / VOCAB
        return self.head(x)


class PreHooked(Classifier):
    """Hooks before and after a block change what goes in and comes out, one of them by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.blocks[1].register_forward_hook(lambda module, args, kwargs, out: out - 0.1, with_kwargs=True)


class Computed(nn.Module):
    """A weight that is a property, of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(CLASSES, 4) / 2), nn.Parameter(torch.randn(4, WIDTH) / 4)
        self.register_parameter("nothing", None)

    @property
    def weight(self) -> Tensor:
        """The product of two thin matrices."""
        return self.left @ self.right

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return F.linear(x.tanh(), self.weight)


class Cached(nn.Module):
    """A table of positions that grows as it is needed, in a buffer that is not saved."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        if len(self.table) < tokens.shape[1]:
            places = torch.arange(tokens.shape[1], device=x.device).unsqueeze(1)
            self.table = (places * torch.arange(WIDTH, device=x.device) / WIDTH).sin().to(x.dtype)
        return self.head((x + self.table[: tokens.shape[1]]).cumsum(1).tanh())


class Functional(nn.Module):
    """A network that is called with weights other than its own: those of another one, moved."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = Residual(WIDTH), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        moved = {name: p * self.scale for name, p in self.net.named_parameters()}
        return self.head(torch.func.functional_call(self.net, moved, (x,)))


class Segments(nn.Module):
    """Blocks that torch's checkpoint_sequential computes again, and activations that rest on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Residual(WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            return self.head(x.tanh())


# ---- what it computes ------------------------------------------------------------------------------------------------


class Diagonal(nn.Module):
    """A diagonal state space in complex numbers, as a convolution by FFT."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.decay = nn.Parameter(torch.rand(WIDTH, states) - 1)
        self.turn = nn.Parameter(torch.rand(WIDTH, states) * math.pi)
        self.out = nn.Parameter(torch.randn(WIDTH, states, 2) / states)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x, seq = self.embed(tokens), tokens.shape[1]
        poles = torch.complex(-self.decay.exp(), self.turn)
        powers = (poles.unsqueeze(-1) * torch.arange(seq, device=x.device)).exp()
        kernel = (torch.view_as_complex(self.out).unsqueeze(-1) * powers).sum(1).real  # [width, seq]
        spread = torch.fft.rfft(x.mT, 2 * seq) * torch.fft.rfft(kernel, 2 * seq)
        return self.head(x + torch.fft.irfft(spread, 2 * seq)[..., :seq].mT)


class Slots(nn.Module):
    """Slot attention: a few learnt queries compete for the parts of each row, three times, by a GRU cell."""

    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        self.parts, width = parts, WIDTH // parts
        self.slots, self.cell = nn.Parameter(torch.randn(3, width)), nn.GRUCell(width, width)
        self.keys, self.head = nn.Linear(width, 2 * width), nn.Linear(3 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        k, v = self.keys(x.unflatten(1, (self.parts, -1))).chunk(2, -1)
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(3):
            shares = (slots @ k.mT).softmax(1)
            shares = shares / shares.sum(2, keepdim=True)
            slots = self.cell((shares @ v).flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return self.head(slots.flatten(1))


class Depths(nn.Module):
    """Half of each row's tokens, by a router, go through a block: the others pass it by."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router, self.block = nn.Linear(WIDTH, 1), Residual(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        weight, chosen = self.router(x).squeeze(-1).topk(tokens.shape[1] // 2, dim=1)
        places = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        moved = x.gather(1, places)
        return self.head(x.scatter_add(1, places, (self.block(moved) - moved) * weight.sigmoid().unsqueeze(-1)))


class Windows(nn.Module):
    """Patches by unfold, depth-wise convolutions, pixel shuffle and a resize."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up = nn.Conv2d(12, 12, 3, padding=1, groups=12, dilation=1), nn.PixelShuffle(2)
        self.norm, self.head = nn.LocalResponseNorm(3), nn.Linear(3 * 8 * 8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.unfold(x, 2, stride=2).unflatten(2, (8, 8))
        x = F.interpolate(self.norm(self.up(self.mix(x))), size=(8, 8), mode="bilinear", align_corners=False)
        return self.head(x.flatten(1))


class Straightened(nn.Module):
    """A spatial transformer: each image is sampled at places that a network finds."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 6))
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, CLASSES)
        nn.init.zeros_(self.where[1].weight)
        self.where[1].bias.data.copy_(torch.tensor([1.0, 0.1, 0, -0.1, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        grid = F.affine_grid(self.where(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        return self.head(self.conv(F.grid_sample(x, grid, align_corners=False)).relu().amax((2, 3)))


class Solved(nn.Module):
    """Ridge regression in closed form for each row, by a Cholesky factor, and eigenvalues of what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(4, 4), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        a = self.features(x.unflatten(1, (4, 4)))
        gram = a.mT @ a + torch.eye(4, dtype=a.dtype, device=a.device)
        solved = torch.cholesky_solve(a.mT @ x[:, :4].unsqueeze(2), torch.linalg.cholesky(gram)).squeeze(2)
        return self.head(torch.cat([solved, torch.linalg.eigvalsh(gram)], 1))


class Grouped(nn.Module):
    """torch's attention with fewer heads of keys, a causal mask, RMSNorm and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.kv, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.norm(self.embed(tokens))
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + out.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class Splines(nn.Module):
    """Functions on edges, by hat functions on a grid that is a buffer."""

    grid: Tensor

    def __init__(self, knots: int = 5) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, knots))
        self.weights = nn.Parameter(torch.randn(CLASSES, WIDTH, knots) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return torch.einsum("rik,cik->rc", (1 - (x.unsqueeze(-1) - self.grid).abs()).clamp(min=0), self.weights)


class Reduced(nn.Module):
    """Largest values of groups by scatter_reduce, and sums by segments."""

    groups: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(8, CLASSES)
        self.register_buffer("groups", torch.arange(WIDTH) % 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.body(x)
        most = x.new_zeros(len(x), 4).scatter_reduce(1, self.groups.expand_as(x), x, "amax", include_self=False)
        return self.head(torch.cat([most, x.logcumsumexp(1)[:, 3::4]], 1))


class _Clipped(torch.autograd.Function):
    """Clamps, and lets gradients through that lead back; of two outputs one has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
        return x.clamp(-most, most), x.abs() > most

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        x, outside = ctx.saved_tensors
        return grad.where(~outside | (grad * x > 0), 0.0), None


class Bounded(Classifier):
    """A Function with a context of its own, two outputs and `vmap`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        clipped, outside = torch.vmap(lambda row: _Clipped.apply(row, 0.8))(x)
        return super().forward(clipped) - outside.sum(1, keepdim=True) / 100


class AlwaysDrops(Classifier):
    """Dropout that is on in evaluations too, and dropout of whole channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.feature_alpha_dropout(x.unflatten(1, (4, 4)), 0.2, self.training).flatten(1)
        return super().forward(F.dropout(x, 0.1, training=True))


class Gumbel(nn.Module):
    """A choice by Gumbel noise, straight through, and a sample of a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.codes = nn.Linear(WIDTH, 6), nn.Parameter(torch.randn(6, 2 * CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        mean, spread = (F.gumbel_softmax(self.choose(x), hard=True) @ self.codes).chunk(2, 1)
        return torch.distributions.Normal(mean, F.softplus(spread)).rsample() if self.training else mean


class CheckedFunction(Classifier):
    """Gradients by the jacobian of a part, inside of the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        slope = torch.func.vmap(torch.func.jacrev(lambda row: self.blocks[0](row).square().sum()))(x)
        return super().forward(x + 0.01 * slope)


# ---- how rows come and losses are summed -----------------------------------------------------------------------------


def by_names(model: nn.Module, batch: Mapping[str, Tensor]) -> Summed:
    """Return the loss of a model that is called with the batch by its names."""
    logits = model(**{name: value for name, value in batch.items() if name != "label"})
    return F.cross_entropy(logits, batch["label"], reduction="sum"), rows_of((batch["label"],))


class NamedInputs(Classifier):
    """Takes its inputs by name alone, some of them in a dictionary."""

    def forward(self, *, x: Tensor, more: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        """Return logits."""
        return super().forward(x * more["scale"].unsqueeze(1))


@dataclass
class Outcome:
    """What a model returns."""

    logits: Tensor
    beside: dict[str, tuple[Tensor, ...]]


class Outcomes(Classifier):
    """Returns a class of its own with nested outputs."""

    def forward(self, x: Tensor) -> Outcome:  # type: ignore[override]
        """Return logits and what lies beside them."""
        return Outcome(super().forward(x), {"norms": (x.square().sum(1), x.abs().amax(1))})


def of_outcomes(model: nn.Module, batch: Any) -> Summed:
    """Return the loss with a penalty on what lies beside the logits."""
    found = model(batch[0])
    loss = F.cross_entropy(found.logits * found.beside["norms"][1].rsqrt().unsqueeze(1), batch[1], reduction="sum")
    return loss, rows_of(batch)


def chained(model: nn.Module, batch: Mapping[str, Tensor]) -> Summed:
    """Return the negative log-likelihood of a linear chain of labels (a CRF without a table of its own), by tokens."""
    scores, labels = model(batch["tokens"])[..., :CLASSES], batch["labels"]
    counts, right = labels != -100, labels.clamp(min=0) % CLASSES
    alpha = scores[:, 0]
    for place in range(1, scores.shape[1]):
        alpha = (alpha.unsqueeze(2) + 0.1 * torch.eye(CLASSES, device=alpha.device)).logsumexp(1) + scores[:, place]
    path = scores.gather(2, right.unsqueeze(2)).squeeze(2).sum(1) + 0.1 * (right[:, 1:] == right[:, :-1]).sum(1)
    return ((alpha.logsumexp(1) - path) * counts.any(1)).sum(), counts.sum()


def focal(model: nn.Module, batch: Any) -> Summed:
    """Return the focal loss, whose weights have gradients, over the classes' own weights."""
    log = model(batch[0]).log_softmax(1).gather(1, batch[1].unsqueeze(1)).squeeze(1)
    weight = 1 + batch[1].to(log.dtype) / 10
    return -(weight * (1 - log.exp()) ** 2 * log).sum(), weight.sum()


def survival(model: nn.Module, batch: Any) -> Summed:
    """Return Cox's partial likelihood: each row against all that lived longer. Rows see each other."""
    risk, times = model(batch[0])[:, 0], batch[0][:, 0]
    later = times.unsqueeze(0) >= times.unsqueeze(1)
    return (risk.unsqueeze(0).masked_fill(~later, -math.inf).logsumexp(1) - risk).sum(), rows_of(batch)


def dice(model: nn.Module, batch: Any) -> Summed:
    """Return one minus the overlap of all rows together, times the rows. Rows see each other."""
    found, right = model(batch[0]).softmax(1), F.one_hot(batch[1], CLASSES).to(batch[0].dtype)
    overlap = 2 * (found * right).sum(0) / (found.sum(0) + right.sum(0) + 1)
    return (1 - overlap.mean()) * len(found), rows_of(batch)


def with_z_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the cross-entropy with a z-loss that is a mean, as a sum is wanted."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="sum") + logits.logsumexp(1).square().mean(), rows_of(batch)


def moved_views(model: nn.Module, batch: Any) -> Summed:
    """Return the loss of logits that are changed in place through a view, after they were made."""
    logits = model(batch[0])
    logits[:, :2] += 0.5
    logits[:, 1:].unflatten(1, (2, -1))[:, 0].mul_(0.9)
    return F.cross_entropy(logits, batch[1], reduction="sum"), rows_of(batch)

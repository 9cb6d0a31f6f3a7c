"""Programs that keep or make things where nobody looks: in backward passes, in state dicts, in views, in classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, Residual, Summed, rows_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# ---- weights -----------------------------------------------------------------------------------------------------


class Flat(nn.Module):
    """All weights are views of one flat parameter, as in meta-learning and in evolution strategies."""

    SHAPES = ((WIDTH, WIDTH), (WIDTH,), (CLASSES, WIDTH), (CLASSES,))

    def __init__(self) -> None:
        super().__init__()
        sizes = [torch.Size(shape).numel() for shape in self.SHAPES]
        self.flat, self.sizes = nn.Parameter(torch.randn(sum(sizes)) * 0.1), sizes

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        parts = self.flat.split(self.sizes)
        up, bias, head, last = (part.view(shape) for part, shape in zip(parts, self.SHAPES, strict=True))
        return F.linear(F.linear(x, up, bias).tanh(), head, last)


class TwoNames(nn.Module):
    """One encoder by two names, and one layer of it by a third."""

    def __init__(self) -> None:
        super().__init__()
        self.query = Residual()
        self.key = self.query
        self.shortcut, self.head = self.query.down, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        again = self.shortcut(torch.cat((x, x), dim=-1))
        return self.head(self.query(x) * torch.sigmoid(self.key(x.flip(-1))) + again)


class Thawing(Classifier):
    """Blocks begin to learn one after the other, by the number of calls, which no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.calls += self.training
        for number, block in enumerate(self.blocks):
            block.requires_grad_(self.calls > 8 * number)
        return super().forward(x)


# ---- backward passes ---------------------------------------------------------------------------------------------


class Forces(nn.Module):
    """An energy whose gradient by the inputs is what is learnt: the loss goes back through a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energies [rows] and the forces [rows, width]."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.down(F.silu(self.up(x))).squeeze(-1)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -slope


def forces_error(model: nn.Module, batch: Any) -> Summed:
    """Return the squared error of forces that should lead back to zero, and of energies."""
    energy, forces = model(batch[0])
    return (forces + batch[0]).square().sum() + 0.1 * energy.square().sum(), rows_of(batch)


class _Reversed(torch.autograd.Function):
    """A reversible pair of blocks: the backward pass computes inputs from outputs, and all once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, left: nn.Module, right: nn.Module, *weights: Tensor) -> Tensor:  # type: ignore[override]
        """Return (a + left(b), b + right(that))."""
        ctx.blocks = left, right
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            a = a + left(b)
            b = b + right(a)
            out = torch.cat((a, b), -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Return gradients by inputs and weights."""
        (out,), (left, right) = ctx.saved_tensors, ctx.blocks
        with torch.no_grad():
            a, b = out.chunk(2, -1)
            b = b - right(a)
            a = a - left(b)
        x = torch.cat((a, b), -1).requires_grad_()
        with torch.enable_grad():
            a, b = x.chunk(2, -1)
            a = a + left(b)
            again = torch.cat((a, b + right(a)), -1)
            weights = (*left.parameters(), *right.parameters())
            by_x, *by_weights = torch.autograd.grad(again, (x, *weights), grad)
        return by_x, None, None, *by_weights


class Reversible(nn.Module):
    """A network that keeps no activations: its Function gets the modules themselves."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        self.left, self.right = nn.Sequential(nn.Linear(half, half), nn.Tanh()), nn.Sequential(nn.Linear(half, half))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        weights = (*self.left.parameters(), *self.right.parameters())
        return self.head(_Reversed.apply(x, self.left, self.right, *weights))


class GradientMeter(Classifier):
    """A hook keeps a moving average of how large gradients are, by which the next forward pass divides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))
        self.size: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        out = super().forward(x) / self.size.clone()
        if out.requires_grad:
            out.register_hook(self._measure)
        return out

    def _measure(self, grad: Tensor) -> None:
        self.size.mul_(0.9).add_(0.1 * (1 + grad.detach().abs().mean()))


class Nested(Classifier):
    """Recompute inside of recompute."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(checkpoint(self._body, x, use_reentrant=False))

    def _body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


# ---- what is kept, and what is returned ---------------------------------------------------------------------------


class ExtraState(Classifier):
    """Keeps a number in its state dict that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def get_extra_state(self) -> Any:
        """Return what a state dict holds beside tensors."""
        return {"temperature": self.temperature}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.temperature = state["temperature"]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x) / self.temperature


class SeenInEvaluation(Classifier):
    """Counts the rows that it is evaluated on, and shifts logits by what it has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if not self.training:
            self.seen += len(x)
        return super().forward(x) * (1 + self.seen * 0.01)


@dataclass
class Told:
    """What a model returns, as a dataclass that torch knows nothing of."""

    logits: Tensor
    hidden: list[Tensor]
    note: str = ""


class Dataclassed(Classifier):
    """Returns a dataclass with a list in it."""

    def forward(self, x: Tensor) -> Any:
        """Return logits and the hidden states of all blocks."""
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return Told(self.head(x), hidden, "plain")


def of_dataclass(model: nn.Module, batch: Any) -> Summed:
    """Return the loss and a penalty on hidden states."""
    told = model(batch[0])
    penalty = sum(each.square().sum() for each in told.hidden) * 1e-3
    return F.cross_entropy(told.logits, batch[1], reduction="sum") + penalty, rows_of(batch)


class Quantity:
    """A tensor with a unit, which torch's functions go through."""

    def __init__(self, value: Tensor, unit: str) -> None:
        self.value, self.unit = value, unit

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.value if isinstance(arg, Quantity) else arg for arg in args]
        unit = next(arg.unit for arg in args if isinstance(arg, Quantity))
        return Quantity(func(*plain, **(kwargs or {})), unit)


class Units(nn.Module):
    """Computes with quantities, whose class torch's functions ask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        lengths = torch.tanh(torch.matmul(Quantity(x, "m"), self.weight))  # type: ignore[call-overload]
        assert lengths.unit == "m"
        return self.head(lengths.value)


# ---- rows and tokens ----------------------------------------------------------------------------------------------


class ChosenTokens(nn.Module):
    """Experts choose the rows that they like best of those that are there, as in expert choice routing."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, experts), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        scores = self.gate(x).softmax(-1)  # [rows, experts]
        out = x
        for number, expert in enumerate(self.experts):
            best, rows = scores[:, number].topk(max(1, len(x) // 2))
            out = out.index_add(0, rows, best.unsqueeze(-1) * expert(x[rows]))
        return self.head(out)


class UniqueTokens(nn.Module):
    """Computes each token of a batch once, wherever it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(VOCAB, WIDTH), Residual(), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        unique, places = tokens.unique(return_inverse=True)
        return self.head(self.body(self.embed(unique))[places])

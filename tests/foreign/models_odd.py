"""Programs with parts of torch that few use, and with memory, chance and hooks in places where nobody looks."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, rows_of
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

# ---- layers of torch ------------------------------------------------------------------------------------------------


class SequenceFirst(nn.Module):
    """Attention of torch's own, whose samples are the second dimension, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend = nn.Embedding(VOCAB, WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens).transpose(0, 1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        seen, weights = self.attend(x, x, x, attn_mask=mask)
        return self.head((x + seen + weights.mean()).transpose(0, 1) * 1.0)


class Unpadded(nn.Module):
    """torch's encoder with padding, which it may leave out by nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0, batch_first=True)
        self.embed, self.encoder = nn.Embedding(VOCAB, WIDTH), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))


def unhidden(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of hidden tokens, and how many there are."""
    logits, labels = model(batch["tokens"], batch["mask"] == 0), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


class Bags(nn.Module):
    """Means of embeddings: all rows' tokens in one flat list, with the places at which rows begin."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean"), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab], of each token's row up to it."""
        rows, seq = tokens.shape
        flat = torch.cat([tokens[row, : at + 1] for row in range(rows) for at in range(seq)])
        lengths = torch.arange(1, seq + 1).repeat(rows)
        return self.head(self.bag(flat, lengths.cumsum(0) - lengths)).view(rows, seq, VOCAB)


class Zoo(nn.Module):
    """Layers with odd weights and buffers: statistics of instances, a slope for each channel, products of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.slope = nn.InstanceNorm1d(4, affine=True, track_running_stats=False), nn.PReLU(4)
        self.pair, self.conv = nn.Bilinear(WIDTH, 4, 8), nn.Conv3d(1, 2, (1, 2, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        parts = self.slope(self.norm(x.unflatten(-1, (4, -1))))
        both = self.pair(x, parts.mean(-1))
        return self.head(self.conv(both.view(-1, 1, 4, 2, 1)[:, :, :, [0, 1, 0]][:, :, :, :3]).flatten(1)[:, :16])


class SparseGraph(nn.Module):
    """A fixed sparse matrix in a buffer mixes features."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.tensor([[0, 1, 2, 5], [1, 0, 7, 3]])
        self.register_buffer("adjacent", torch.sparse_coo_tensor(places, torch.ones(4), (WIDTH, WIDTH)))
        self.body = Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x + torch.sparse.mm(self.adjacent.to(x.dtype), x.T).T)


class Kept(nn.Module):
    """Weights in lists and dictionaries, one of them none and one there twice."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.several = nn.ParameterList([one, nn.Parameter(torch.zeros(1, 1, 1, WIDTH)), one])
        self.named = nn.ParameterDict({"head": nn.Parameter(torch.randn(WIDTH, CLASSES) * 0.1)})
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for weight in self.several:
            x = torch.tanh(x @ weight) if weight.dim() == 2 else x + weight.flatten()
        return x @ self.named["head"]


# ---- torch.func, Functions, checkpointing --------------------------------------------------------------------------


class Ensemble(nn.Module):
    """Four networks at once, by `vmap` over their stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        nets = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)) for _ in range(4)]
        weights, _ = stack_module_state(nets)
        self.names = list(weights)
        self.weights = nn.ParameterList([nn.Parameter(weights[name].detach()) for name in self.names])
        self.__dict__["like"] = nets[0].to("meta")

    def forward(self, x: Tensor) -> Tensor:
        """Return mean logits."""
        held = dict(zip(self.names, self.weights, strict=True))
        return vmap(lambda own: functional_call(self.like, own, (x,)))(held).mean(0)


class Learner(nn.Module):
    """Takes one step of gradient descent for every row, inside of its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, WIDTH) * 0.1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""

        def of_row(row: Tensor) -> Tensor:
            inner = grad(lambda weight: (weight @ row).square().mean() - (weight @ row.flip(0)).mean())(self.weight)
            return (self.weight - 0.1 * inner) @ row

        return self.head(vmap(of_row)(x).tanh())


class _Settled(torch.autograd.Function):
    """The fixed point of z = tanh(z W + x), with its gradient by another iteration."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(60):
            z = torch.tanh(z @ weight + x)
        ctx.save_for_backward(z, x, weight)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        z, x, weight = ctx.saved_tensors
        with torch.enable_grad():
            at, inputs, matrix = (each.detach().requires_grad_() for each in (z, x, weight))
            out = torch.tanh(at @ matrix + inputs)
            u = gradients[0]
            for _ in range(60):
                u = gradients[0] + torch.autograd.grad(out, at, u, retain_graph=True)[0]
            by_x, by_weight = torch.autograd.grad(out, (inputs, matrix), u)
        return by_x, by_weight


class Implicit(nn.Module):
    """A layer whose output is a fixed point: autograd runs inside of a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(_Settled.apply(x, self.weight))


class DropsAgain(nn.Module):
    """Dropout inside of what torch's checkpointing computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


# ---- weights that are made of others ---------------------------------------------------------------------------------


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric() -> nn.Module:
    """Return a classifier with a symmetric weight, by a parametrisation that is kept while it runs."""
    model = Classifier(2)
    model.extra = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(model.extra, "weight", _Symmetric())
    whole = model.forward

    def forward(x: Tensor) -> Tensor:
        with parametrize.cached():
            return whole(model.extra(x) + model.extra(x.flip(-1)))

    model.forward = forward
    return model


def hooked_weight_norm() -> nn.Module:
    """Return a classifier with weight norm as it was done by hooks."""
    model = Classifier(2)
    for block in model.blocks:
        torch.nn.utils.weight_norm(block.up)
    return model


def hooked_spectral_norm() -> nn.Module:
    """Return a classifier with spectral norm by hooks, whose vectors move in every forward pass."""
    model = Classifier(2)
    torch.nn.utils.spectral_norm(model.blocks[0].up)
    return model


def pruned() -> nn.Module:
    """Return a classifier half of whose weights are pruned, by a hook before each forward pass."""
    model = Classifier(2)
    for block in model.blocks:
        prune.l1_unstructured(block.up, "weight", amount=0.5)
    return model


# ---- memory, chance and hooks ---------------------------------------------------------------------------------------


class Curriculum(nn.Module):
    """Sees more of its inputs the more often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.body = Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if self.training:
            self.calls += 1
        seen = min(WIDTH, 2 + int(self.calls))
        return self.body(F.pad(x[:, :seen], (0, WIDTH - seen)))


class Remembers(nn.Module):
    """Keeps means of earlier rows in a list of Python's, which nobody saves."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seen = Classifier(2), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        shift = torch.stack(self.seen).mean(0) if self.seen else torch.zeros_like(x[0])
        if self.training:
            self.seen = [*self.seen, x.detach().mean(0)][-3:]
        return self.body(x - shift)


class InTurn(nn.Module):
    """Takes another branch with every call, from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.turn = Classifier(2), itertools.cycle((0.5, 1.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x * next(self.turn))


class ByRows(nn.Module):
    """Divides by the number of rows that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x / len(x))


class NumpyNoise(nn.Module):
    """Noise of numpy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        noise = torch.from_numpy(np.random.standard_normal(x.shape)).to(x)  # as strangers write
        return self.body(x + 0.1 * noise if self.training else x)


class PythonChance(nn.Module):
    """Skips a block by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = Classifier(2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x + self.more(x) if random.random() < 0.5 else x)


class InPlace(nn.Module):
    """Changes its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(x.mul_(0.5).add_(0.1))


def scaled_when_there() -> nn.Module:
    """Return a classifier whose gradients are halved once they are added up, by a hook of each weight."""
    model = Classifier(2)
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(_halve)
    return model


def _halve(weight: nn.Parameter) -> None:
    weight.grad.mul_(0.5)


class Rescaled(nn.Module):
    """A hook on what a layer gives changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return self.body(x)


class Compiled(nn.Module):
    """A part is compiled by whoever wrote the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager"), Classifier(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.body(self.first(x).relu())


class Told(NamedTuple):
    """What a model returns."""

    logits: Tensor
    extra: dict[str, tuple[Tensor, ...]]


class Tuples(nn.Module):
    """Returns a tuple with names, with a dictionary inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier(2)

    def forward(self, *, x: Tensor) -> Told:
        """Return logits, and their squares beside them."""
        logits = self.body(x)
        return Told(logits, {"squares": (logits.square(),)})


def of_tuples(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of logits and of their squares."""
    x, labels = batch
    told = model(x=x)
    return F.cross_entropy(told.logits, labels, reduction="sum") + 0.01 * told.extra["squares"][0].sum(), rows_of(batch)


def with_penalty(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of rows with a penalty on all weights for each."""
    x, labels = batch
    penalty = sum(weight.square().sum() for weight in model.parameters())
    return F.cross_entropy(model(x), labels, reduction="sum") + 1e-3 * penalty * len(x), rows_of(batch)


def with_one_penalty(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of rows with one penalty on all weights, however many rows there are."""
    x, labels = batch
    penalty = sum(weight.abs().sum() for weight in model.parameters())
    return F.cross_entropy(model(x), labels, reduction="sum") + 1e-2 * penalty, rows_of(batch)

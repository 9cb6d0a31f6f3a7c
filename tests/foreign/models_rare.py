"""Programs that set something up late, keep it beside their weights, take it from chance, or tie it to the batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, rows_of
from torch import Tensor, nn

# ---- values that no parameter and no buffer has ---------------------------------------------------------------------


class Fixed(Classifier):
    """A random projection in a plain attribute: it is drawn with the weights, and is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x @ self.projection.to(x))


class NumpyMask(Classifier):
    """Features that it leaves out, chosen by numpy as it is made: every process chooses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.from_numpy(np.random.rand(WIDTH) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x * self.kept)


class PythonOrder(Classifier):
    """The order of its features, shuffled by Python as it is made, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.order = random.sample(range(WIDTH), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        weights = torch.arange(1, WIDTH + 1).to(x)
        return super().forward(x[:, self.order] * weights / WIDTH)


class LateHead(nn.Module):
    """Makes its head when it first sees what comes: no optimizer that was made before has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier()
        self.head: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.body(x)
        if self.head is None:
            self.head = nn.Linear(x.shape[-1], CLASSES).to(x)
        return self.head(x)


class ActNorm(Classifier):
    """Shifts and scales by the statistics of the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if not self.begun:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
                self.begun.fill_(True)
        return super().forward((x + self.shift) * self.scale)


# ---- chance ---------------------------------------------------------------------------------------------------------


class Bayes(nn.Module):
    """Weights are drawn anew in each forward pass, the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = (
            nn.Parameter(torch.randn(CLASSES, WIDTH) / 4),
            nn.Parameter(torch.full((CLASSES, WIDTH), -3.0)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return x @ (self.mean + torch.randn_like(self.mean) * F.softplus(self.spread)).t()


def reinforced(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of REINFORCE: actions are drawn, their reward is less the mean reward of the batch."""
    chances = torch.distributions.Categorical(logits=model(batch[0]))
    action = chances.sample()
    reward = (action == batch[1]).to(batch[0])
    return -(chances.log_prob(action) * (reward - reward.mean())).sum(), rows_of(batch)


class Noisy(Classifier):
    """Slopes drawn for each element where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.bend = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(self.bend(x))


# ---- gradients that the loss does not tell of -----------------------------------------------------------------------


class ByFrequency(nn.Module):
    """An embedding whose gradients are divided by how often a token is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, scale_grad_by_freq=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(torch.tanh(self.embed(tokens)))


class _Meaned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / len(grad)


class Meaned(Classifier):
    """Its gradient is divided by the number of rows on its way back: the loss is a sum, the gradients are not."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(_Meaned.apply(x + 0 * self.blocks[0](x)) + _Meaned.apply(self.blocks[0](x)))


class Adaptive(nn.Module):
    """torch's adaptive softmax: rare tokens have projections of their own, which many a batch does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCAB, cutoffs=[20, 40, 58])

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the log chances of the labels."""
        return self.softmax(self.embed(tokens), labels).output


def adaptive_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the loss of the labels that count, and how many they are."""
    counts = batch["labels"] != -100
    return -model(batch["tokens"][counts], batch["labels"][counts]).sum(), counts.sum()


# ---- counts ---------------------------------------------------------------------------------------------------------


class SparseCodes(nn.Module):
    """A sparse autoencoder that counts for each code how long ago it was last alive, and revives the dead."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("idle", torch.zeros(32, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        codes = F.relu(self.up(x))
        top = codes.topk(4, dim=-1)
        kept = torch.zeros_like(codes).scatter(-1, top.indices, top.values)
        if self.training:
            with torch.no_grad():
                self.idle += 1
                self.idle[(kept > 0).any(0)] = 0
        return self.head(self.down(kept + (self.idle > 3) * codes * 0.1))


class Annealing:
    """An objective with a memory: the weight of its penalty grows with every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss with a penalty on the logits."""
        self.calls += 1
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="sum") + min(
            1.0, self.calls / 20
        ) * logits.square().sum(), rows_of(batch)


annealed = Annealing()


class Translator(nn.Module):
    """torch's encoder and decoder in one module, the target shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.head(self.both(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask))

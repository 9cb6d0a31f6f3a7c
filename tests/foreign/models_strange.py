"""Programs as a stranger writes them: what is done to weights, gradients and rows outside of plain layers.

And those that set something up late, keep it beside their weights, take it from chance, or tie it to the batch.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from foreign_data import CLASSES, VOCAB
from models_own import WIDTH, Classifier, Residual, Summed, rows_of
from torch import Tensor, nn

# ---- heads and losses ------------------------------------------------------------------------------------------------


class Cosine(nn.Module):
    """A cosine classifier whose temperature is a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = Residual(), nn.Parameter(torch.randn(CLASSES, WIDTH))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.log_scale.exp() * F.linear(F.normalize(self.body(x), dim=-1), F.normalize(self.classes, dim=-1))


class MixtureDensity(nn.Module):
    """Says the density of a row's sum as a mixture of normal ones."""

    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        self.body, self.head = Residual(), nn.Linear(WIDTH, 3 * parts)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return (logits, means, logarithms of widths), [rows, parts] each."""
        return self.head(self.body(x)).chunk(3, -1)


def mixture_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the summed negative log-likelihood of the rows' sums."""
    logits, mean, log_width = model(batch[0])
    value = batch[0].sum(-1, keepdim=True)
    each = logits.log_softmax(-1) - 0.5 * ((value - mean) / log_width.exp()).square() - log_width
    return -each.logsumexp(-1).sum(), rows_of(batch)


class Speech(nn.Module):
    """Says a class or a blank for every step of a sound."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Conv1d(4, WIDTH, 3, padding=1), nn.Linear(WIDTH, VOCAB)

    def forward(self, sound: Tensor) -> Tensor:
        """Return log-probabilities [steps, rows, classes]."""
        return self.head(self.mix(sound).relu().transpose(1, 2)).log_softmax(-1).transpose(0, 1)


def ctc(model: nn.Module, batch: Any) -> Summed:
    """Return the summed CTC loss of transcripts of different lengths."""
    found, labels = model(batch["sound"]), batch["labels"]
    lengths = (labels > 0).sum(-1)
    targets = torch.stack([torch.cat((row[row > 0], row.new_zeros(int((row <= 0).sum())))) for row in labels])
    steps = torch.full((found.shape[1],), found.shape[0])
    return F.ctc_loss(found, targets, steps, lengths, reduction="sum", zero_infinity=True), lengths.sum()


def weighted_classes(model: nn.Module, batch: Any) -> Summed:
    """Return the cross-entropy with a weight for each class, and the sum of the weights, which is no whole number."""
    weights = torch.linspace(0.3, 2.1, CLASSES).to(batch[0].dtype)
    loss = F.cross_entropy(model(batch[0]), batch[1], weight=weights, label_smoothing=0.1, reduction="sum")
    return loss, weights[batch[1]].sum()


def triplet(model: nn.Module, batch: Any) -> Summed:
    """Return a hinge of three calls of one encoder: a row, the row with noise of its own, and the row turned round."""
    x = batch[0]
    anchor, near, far = model(x), model(x + 0.1 * x.roll(1, -1)), model(x.flip(-1))
    return F.relu((anchor - near).norm(dim=-1) - (anchor - far).norm(dim=-1) + 1).sum(), rows_of(batch)


def mixed_up(model: nn.Module, batch: Any) -> Summed:
    """Return the loss of rows that are mixed with other rows of the batch: mixup."""
    x, labels = batch
    part = torch.rand((), dtype=x.dtype)
    order = torch.randperm(len(x))
    logits = model(part * x + (1 - part) * x[order])
    loss = part * F.cross_entropy(logits, labels, reduction="sum")
    return loss + (1 - part) * F.cross_entropy(logits, labels[order], reduction="sum"), rows_of(batch)


def sharpness_aware(model: nn.Module, batch: Any) -> Summed:
    """Return the loss at weights that are moved along their gradient: two passes in one objective."""
    weights = dict(model.named_parameters())
    with torch.enable_grad():
        loss = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
        found = torch.autograd.grad(loss, list(weights.values()))
    norm = torch.stack([each.norm() for each in found]).norm()
    moved = {n: w + 0.05 * g / norm for (n, w), g in zip(weights.items(), found, strict=True)}
    logits = torch.func.functional_call(model, moved, (batch[0],))
    return F.cross_entropy(logits, batch[1], reduction="sum"), rows_of(batch)


def hardest(model: nn.Module, batch: Any) -> Summed:
    """Return the loss of the harder half of the rows: which those are depends on the other rows."""
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.topk(max(1, len(losses) // 2)).values.sum(), rows_of(batch)


def steep(model: nn.Module, batch: Any) -> Summed:
    """Return the loss and the squared derivative along a direction, by forward-mode differentiation."""
    logits, along = torch.func.jvp(model, (batch[0],), (torch.ones_like(batch[0]),))
    return F.cross_entropy(logits, batch[1], reduction="sum") + 0.1 * along.square().sum(), rows_of(batch)


# ---- recurrences and shapes ------------------------------------------------------------------------------------------


class PackedLSTM(nn.Module):
    """A recurrent classifier of sequences that are packed by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(8, WIDTH, batch_first=True, bidirectional=True), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, steps: Tensor, length: Tensor) -> Tensor:
        """Return logits."""
        packed = nn.utils.rnn.pack_padded_sequence(steps, length.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.cells(packed)
        return self.head(last.transpose(0, 1).flatten(1))


def by_length(model: nn.Module, batch: Any) -> Summed:
    """Return the summed loss of ragged rows."""
    logits = model(batch["steps"], batch["length"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), torch.tensor(len(logits))


class Cells(nn.Module):
    """An LSTMCell that is fed its own output, in the loop of its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        state = None
        for _ in range(4):
            state = self.cell(x, state)
            x = state[0]
        return self.head(x)


class Scattered(nn.Module):
    """A graph network over one long list of edges: gather and index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Return logits of graphs."""
        row, start, end = edges.nonzero(as_tuple=True)
        both = torch.cat((nodes[row, start], nodes[row, end]), -1)
        pooled = nodes.new_zeros(len(nodes), WIDTH).index_add(0, row, self.message(both).tanh())
        return self.head(pooled)


def scattered_loss(model: nn.Module, batch: Any) -> Summed:
    """Return the summed loss of graphs."""
    logits = model(batch["nodes"], batch["edges"])
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), torch.tensor(len(logits))


class Named(Classifier):
    """Returns a dictionary with tuples in it."""

    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        """Return what the blocks and the head say."""
        hidden = tuple(block(x) for block in self.blocks)
        return {"logits": self.head(sum(hidden)), "extra": {"hidden": hidden, "none": None}}


def of_named(model: nn.Module, batch: Any) -> Summed:
    """Return the loss of logits, and of hidden states that are large."""
    found = model(batch[0])
    penalty = sum(each.square().sum() for each in found["extra"]["hidden"])
    return F.cross_entropy(found["logits"], batch[1], reduction="sum") + 1e-3 * penalty, rows_of(batch)


class OwnLoss(Classifier):
    """Computes its loss itself, a mean."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        """Return the mean loss."""
        return F.cross_entropy(super().forward(x), labels)


def times_rows(model: nn.Module, batch: Any) -> Summed:
    """Return the model's mean loss times the rows."""
    return model(*batch) * len(batch[0]), rows_of(batch)


class Hooked(Classifier):
    """A part of its loss is left on the model by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.activity = torch.zeros(())
        self.blocks[1].register_forward_hook(self._note)

    def _note(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.activity = out.abs().sum()


def with_activity(model: nn.Module, batch: Any) -> Summed:
    """Return cross-entropy and what the hook left."""
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1], reduction="sum") + 1e-2 * model.activity, rows_of(batch)


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

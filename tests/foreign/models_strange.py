"""Programs as a stranger writes them: what is done to weights, gradients and rows outside of plain layers."""

from __future__ import annotations

import math
from typing import Any

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

"""What metrics read of a batch and of what a model returned for it: labels, predictions, and which of them count."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.spec.data.labels import IGNORED
from paceline.task.models.held import whole_of

OWN = "a metric of your own: package.module:function of (outputs, batch)"


def labels_of(batch: object, metric: str) -> Tensor:
    """Return the labels of a batch: the entry "labels" of a mapping, or the second of a pair."""
    found = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        found = batch[1]
    if not isinstance(found, Tensor):
        held = ", ".join(sorted(map(str, batch))) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(f"the metric '{metric}' finds no labels", f'the batch holds {held}, and no "labels"', OWN)
    return found


def predictions_of(outputs: object, metric: str) -> Tensor:
    """Return what a model returned as one whole tensor, in fp32 at least: a tensor itself, or its `.logits`."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "logits", outputs) if found is None else found
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the metric '{metric}' cannot read what the model returned", f"it is a {type(outputs).__name__}", OWN
        )
    whole = whole_of(found)
    return whole.detach().to(torch.promote_types(whole.dtype, torch.float32))


def counted(logits: Tensor, labels: Tensor, metric: str) -> tuple[Tensor, Tensor, bool]:
    """Return logits, labels, and whether each row is of one class: [n, classes] and [n], or [n, columns] of each.

    Labels of as many dimensions as the logits say of each column whether it is so; a model that returns one number for
    each label has one column. Rows whose label is -100 are left out.
    """
    if logits.shape == labels.shape or logits.shape == (*labels.shape, 1):
        columns = logits.shape[-1] if logits.dim() > 1 else 1
        return logits.reshape(-1, columns), labels.reshape(-1, columns), False
    if logits.shape[:-1] == labels.shape and not labels.is_floating_point():
        rows, of = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        kept = of != IGNORED
        return rows[kept], of[kept], True
    raise ConfigError(
        f"the metric '{metric}' cannot compare outputs {list(logits.shape)} with labels {list(labels.shape)}",
        "it takes outputs [..., classes] with whole labels [...], or outputs and labels of one shape", OWN,
    )  # fmt: skip

"""Objectives: `objective(model, batch) -> (loss_sum, weight)`, a sum and how many items it counts.

The step divides by the weight summed over all ranks and micro-batches. An objective that returned a mean would make
the gradient depend on how the batch is cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError, suggestion
from paceline.spec.data.labels import IGNORED
from paceline.spec.import_paths import is_import_path, load_object
from paceline.task.coupling import with_gather
from paceline.task.data.rows.packed import STARTS
from paceline.task.head import SEQ2SEQ
from paceline.task.models.decoder import Decoder
from paceline.task.models.held import is_spread
from paceline.task.models.huggingface.head import chunked_loss
from paceline.task.models.layers.documents import document_mask, document_positions
from paceline.task.models.layers.loss import LabelsByRow, LossLabels
from paceline.task.models.layers.packed import PackedDocuments, takes_packed
from paceline.task.models.layers.vocabulary import spread_logits_cross_entropy, spread_logits_cross_entropy_sum

Objective = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


def next_token(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed next-token cross-entropy in nats and the count of labels that are not -100.

    `batch` holds "tokens" and "labels", int64 [rows, seq]; labels are the next tokens already. The built-in decoder
    computes its loss without whole logits, and so does the head of a model of transformers where logits are many; any
    other model gets the tokens alone and returns logits [rows, seq, vocab], as a tensor or as an output with `.logits`.

    It may hold "documents" too, integers [rows, seq]: tokens then see only those of their own document, in which
    positions restart. Where ranks share sequences it holds "positions" and perhaps "mask" instead, made from the whole
    rows, and "real", for models with an argument of this name: which tokens are no padding.
    """
    tokens, labels = _field(batch, "tokens"), _field(batch, "labels")  # or LabelsByRow
    options = beside_tokens(model, batch)
    if isinstance(model, Decoder):  # FSDP2 and cast units keep the class; calling the module runs their hooks
        return model(tokens, labels=labels, **options)
    if (by_head := chunked_loss(model, tokens, labels, options)) is not None:
        return by_head
    return _summed_cross_entropy(_logits(model(tokens, **options)), labels)


def next_token_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [rows, seq, vocab] of what `next_token` sums up; a DTensor where the vocabulary is spread."""
    return _logits(model(_field(batch, "tokens"), **beside_tokens(model, batch)))


def classification(model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats and the count of labels that are not -100.

    `batch` is what `_outputs_and_labels` takes, with whole numbers as labels [rows]; the model returns logits
    [rows, classes], as a tensor or as an output with `.logits`.
    """
    logits, labels = _outputs_and_labels(model, batch, "classification")
    if (dtype := (labels.labels if isinstance(labels, LabelsByRow) else labels).dtype).is_floating_point:
        raise ConfigError(
            f"the labels are of {dtype}, which has fractions", "objective 'classification' counts classes from 0",
            'task.objective = "regression" for numbers, "multi_label" for columns of 0 and 1; label.long() for classes',
        )  # fmt: skip
    return _summed_cross_entropy(logits, labels)


def regression(model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    """Return the summed squared error and the count of labels that are numbers (NaN counts nothing).

    `batch` is what `_outputs_and_labels` takes, with labels of any shape; the model returns as many numbers.
    """
    found, labels = _outputs_and_labels(model, batch, "regression")
    if found.numel() != labels.numel():
        raise ConfigError(
            f"the model returned {list(found.shape)} for labels {list(labels.shape)}",
            "regression needs a number for each row", "a head of one output",
        )  # fmt: skip
    wide = torch.promote_types(found.dtype, torch.float32)
    counts = ~labels.isnan()
    error = (found.reshape(labels.shape).to(wide) - labels.nan_to_num().to(wide)) * counts
    return error.square().sum(), counts.sum()


def multi_label(model: nn.Module, batch: object) -> tuple[Tensor, Tensor]:
    """Return the summed binary cross-entropy in nats over rows and classes, and how many of both there are.

    `batch` is what `_outputs_and_labels` takes, with labels [rows, classes] of 0 and 1; the model returns logits of
    that shape.
    """
    found, labels = _outputs_and_labels(model, batch, "multi_label")
    if found.shape != labels.shape:
        raise ConfigError(
            f"the model returned {list(found.shape)} for labels {list(labels.shape)}",
            "multi_label needs a number for each class", f"a head of {labels.shape[-1]} outputs",
        )  # fmt: skip
    wide = torch.promote_types(found.dtype, torch.float32)
    loss = F.binary_cross_entropy_with_logits(found.to(wide), labels.to(wide), reduction="sum")
    return loss, torch.ones_like(labels, dtype=torch.int64).sum()


def sequence_to_sequence(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats of what an encoder-decoder writes, and the count of labels not -100.

    `batch` holds "source" with "source_mask" [rows, source], "target" and "labels" [rows, target], int64: the decoder
    reads the target and says the labels. The model is one of transformers, whose head computes the loss where logits
    are many, or takes the same arguments.
    """
    source, labels = _field(batch, "source"), _field(batch, "labels")  # or LabelsByRow
    if (by_head := chunked_loss(model, source, labels, _beside_source(batch))) is not None:
        return by_head
    return _summed_cross_entropy(sequence_to_sequence_logits(model, batch), labels)


def sequence_to_sequence_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [rows, target, vocab] of what `sequence_to_sequence` sums up."""
    return _logits(model(input_ids=_field(batch, "source"), **_beside_source(batch)))


def _beside_source(batch: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what an encoder-decoder is given with its source."""
    mask, target = _field(batch, "source_mask"), _field(batch, "target")
    return {"attention_mask": mask, "decoder_input_ids": target, "use_cache": False}


def logits_of(objective: object) -> Callable[[nn.Module, Mapping[str, Tensor]], Tensor] | None:
    """Return the function of whole logits behind an objective that can do without them; None for other objectives.

    `next_token` computes its loss a piece of the vocabulary at a time, for example, and metrics want all logits.
    """
    # By identity: an object of a user's own need not be hashable.
    return (next_token_logits if objective is next_token
            else sequence_to_sequence_logits if objective is sequence_to_sequence else None)  # fmt: skip


def of_texts(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what a model gives for whole texts: "tokens" int64 [rows, seq], of which "attention_mask" says the real.

    Raises ConfigError for a model that cannot be told what fills rows up: it would count.
    """
    options = without_cache(model)
    if "attention_mask" in batch:
        if "attention_mask" not in _parameters_of(type(model).forward):
            raise ConfigError(
                f"{type(model).__name__} takes no argument 'attention_mask'",
                "rows of texts are filled up to one length, and what fills them would count",
                "forward(self, tokens, attention_mask), or an objective of your own",
            )
        options["attention_mask"] = batch["attention_mask"]
    return _logits(model(_field(batch, "tokens"), **options))


def _outputs_and_labels(model: nn.Module, batch: object, objective: str) -> tuple[Tensor, Tensor]:
    """Return what a model gives for a batch, a tensor or its `.logits`, and the batch's labels.

    `batch` is a mapping with "labels" and one more entry ("images", say), texts with labels (`of_texts`), or a pair
    (inputs, labels). Raises ConfigError, which names the objective, for any other.
    """
    if isinstance(batch, Mapping):
        labels = _field(batch, "labels")
        if "tokens" in batch:
            return of_texts(model, batch), labels
        inputs = [value for name, value in batch.items() if name != "labels"]
        if len(inputs) != 1:
            raise ConfigError(
                f"objective '{objective}' got a batch with {', '.join(sorted(map(str, batch)))}",
                'it needs "labels" and exactly one entry beside it',
                "an objective of your own: package.module:function",
            )  # fmt: skip
        return _logits(model(inputs[0])), labels
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        parts = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise ConfigError(
            f"objective '{objective}' got a batch of type {type(batch).__name__}{parts}",
            'it needs a mapping with "labels" or a pair (inputs, labels)',
            "an objective of your own: package.module:function",
        )
    return _logits(model(batch[0])), batch[1]


def takes_sequence_parts(objective: Objective) -> bool:
    """Return whether the sum over parts of the sequences is the sum over whole ones, for an objective given such parts.

    True of next_token, and of a function that says so itself by an attribute `sums_over_tokens = True`: its loss is a
    sum over tokens with the labels that the batch gives, and it hands the batch's "positions" and "mask" to the model.
    """
    return objective is next_token or bool(getattr(objective, "sums_over_tokens", False))


BUILT_IN: dict[str, Objective] = {
    "next_token": next_token, "classification": classification, "regression": regression, "multi_label": multi_label,
}  # fmt: skip
DEFAULT_FOR_UNIT = {"tokens": "next_token", "samples": "classification"}


def resolve_objective(objective: Any, source_unit: str) -> Objective:
    """Return the objective function for a task's `objective`: a name, an import path, "auto" or a function.

    One that takes `gather_rows` gets that of one device (coupling.py).
    "auto" follows the data's unit: "tokens" gives next_token, "samples" classification.
    """
    if callable(objective):
        _refuse_loss(objective)
        return with_gather(objective)
    if not isinstance(objective, str):
        raise ConfigError(
            f"task.objective is of type {type(objective).__name__}", "it must be a name or a function",
            "a function objective(model, batch) -> (loss_sum, weight)",
        )  # fmt: skip
    name = DEFAULT_FOR_UNIT.get(source_unit, objective) if objective == "auto" else objective
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name == SEQ2SEQ:  # which is like a function of the user's in all but its name
        return sequence_to_sequence
    if is_import_path(name):
        found = load_object(name, "task.objective")
        if not callable(found):
            raise ConfigError(
                f"task.objective = '{name}' is of type {type(found).__name__}", "it cannot be called",
                "a function objective(model, batch) -> (loss_sum, weight)",
            )  # fmt: skip
        _refuse_loss(found)
        return with_gather(found)
    raise ConfigError(f"there is no objective '{name}'", "", suggestion(name, ["auto", *BUILT_IN, SEQ2SEQ]))


def _refuse_loss(objective: object) -> None:
    """Raise ConfigError for a loss of torch's: it is of outputs and labels, where an objective calls the model."""
    of_class = isinstance(objective, nn.Module | type)
    named = objective if isinstance(objective, type) or not of_class else type(objective)
    if getattr(named, "__module__", "") not in ("torch.nn.modules.loss", F.__name__):
        return
    name = getattr(named, "__name__", "loss")
    given = f"nn.{name}(reduction='sum')" if of_class else f"F.{name}"
    inputs = "model(inputs), labels" if of_class else "model(inputs), labels, reduction='sum'"
    raise ConfigError(
        f"the objective is torch's {name}",
        "that is a function of outputs and labels, and an objective calls the model",
        f"def objective(model, batch): inputs, labels = batch; return {given}({inputs}), len(labels); "
        'or "classification", "regression" or "multi_label"',
    )  # fmt: skip


def without_cache(model: nn.Module) -> dict[str, object]:
    """Return the argument that keeps a model of transformers from filling a cache for generation; none of others.

    Recompute would fill the cache twice.
    """
    return {"use_cache": False} if "use_cache" in _parameters_of(type(model).forward) else {}


def beside_tokens(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, object]:
    """Return what a model is given with its tokens: where they stand and what they see, as the batch says."""
    found: dict[str, object] = {name: batch[name] for name in ("positions", "mask") if name in batch}
    if "documents" in batch:
        documents = batch["documents"]
        found = {"positions": document_positions(documents), "mask": _sees(model, batch)}
    known = _parameters_of(type(model).forward)
    if "position_ids" in known and "mask" not in found and "positions" in found:
        found["position_ids"] = found.pop("positions")
    if "attention_mask" in batch and "attention_mask" in known:
        found["attention_mask"] = batch["attention_mask"]
    if missing := [name for name in found if name not in known]:
        raise ConfigError(
            f"{type(model).__name__} takes no argument '{missing[0]}'",
            "the batch says where its tokens stand: documents are packed into rows, or ranks share sequences",
            "forward(self, tokens, positions=None, mask=None), or data without documents",
        )
    if "real" in batch and "real" in known:  # routers count what is no padding
        found["real"] = batch["real"]
    return found | without_cache(model)


@functools.lru_cache(maxsize=16)  # asked for every micro-batch, which is of one or two models
def _parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name."""
    return inspect.signature(function).parameters


def _sees(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | PackedDocuments:
    """Return which keys a query sees among packed documents: a mask, or less where the built-in decoder can do so."""
    documents = batch["documents"]
    if STARTS in batch and isinstance(model, Decoder) and takes_packed(documents.device):
        return PackedDocuments(documents, batch[STARTS], documents.shape[1])
    return document_mask(documents)


def by_row(
    objective: Any, place: Callable[[Objective], Objective] = lambda own: own
) -> Callable[[nn.Module, object, Tensor | None], tuple[Tensor, Tensor]] | None:
    """Return `of_rows(model, batch, weights)` of an objective; None where it does not tell its rows apart.

    Without weights it returns the losses and the weights of the rows, [rows] both, without gradients; with weights
    [rows] the sum of the rows' losses, each times its own, and the sum of what they count. An objective of the user's
    own brings `by_row(model, batch)`, an attribute that returns losses and weights of rows with gradients; `place` puts
    that on a device.
    """
    if objective in BUILT_IN.values():
        return functools.partial(_of_rows, objective)
    own = getattr(objective, "by_row", None)
    return functools.partial(_of_own_rows, place(own)) if callable(own) else None


def _of_rows(objective: Objective, model: nn.Module, batch: Any, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    labels = LabelsByRow(_field(batch, "labels") if isinstance(batch, Mapping) else batch[1], weights)
    return objective(model, {**batch, "labels": labels} if isinstance(batch, Mapping) else (batch[0], labels))


def _of_own_rows(own: Any, model: nn.Module, batch: Any, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    losses, counted = own(model, batch)
    return (losses, counted) if weights is None else ((losses * weights.to(losses)).sum(), counted.sum())


def _kind(batch: object) -> str:
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__


def _summed_cross_entropy(logits: Tensor, labels: LossLabels) -> tuple[Tensor, Tensor]:
    """Return cross-entropy [..., classes] against [...], summed in fp32 at least, and the count of labels."""
    if isinstance(labels, LabelsByRow) and is_spread(logits):
        return labels.combined(spread_logits_cross_entropy(logits, labels.labels)), labels.counted()
    if isinstance(labels, LabelsByRow):
        flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        each = F.cross_entropy(flat, labels.labels.flatten(), ignore_index=IGNORED, reduction="none")
        return labels.combined(each), labels.counted()
    if is_spread(logits):  # a head whose classes are spread over ranks
        return spread_logits_cross_entropy_sum(logits, labels)
    wide = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.flatten(0, -2).to(wide), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (labels != IGNORED).sum()


def _logits(output: object) -> Tensor:
    found = getattr(output, "logits", output)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"the model returned {type(output).__name__}", "the objective needs logits: a tensor, or `.logits` of one",
            "an objective of your own: package.module:function",
        )  # fmt: skip
    return found


def _field(batch: object, name: str) -> Tensor:
    if not isinstance(batch, Mapping) or name not in batch:
        held = ", ".join(sorted(map(str, batch))) if isinstance(batch, Mapping) else f"no names: a {_kind(batch)}"
        raise ConfigError(
            f'the batch has no "{name}"', f"it holds {held}",
            f'rows that are dicts with "{name}", another objective, or one of your own in task.objective',
        )  # fmt: skip
    return batch[name]

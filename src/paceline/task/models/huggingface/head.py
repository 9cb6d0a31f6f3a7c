"""The loss of a Hugging Face model in chunks: its head computes the loss, so that its logits never exist whole.

Only where the model returns what its head returns: one that caps, scales or cuts its logits afterwards keeps them
whole. Whether it does is seen by one forward pass on tensors without values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.errors import ConfigError
from paceline.task.declared import is_routed
from paceline.task.models.held import is_spread
from paceline.task.models.huggingface.interface import FEW, is_transformers
from paceline.task.models.layers.loss import LossLabels, cross_entropy_sum
from paceline.task.profile.tracing import fake_copy, quiet

LIMIT = "paceline_logits_elements"  # attribute of a model whose head may compute the loss: logits that exist at a time


def limit_logits(model: nn.Module, elements: int, tokens: float) -> bool:
    """Have objectives of tokens hold at most so many logits of a model at a time; return whether they will.

    Not where those of all `tokens` of a micro-batch are as few, nor where the head cannot do so. Tokens without end
    are those that nobody has counted.
    """
    head = _plain_head(model) if is_transformers(model) else None
    if head is None or tokens * head.out_features <= elements or not _returns_its_heads_output(model):
        return False
    setattr(model, LIMIT, elements)
    return True


@contextlib.contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Have the model return its own outputs meanwhile, however many its logits are."""
    own = vars(model)
    limit = own.pop(LIMIT, None)
    try:
        yield
    finally:
        if limit is not None:
            own[LIMIT] = limit


def chunked_loss(
    model: Any, tokens: Tensor, labels: LossLabels, options: Mapping[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Return (loss_sum, weight) of the model on tokens, None where whole logits are small enough or are needed.

    Of a model with a limit few logits take this way too: where sharded ranks have other numbers of them, weights would
    be gathered for the loss on some ranks first, and for the logits on others, and each would wait for the other.
    `tokens` are what the model takes first, an encoder-decoder the source; `labels` are as many as its logits.
    The head is called inside the model's forward pass, where its weight is gathered and has the right precision.
    """
    limit = getattr(model, LIMIT, None)
    head: Any = None if limit is None else _plain_head(model)
    if limit is None or head is None:
        return None
    found: list[tuple[Tensor, Tensor]] = []

    def loss(hidden: Tensor) -> Tensor:
        weight = head.weight
        found.append(cross_entropy_sum(hidden.to(weight.dtype), weight, labels, limit))
        return found[0][0]

    own = vars(head)  # an attribute of the object comes before the method of its class
    before = own.get("forward")
    own["forward"] = loss
    try:
        output = model(tokens, **options)
    finally:
        own.pop("forward") if before is None else own.update(forward=before)
    if not found or getattr(output, "logits", output) is not found[0][0]:
        raise ConfigError(
            f"{type(model).__name__} does something to its logits that it did not do at first",
            "its head computes the loss in chunks, and what comes after the head would change it",
            "an objective of your own: package.module:function",
        )
    return found[0]


def _plain_head(model: object) -> nn.Linear | None:
    """Return the layer that makes logits of hidden states, None where it is anything but a product with a weight."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    plain = isinstance(head, nn.Linear) and head.bias is None and not is_spread(head.weight)
    return head if plain else None


def _returns_its_heads_output(model: nn.Module) -> bool:
    """Return whether the logits of the model are the tensor that its head returns, for every token, and no other."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    replica: Any = fake_copy(model, mode, None)
    made: list[Tensor] = []
    replica.get_output_embeddings().register_forward_hook(lambda module, args, output: made.append(output))
    for module in filter(is_routed, replica.modules()):  # which expert is data
        module.forward = lambda hidden, *args, **kwargs: torch.zeros_like(hidden)
    tokens = torch.zeros(1, FEW, dtype=torch.long)
    try:
        with quiet(mode), torch.no_grad():
            decoder = {"decoder_input_ids": tokens} if getattr(replica.config, "is_encoder_decoder", False) else {}
            output = replica(tokens, use_cache=False, **decoder)
    except Exception:  # whatever a model raises on tensors without values
        return False
    return len(made) == 1 and getattr(output, "logits", None) is made[0] and made[0].shape[:2] == tokens.shape

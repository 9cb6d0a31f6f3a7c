"""Attention over shared sequences for models of transformers, by its attention interface.

transformers keeps attention functions by name, and a model's config says which to call. The name is that of the ranks'
group, so that several models may share sequences in one process.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.parallel.context.sequence_attention import shared_attention
from paceline.task.models.huggingface.interface import unknown_of
from paceline.task.models.layers.attention import AttentionFunction


def share_by_interface(model: Any, group: dist.ProcessGroup, method: str) -> None:
    """Make the attention of a model of transformers reach over the ranks of `group`, in place."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"paceline_{method}_{group.group_name}"
    AttentionInterface.register(name, _Shared(shared_attention(group, method)))
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)


class _Shared:
    """An attention function as transformers calls it."""

    def __init__(self, attention: AttentionFunction) -> None:
        self._attention = attention

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **asked: object,
    ) -> tuple[Tensor, None]:
        """Return [rows, 2c, heads, width of values] for queries, keys and values [rows, heads, 2c, width]."""
        if dropout or (because := unknown_of(asked)):
            because = "its attention drops scores at random" if dropout else because
            raise ConfigError("cp with this model", because, "plan.cp = 1")
        width = value.shape[-1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        query, key, value = _of_one_width(query, key, value)
        out = self._attention(query, key, value, attention_mask, scale)[..., :width]
        return out.transpose(1, 2).contiguous(), None


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Return [..., width] filled up with zeros to the largest width: products with them are none."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in tensors]


def _no_mask(*, attention_mask: Tensor | None = None, **_: object) -> None:
    """Return no mask: the ranks' attention is causal by itself. Raises ConfigError for a mask [rows, tokens].

    transformers asks for no mask where the model was given one of four dimensions.
    """
    if attention_mask is not None:
        raise ConfigError(
            "an attention_mask [rows, tokens] under cp",
            "a rank's part of it does not tell which keys of other ranks are padding",
            'hand on the batch\'s own "attention_mask", which then has four dimensions, or plan.cp = 1',
        )

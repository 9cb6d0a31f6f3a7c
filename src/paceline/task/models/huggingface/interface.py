"""Hugging Face models whose attention can be replaced: what transformers' attention interface is asked for.

A model that reaches attention through that interface (`transformers.AttentionInterface`), once in each block, and takes
`position_ids`, treats every token by itself everywhere else, so ranks may share its sequences. Which attention it asks
for is found by one forward pass on tensors without values, with an attention that only looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.task.declared import is_routed
from paceline.task.models.blocks import find_blocks
from paceline.task.profile.tracing import COMPUTE_DTYPE, fake_copy, quiet

POSITIONS = "position_ids"
LOOK = "paceline_look"  # the name of the attention that only looks
FEW = 16  # tokens of the look
# What is given to the interface and changes nothing of plain causal attention.
PLAIN = {"position_ids", "use_cache", "cache_position", "past_key_values", "output_attentions", "output_router_logits",
         "output_hidden_states", "return_dict", "position_embeddings", "layer_idx"}  # fmt: skip
REFUSED = {
    "softcap": "it caps the scores of attention (softcapping)",
    "s_aux": "its attention has sinks",
    "position_bias": "its attention adds a bias of positions to the scores",
}
# Rotary frequencies of these kinds follow from the largest position in the batch, and a rank sees its own alone.
GROWING = ("dynamic", "longrope")


@dataclass
class _Seen:
    """What one forward pass asked of the interface."""

    calls: list[str] = field(default_factory=list)  # the name of the block, for each
    because: str = ""  # the first thing in it that sharing cannot do
    masks: list[Callable[..., Tensor]] = field(default_factory=list)


def has_interface(model: nn.Module) -> bool:
    """Return whether the model is one of transformers' whose attention can be set, and which can be told positions."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or POSITIONS not in inspect.signature(type(model).forward).parameters:
        return False
    return bool(can_set()) and bool(getattr(model, "_supports_attention_backend", False))


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model is one of transformers'."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def why_unshared(model: nn.Module, seq: int) -> str:
    """Return why ranks cannot share sequences of `seq` tokens of a model of transformers, "" where they can."""
    if not has_interface(model):
        return (
            f"{type(model).__name__} does not reach its attention through transformers' attention interface, or takes "
            f"no {POSITIONS}, so Paceline cannot tell it of the other ranks' keys"
        )
    if because := _of_config(model.config):
        return because
    seen = _look(model, seq)
    if seen.because:
        return seen.because
    blocks = [name for name, _ in find_blocks(model)]
    if sorted(seen.calls) != sorted(blocks):
        return (
            f"its attention interface is called {len(seen.calls)} times in {len(blocks)} blocks: tokens meet elsewhere"
        )
    if not all(_is_causal(mask, seq) for mask in seen.masks):
        return f"its attention mask is not the causal one at {seq} tokens (a sliding window, chunks or both ways)"
    return ""


def _of_config(config: object) -> str:
    """Return what a config says that ranks with a part of the sequence would compute otherwise."""
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if not kind.endswith("_attention")}
    kinds |= {kind for kind in getattr(config, "layer_types", None) or () if kind.startswith("linear")}
    if kinds:
        return f"its layers of the kind {', '.join(sorted(kinds))} mix tokens outside of attention"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
    if kind in GROWING:
        return f"its rotary frequencies of the kind '{kind}' depend on the largest position, which one rank has"
    return ""


def _look(model: nn.Module, seq: int) -> _Seen:
    """Return what one forward pass on tensors without values asks of the interface."""
    seen = _Seen()
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    replica: Any = fake_copy(model, mode, COMPUTE_DTYPE)
    tokens = torch.zeros(1, min(seq, FEW), dtype=torch.long)
    try:
        with _looking(replica, seen, seq), quiet(mode), torch.no_grad():
            # With a mask, transformers does not ask the positions for the borders of packed documents.
            replica(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except Exception as error:  # whatever a model raises on tensors without values
        seen.because = seen.because or (
            "what its attention is asked for cannot be seen on tensors without values "
            f"({type(error).__name__}: {error})"
        )
    return seen


@contextmanager
def _looking(replica: Any, seen: _Seen, seq: int) -> Iterator[None]:
    """Have the replica's attention looked at: `seen` learns of every call, and in which block it was."""
    from transformers import AttentionInterface, AttentionMaskInterface

    inside = [""]

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **asked: object) -> Any:
        seen.calls.append(inside[-1])
        seen.because = seen.because or _unlike_plain(module, query, key, mask, asked, seq)
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None

    def note(*, mask_function: Callable[..., Tensor], **_: object) -> None:
        seen.masks.append(mask_function)

    AttentionInterface.register(LOOK, look)
    AttentionMaskInterface.register(LOOK, note)
    for name, block in find_blocks(replica):
        block.register_forward_pre_hook(lambda module, args, name=name: inside.append(name))
        block.register_forward_hook(lambda module, args, out: inside.pop() and None)
    for module in filter(is_routed, replica.modules()):  # each token by itself, and which expert is data
        module.forward = lambda hidden, *args, **kwargs: torch.zeros_like(hidden)
    replica.set_attn_implementation(LOOK)
    yield


def _unlike_plain(
    module: nn.Module, query: Tensor, key: Tensor, mask: object, asked: Mapping[str, Any], seq: int
) -> str:
    """Return what in a call of the interface is not plain causal attention of the tokens among each other."""
    if mask is not None:
        return "it makes an attention mask of its own"
    if asked.get("is_causal") is False or (asked.get("is_causal") is None and not getattr(module, "is_causal", True)):
        return "its attention is not causal"
    if query.shape[2] != key.shape[2]:
        return "its queries attend to other tokens than their own sequence's"
    if asked.get("dropout"):
        return "its attention drops scores at random (attention_dropout), which ranks would draw apart"
    window = asked.get("sliding_window")
    if window is not None and window < seq:
        return f"its attention slides over {window} of {seq} tokens, which the ring does not"
    return unknown_of(asked)


def unknown_of(asked: Mapping[str, object]) -> str:
    """Return what of the keywords of a call is not known here, "" where all is."""
    known = {*PLAIN, "scaling", "dropout", "sliding_window", "is_causal"}
    for name, value in asked.items():
        if name not in known and value is not None and value is not False:
            return REFUSED.get(name, f"its attention is asked for '{name}', which is not known here")
    return ""


def _is_causal(mask: Callable[..., Tensor], seq: int) -> bool:
    """Return whether a mask function of transformers lets every query of `seq` see itself and all before it."""
    none, few = torch.tensor(0), torch.arange(min(seq, FEW))
    try:
        grid = mask(none, none, few.unsqueeze(1), few.unsqueeze(0))
        last = mask(none, none, torch.tensor(seq - 1), torch.arange(seq))
        return torch.equal(grid, few.unsqueeze(1) >= few) and bool(last.all())
    except Exception:  # one that looks into the batch, whose tensors had no values
        return False

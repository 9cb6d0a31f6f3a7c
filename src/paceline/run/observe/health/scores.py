"""The largest attention scores and logits of one step: of a sample, since kernels keep neither.

A fused kernel holds no score, and the built-in decoder never all logits. Both are computed again for a sample: in each
attention layer the last QUERIES queries of every row, for one head, another one in each measurement; and the logits of
the last TOKENS tokens of every row. Of a sequence of 4,096 tokens and 32 heads that is 1/2,048 of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.spec.plan import Plan
from paceline.task.models.decoder import Decoder
from paceline.task.models.held import is_spread
from paceline.task.models.layers.attention import CausalAttention
from paceline.task.models.layers.packed import PackedDocuments

QUERIES = 64
TOKENS = 4
FUSED = "attention is one fused kernel, which tells nothing of its scores, and not CausalAttention"
COMPILED = "blocks are compiled"
SHARED = "ranks share sequences"
IN_PARTS = "ranks share the logits"
NO_HEAD = "the model is not the built-in decoder"


class ScoreWatch:
    """Computes some scores and logits of a model again, while its hooks are there."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], plan: Plan, device: torch.device,
                 counts: Callable[[], bool]) -> None:  # fmt: skip
        """`blocks` are the modules by their names; in pipelines there are none. `counts` is asked whether a micro-batch
        is one of the batch, and not a stand-in."""
        self._device, self._counts, layout = device, counts, plan.layout
        self._layers = [(at, module) for at, block in enumerate(blocks.values()) if block is not model
                        for module in block.modules() if isinstance(module, CausalAttention)]  # fmt: skip
        self._decoder = model if isinstance(model, Decoder) else None
        self.absent: dict[str, str] = {}
        scores = COMPILED if plan.compile else SHARED if layout.cp > 1 else "" if self._layers else FUSED
        if scores:
            self._layers, self.absent["attention_max"] = [], scores
        logits = IN_PARTS if layout.tp * layout.cp > 1 else "" if self._decoder is not None else NO_HEAD
        if logits:
            self._decoder, self.absent["logit_max"] = None, logits
        self._blocks = len(blocks)
        self._hooks: list[Any] = []
        self._head = 0
        self._found: dict[int, list[Tensor]] = {}
        self._logits: list[Tensor] = []

    def begin(self, head: int, part: int, parts: int) -> None:
        """Look from now on, at the head of this number in each layer; this rank has one of `parts` parts of them."""
        self.end()
        self._head, self._part, self._parts = head, part, parts
        self._found, self._logits = {}, []
        for at, module in self._layers:
            hook = module.register_forward_pre_hook(lambda _m, given, at=at: self._attends(at, *given))
            self._hooks.append(hook)
        if self._decoder is not None:
            self._hooks.append(self._decoder.norm.register_forward_hook(lambda _m, _i, out: self._ends(out)))

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def most(self) -> Tensor:
        """Return the largest score of each block without its sign, and the largest logit; 0 where there is none."""
        found = torch.zeros(self._blocks + 1, dtype=torch.float64, device=self._device)
        for at, parts in self._found.items():
            found[at] = torch.stack(parts).amax()
        if self._logits:
            found[-1] = torch.stack(self._logits).amax()
        return found

    @torch.no_grad()
    def _attends(self, at: int, q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> None:
        heads, keys = q.shape[1], k.shape[2]  # of this rank
        head = (self._head + at) % (heads * self._parts) - self._part * heads
        if not 0 <= head < heads or not self._counts():
            return  # another rank has it
        q, k = q.detach()[:, head, -QUERIES:], k.detach()[:, head * k.shape[1] // heads]
        scores = (q @ k.transpose(-1, -2)).double() * q.shape[-1] ** -0.5  # [rows, queries, keys]
        sees = _seen(mask, q.shape[1], keys, q.device)
        self._found.setdefault(at, []).append(torch.where(sees, scores.abs(), 0.0).amax())

    @torch.no_grad()
    def _ends(self, hidden: Tensor) -> None:
        assert self._decoder is not None
        head = self._decoder.embed_tokens.weight if self._decoder.config.tied else self._decoder.lm_head.weight
        if is_spread(head) or not self._counts():
            return
        logits = hidden.detach()[:, -TOKENS:].to(head.dtype) @ head.detach().t()
        self._logits.append(logits.abs().amax().double())


def _seen(mask: Any, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys the last queries see, bool [rows or 1, queries, keys]."""
    if isinstance(mask, PackedDocuments):
        documents = mask.documents
        return (documents[:, -queries:, None] == documents[:, None, :]) & _causal(queries, keys, device)
    if mask is not None:
        return mask[:, 0, -queries:] if mask.dtype == torch.bool else mask[:, 0, -queries:] > -1e4
    return _causal(queries, keys, device)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    places = torch.arange(keys, device=device)
    return (places[None, :] <= places[keys - queries :, None])[None]

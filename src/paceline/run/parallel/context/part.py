"""The context axis (`cp`): ranks that share sequences, and what a model and its batches need for that.

Weights are as on the data axes: `fsdp` spans dp_shard x cp, so gradients of a rank's part of the sequences are summed
like those of other samples, and losses and weights are sums over each rank's own labels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.run.parallel.context.interface_attention import share_by_interface
from paceline.run.parallel.context.sequence_attention import shared_attention
from paceline.run.parallel.context.zigzag import SequencePart
from paceline.run.process.groups import Mesh
from paceline.spec.plan import Plan
from paceline.task.models.decoder import Decoder
from paceline.task.models.huggingface.interface import is_transformers
from paceline.task.models.layers.attention import CausalAttention, can_share_sequences
from paceline.task.objective import Objective, takes_sequence_parts
from paceline.task.profile.closed import SEQUENCE_RULE


def share_sequences(model: nn.Module, plan: Plan, mesh: Mesh | None) -> None:
    """Make the model's attention reach over the ranks that share its sequences, in place."""
    if plan.layout.cp == 1:
        return
    assert mesh is not None
    group = mesh.context
    if is_transformers(model):
        share_by_interface(model, group, plan.cp_method)
        return
    if not can_share_sequences(model):
        raise ConfigError(f"cp = {plan.layout.cp} with the model {type(model).__name__}", SEQUENCE_RULE, "plan.cp = 1")
    attention = shared_attention(group, plan.cp_method)
    for module in model.modules():
        if isinstance(module, CausalAttention):
            module.over_ranks = attention


def part_of(plan: Plan, rank: int, model: nn.Module, objective: Objective) -> Callable[[object], object]:
    """Return what takes a rank's part of a batch along the sequence; the whole batch where none is shared."""
    cp = plan.layout.cp
    if cp == 1:
        cut_later = isinstance(model, Decoder) and plan.layout.tp > 1 and plan.layout.pp > 1
        return with_positions if cut_later else lambda data: data
    if not takes_sequence_parts(objective):
        name = getattr(objective, "__name__", repr(objective))
        raise ConfigError(f"cp = {cp} with the objective {name}", SEQUENCE_RULE, "plan.cp = 1")
    at, built_in = plan.layout.coordinates(rank)["cp"], isinstance(model, Decoder)
    return SequencePart(at, cp, masks_padding=is_transformers(model), takes_documents=built_in)


def with_positions(batch: Any) -> object:
    """Return a batch of tokens that says where they stand.

    A later pipeline stage gets a part of the sequence from its tensor ranks, and cannot tell its length from that.
    """
    if "documents" in batch or "positions" in batch:
        return batch
    return {**batch, "positions": torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)}

"""Whether parts of sequences give a foreign model's outputs of whole ones: tried on one row before training starts.

That attention reaches over ranks says nothing of the rest of a model: a convolution along the sequence, or a position
that it counts by itself, would go wrong at the borders of the parts without an error. So the outputs of a rank's part
are compared with those of the same tokens in the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.parallel.context.part import share_sequences
from paceline.run.parallel.context.zigzag import SequencePart, places_of
from paceline.run.parallel.split_check import RELATIVE, quiet
from paceline.run.process.groups import Mesh
from paceline.spec.plan import Plan
from paceline.task.models.huggingface.head import whole_logits
from paceline.task.models.huggingface.interface import why_unshared

TOKENS_OF_A_RANK = 64  # of the row that is tried, at most


def check_parts(
    model: Any, plan: Plan, objective: Callable[..., object], batch: Any, part: SequencePart, mesh: Mesh
) -> None:
    """Raise ConfigError where a model of transformers cannot share its sequences, or gives other outputs when it does.

    Every rank calls it, before anything of the plan is applied. The model's attention is left as it was.
    """
    part(batch)  # says what is wrong with a batch that has no tokens to share
    seq = batch["tokens"].shape[1]
    if because := why_unshared(model, seq):
        raise _refusal(model, part.ranks, because)
    row = _shortened(batch, seq, min(seq, TOKENS_OF_A_RANK * part.ranks))
    length, before = row["tokens"].shape[1], model.config._attn_implementation
    whole = _outputs(model, lambda: objective(model, row))
    share_sequences(model, plan, mesh)
    try:
        found = _outputs(model, lambda: objective(model, part(row)))
    finally:
        model.set_attn_implementation(before)
    places = places_of(part.rank, part.ranks, length, whole.device)
    real = places < length
    expected = whole[:, places[real]]
    wrong = (found[:, real] - expected).norm() > RELATIVE * expected.norm() if real.any() else torch.tensor(False)
    worst = wrong.to(expected.device, torch.float32)
    dist.all_reduce(worst, group=mesh.context)
    if worst:
        raise _refusal(model, part.ranks, "its outputs of a part of a row are others than of the whole row")


def _shortened(batch: Any, seq: int, length: int) -> dict[str, Any]:
    """Return the first row of a batch, of its first tokens."""
    row = {name: value[:1] if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}
    return {
        name: value[:, :length] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == seq else value
        for name, value in row.items()
    }


def _outputs(model: nn.Module, forward: Callable[[], object]) -> Tensor:
    """Return the model's logits [1, tokens, vocab] in a forward pass."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: object, out: Any) -> None:
        kept.append(getattr(out, "logits", out))

    handle = model.register_forward_hook(keep)
    try:
        with quiet(model), whole_logits(model), torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            forward()
    finally:
        handle.remove()
    if not kept or not isinstance(kept[0], Tensor):
        raise ConfigError(
            f"the objective does not call {type(model).__name__} for logits",
            "under cp its outputs of a part of a row are compared with those of the whole row before training",
            "an objective that calls the model itself, or plan.cp = 1",
        )
    return kept[0]


def _refusal(model: nn.Module, ranks: int, because: str) -> ConfigError:
    return ConfigError(f"cp = {ranks} with the model {type(model).__name__}", because, "plan.cp = 1")

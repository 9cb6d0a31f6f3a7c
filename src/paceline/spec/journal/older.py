"""Terms of journals that say neither kind nor clock: what the names that they had then stand for."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.forecast import Clock, Kind

LEARNT_PREFIX = "learnt from"  # and of how many runs
KNOWN: dict[str, tuple[Kind, Clock]] = {
    "products, forward": ("products", "forward_backward"),
    "products, backward": ("products", "forward_backward"),
    "attention": ("attention", "forward_backward"),
    "memory-bound operators": ("elementwise", "forward_backward"),
    "recompute": ("recompute", "forward_backward"),
    "weight casts and gradient sums": ("casts", "forward_backward"),
    "casts and gradient sums": ("casts", "forward_backward"),
    "operator launches": ("host", "forward_backward"),
    "activation offload": ("offload", "forward_backward"),
    "allocator flushes": ("allocator", "forward_backward"),
    "tensor communication": ("collectives", "reduce"),
    "context communication": ("collectives", "reduce"),
    "expert all-to-all": ("collectives", "reduce"),
    "pipeline sends": ("sends", "reduce"),
    "pipeline bubble": ("bubble", "reduce"),
    "parameter gathering": ("sync", "reduce"),
    "gradient reduction": ("sync", "reduce"),
    "optimizer": ("update", "optimizer"),
    "optimizer gathering": ("sync", "optimizer"),
    "optimizer offload": ("offload", "optimizer"),
    "data loading": ("data", "data"),
    "fixed step overhead": ("host", "other"),
    "weights": ("weights", "none"),
    "gradients": ("gradients", "none"),
    "optimizer state": ("optimizer", "none"),
    "activations": ("activations", "none"),
    "transients": ("activations", "none"),
    "held in turn": ("activations", "none"),
    "weight copies": ("buffers", "none"),
    "communication buffers": ("buffers", "none"),
    "loss buffers": ("buffers", "none"),
    "gathered for the update": ("buffers", "none"),
    "allocator buffers": ("cache", "none"),
    "runtime": ("runtime", "none"),
}


def kind_and_clock(term: Mapping[str, object]) -> tuple[str, str]:
    """Return the kind and the clock of a journal's term: as it says, else by its name; "other" and "none" else."""
    name, kind = str(term.get("name")), term.get("kind")
    if isinstance(kind, str):
        return kind, str(term.get("clock", "none"))
    return ("learnt", "none") if name.startswith(LEARNT_PREFIX) else KNOWN.get(name, ("other", "none"))

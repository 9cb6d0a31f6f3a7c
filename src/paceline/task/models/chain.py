"""The chain of a model: the modules before the repeated blocks, the blocks, and the modules after them.

The built-in decoder has its rules, a user's module names them in `paceline_rules`, and a Hugging Face model brings a
pipeline plan: `base_model_pp_plan` of its config and `_pp_plan` of its class.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor, nn

from paceline.task.models.decoder import Decoder
from paceline.task.rules import DECODER, Rules

OPENED_BY = (
    "the model declares no chain of blocks; an attribute paceline_rules = Rules(first=(...), blocks=..., last=(...)) "
    "names the modules before the blocks, their container and the modules after them"
)


class HandedOn(NamedTuple):
    """What a pipeline stage before the last may return: hidden states, and what its own blocks add to the loss."""

    hidden: Tensor
    added_loss: Tensor | None  # a scalar


def chain_of(model: nn.Module) -> Rules | None:
    """Return the rules in which a model declares its chain, None where it declares none.

    Modules whose weights the last stage uses too (a tied embedding) are in `first` and in `last`.
    """
    rules = _declared(model)
    if rules is None or not rules.blocks:
        return None
    return dataclasses.replace(rules, last=(*rules.last, *_tied(model, rules)))


def is_hugging_face(model: nn.Module) -> bool:
    """Return whether the model has a Hugging Face pipeline plan."""
    return bool(getattr(getattr(model, "config", None), "base_model_pp_plan", None))


def _declared(model: nn.Module) -> Rules | None:
    if isinstance(model, Decoder):
        return dataclasses.replace(DECODER, last=("norm",)) if model.config.tied else DECODER
    declared = getattr(model, "paceline_rules", None)
    if isinstance(declared, Rules) and not (declared.add_to_plan and not declared.blocks):
        return declared
    return _hugging_face(model) if is_hugging_face(model) else None


def _hugging_face(model: Any) -> Rules | None:
    """Return the chain in a Hugging Face plan: the list of modules is the blocks, what is named around it the ends."""
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    modules = dict(model.named_modules())
    names = [f"{inside}{name}" for name in model.config.base_model_pp_plan]
    names += [name for name in (getattr(type(model), "_pp_plan", None) or {}) if name in modules]
    lists = [name for name in names if isinstance(modules.get(name), nn.ModuleList)]
    if len(lists) != 1 or not all(name in modules for name in names):
        return None
    at = names.index(lists[0])
    return Rules(first=tuple(names[:at]), blocks=lists[0], last=tuple(names[at + 1 :]))


def _tied(model: nn.Module, rules: Rules) -> list[str]:
    """Return the modules of `first` with a weight that the last stage needs too."""
    if isinstance(model, Decoder):
        return ["embed_tokens"] if model.config.tied else []
    modules = dict(model.named_modules())
    late = {id(p) for name in rules.last if name in modules for p in modules[name].parameters()}
    return [
        name
        for name in rules.first
        if name in modules and any(id(p) in late for p in modules[name].parameters()) and name not in rules.last
    ]

"""The reference's optimizers: torch's plain ones on whole tensors, an optimizer for each kind of parameter.

Written apart from the run's: no joined optimizer, no fused or grouped kernel, groups found anew from their patterns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.spec.import_paths import load_object
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.task.models.blocks import find_blocks
from paceline.task.optimizer.groups import Matching

ADAM = ("adamw", "adam", "nadam", "radam", "adamax", "adamw8bit")
OTHERS = {"adamw8bit": "bitsandbytes.optim:AdamW8bit"}
CLASSES = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax, "adagrad": torch.optim.Adagrad, "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}  # fmt: skip


FACTOR = "factor"  # of a group of an optimizer of several: that on the learning rate


class PlainLion(torch.optim.Optimizer):
    """Lion as in algorithm 2 of arXiv:2302.06675, a line for a line."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                momentum = self.state[weight].get("m", torch.zeros_like(weight))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                self.state[weight]["m"] = beta2 * momentum + (1 - beta2) * weight.grad


def plain_optimizers(
    spec: OptimizerSpec, model: nn.Module, trained: Iterable[nn.Parameter] | None = None
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return the optimizers of a model's parameters, each with the factor on the schedule's learning rate.

    One of the user's own has all of its parameters, in groups which have a factor each.
    `trained` are the parameters they update, all of the model's where it is not given.
    """
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(weight, []).append(name)
    chosen = list(aliases) if trained is None else list(trained)
    depths = _depths(model) if spec.layer_decay != 1.0 else {}
    kinds: dict[tuple[int, str, int], list[nn.Parameter]] = {}
    for weight in chosen:
        if weight.requires_grad:
            at = first_match(spec.groups, aliases[weight])
            shape = "matrix" if weight.dim() == 2 else "vector" if weight.dim() < 2 else "more"
            kinds.setdefault((at, shape, depths.get(weight, 0)), []).append(weight)
    found: list[tuple[torch.optim.Optimizer, float]] = []
    own: dict[tuple[int, str], tuple[Any, dict[str, Any], dict[tuple[Any, ...], dict[str, Any]]]] = {}
    for (at, shape, depth), weights in kinds.items():
        rule = _rule(spec, at, shape)
        factor = rule.lr_scale * spec.layer_decay**depth
        if not rule.is_own:
            found.append((rule.kind(weights, lr=spec.lr, **rule.arguments), factor))
            continue
        arguments = {**rule.arguments}
        decay = {name: arguments.pop(name) for name in ("weight_decay",) if name in arguments}
        alike = own.setdefault((id(rule.kind), repr(arguments)), (rule.kind, arguments, {}))
        group = alike[2].setdefault((at, factor, *decay.values()), {"params": [], FACTOR: factor, **decay})
        group["params"] += weights
    place = {weight: number for number, weight in enumerate(chosen)}
    return found + [(kind(_in_order(groups.values(), place), lr=spec.lr, **arguments), 1.0)
                    for kind, arguments, groups in own.values()]  # fmt: skip


def _in_order(groups: Collection[dict[str, Any]], place: Mapping[nn.Parameter, int]) -> list[dict[str, Any]]:
    """Return groups of parameters in the order in which the user's optimizer has them: its rule may go by the place.

    Those of less weight decay come first, of the same the one whose first parameter does; within a group it is the
    model's order.
    """
    for group in groups:
        group["params"].sort(key=place.__getitem__)
    by_first = sorted(groups, key=lambda group: place[group["params"][0]])
    return sorted(by_first, key=lambda group: group.get("weight_decay", 0.0))


def _depths(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return for each weight how many blocks lie above the weight, its own block counted; one more below all blocks.

    A weight between two blocks is where the lower one is.
    """
    blocks = [block for _, block in find_blocks(model)]
    order = list(model.modules())  # a block may have no weight, as one that normalises without any
    place: dict[nn.Parameter, int] = {}
    for at, module in enumerate(order):
        for weight in module.parameters(recurse=False):
            place.setdefault(weight, at)
    begins = [order.index(block) for block in blocks]
    above = {weight: sum(begin > at for begin in begins) for weight, at in place.items()}
    depths = {weight: over + 1 if over else 0 for weight, over in above.items()}
    for number, block in enumerate(reversed(blocks), 1):
        depths |= dict.fromkeys(block.parameters(), number)
    return depths


def first_match(groups: Sequence[Matching], names: Iterable[str]) -> int:
    """Return the number of the first group with a pattern for one of a parameter's names, -1 where none has."""
    known = list(names)
    for at, group in enumerate(groups):
        for pattern in group.match:
            wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
            if any(re.fullmatch(wanted, name) for name in known):
                return at
    return -1


@dataclass(frozen=True)
class _Rule:
    """How parameters of one kind are updated."""

    kind: Any
    arguments: dict[str, Any]
    lr_scale: float
    is_own: bool  # whether it is the user's own: what it knows of all parameters together it must see together


def _rule(spec: OptimizerSpec, at: int, shape: str) -> _Rule:
    group = spec.groups[at] if at >= 0 else GroupSpec()
    name = group.name or spec.name
    arguments = (
        dict(group.arguments) if group.name and group.name != spec.name else {**spec.arguments, **group.arguments}
    )
    if name == "muon" and shape != "matrix":
        name, arguments = "adamw", {}
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    decay = group.weight_decay
    if decay is None:
        decay = 0.0 if shape == "vector" else spec.weight_decay
    if name == "lion":
        arguments = {"betas": (spec.beta1, spec.beta2), **arguments}
        return _Rule(PlainLion, {**arguments, "weight_decay": decay}, group.lr_scale, is_own=False)
    if name in ADAM:
        arguments = {"betas": (spec.beta1, spec.beta2), "eps": spec.eps, **arguments}
    if name == "sgd":
        arguments = {"momentum": spec.beta1, **arguments}
    path = OTHERS.get(name, name) if isinstance(name, str) else ""
    kind: Any = CLASSES.get(name) or (load_object(path, "task.optimizer.name") if path else name)
    taken = inspect.signature(kind).parameters
    if "foreach" in taken:
        arguments["foreach"] = False
    if "weight_decay" in taken or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        arguments["weight_decay"] = decay
    return _Rule(kind, arguments, group.lr_scale, is_own=name not in CLASSES and name not in OTHERS)

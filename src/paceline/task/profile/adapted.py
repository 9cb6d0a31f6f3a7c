"""The profile of a model of which not all is trained: what is frozen, what adapters add, and which products are spared.

A frozen weight has no gradient and no optimizer state, and its layer one product less in the backward pass. A block
before everything that is trained has no backward pass at all, and keeps nothing for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from paceline.spec.profile import BlockProfile, ModelProfile
from paceline.task.adapt.fill import adapted_layers
from paceline.task.adapt.linear import DTYPES, AdaptedLinear, PackedLinear
from paceline.task.adapt.teacher import teachers_of
from paceline.task.models.chain import chain_of
from paceline.task.profile.adapters import with_adapters
from paceline.task.profile.traced import REST

IDLE = (
    "nothing of '{name}' is trained, and a stage of such blocks would have nothing to update; adapters in all blocks,"
    " or `train` patterns that name some of each, open it"
)
PACKED = (
    "frozen weights in four bits (task.adapter.base_dtype = 'nf4') have one scale for 64 values of a whole matrix, and"
    " are not cut; base_dtype = 'bf16' opens it"
)


def adapted_profile(profile: ModelProfile, model: nn.Module, forward_passes: int = 1) -> ModelProfile:
    """Return a model's profile with what is frozen in it. `model` is the one that trains, on any device.

    An analytic profile, which knows no adapters, gets what they compute and hold; a traced one has seen them. Of
    `forward_passes` that its objective makes one has a backward pass.
    """
    named = dict(model.named_parameters())
    if all(parameter.requires_grad for parameter in named.values()):
        return profile
    names = [block.name for block in profile.blocks]
    layers = adapted_layers(model)
    taught = {id(parameter) for teacher in teachers_of(model) for parameter in teacher.parameters()}
    blocks, flows = [], _trains(named, names, _early(model)) if REST in names else False
    for block in profile.blocks:
        own = {name: parameter for name, parameter in named.items() if _block_of(name, names) == block.name}
        inside = [layer for name, layer in layers.items() if _block_of(f"{name}.weight", names) == block.name]
        if profile.source == "analytic":
            block = _without_packed(_with_adapters(block, inside, profile.tokens_per_sample), inside)
        flows = flows or any(parameter.requires_grad for parameter in own.values())
        # What a trace has seen keep nothing, as a teacher does, has no backward pass.
        is_idle = profile.source == "traced" and not (block.saved_elements or block.saved_fp32_elements)
        passed = flows and not (is_idle and not any(parameter.requires_grad for parameter in own.values()))
        block = _unpacked(_frozen(block, own.values(), inside, flows=passed), inside, forward_passes, flows=passed)
        alone = sum(parameter.numel() for parameter in own.values() if id(parameter) in taught)
        passes = block.backward_products / forward_passes
        blocks.append(dataclasses.replace(block, backward_products=passes, forward_only_parameters=alone))
    idle = [block.name for block in blocks if block.recomputable and block.frozen_parameters == block.parameters]
    closed = {"pp": IDLE.format(name=idle[0])} if idle else {}
    closed |= {"tp": PACKED} if any(block.packed_parameters for block in blocks) else {}
    return dataclasses.replace(profile, blocks=tuple(blocks), closed_axes={**(profile.closed_axes or {}), **closed})


def _block_of(name: str, names: list[str]) -> str:
    """Return the block of the chain that holds a parameter."""
    found = max((block for block in names if name.startswith(f"{block}.")), key=len, default="")
    return found or (REST if REST in names else "")


def _early(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of parameters outside the blocks begin whose outputs the blocks read; all, if unknown."""
    chain = chain_of(model)
    return ("",) if chain is None else tuple(f"{name}." for name in chain.first)


def _trains(named: dict[str, nn.Parameter], names: list[str], early: tuple[str, ...]) -> bool:
    """Return whether anything is trained before the repeated blocks."""
    outside = {name: parameter for name, parameter in named.items() if _block_of(name, names) == REST}
    return any(parameter.requires_grad and name.startswith(early) for name, parameter in outside.items())


def _frozen(
    block: BlockProfile, own: Iterable[nn.Parameter], inside: list[AdaptedLinear], *, flows: bool
) -> BlockProfile:
    """Return a block with what of its parameters is frozen; `flows` says whether gradients pass through it."""
    own = list(own)
    matrices = [parameter for parameter in own if parameter.dim() > 1]
    packed = [layer.in_features * layer.out_features for layer in inside if isinstance(layer, PackedLinear)]
    size = sum(parameter.numel() for parameter in matrices) + sum(packed)
    trained = sum(parameter.numel() for parameter in matrices if parameter.requires_grad)
    kept = ("saved_elements", "saved_fp32_elements", "selective_elements", "attention_out_elements", "kv_elements")
    idle: dict[str, Any] = {} if flows else dict.fromkeys(kept, 0.0)
    if block.kind == "head" and not any(parameter.requires_grad for parameter in own):
        idle["fixed_elements"] = 0.0  # a frozen head's gradient is never taken
    return dataclasses.replace(
        block,
        frozen_parameters=min(block.parameters, sum(p.numel() for p in own if not p.requires_grad)),
        narrow_parameters=sum(layer.weight.numel() for layer in inside if layer.spec.base_dtype in DTYPES),
        packed_parameters=sum(packed),
        packed_layers=len(packed),
        unpacked_elements=max(packed, default=0),
        backward_products=(1.0 if flows else 0.0) + (trained / size if size else float(flows)),
        **idle,
    )


def _unpacked(block: BlockProfile, inside: list[AdaptedLinear], forward_passes: int, *, flows: bool) -> BlockProfile:
    """Return a block with how often each of its weights in four bits is unpacked for a micro-batch.

    Once for its product, once more for DoRA's norm, and with dropout for a second product. The other passes of an
    objective have no adapters, and those that keep nothing have no backward pass.
    """
    if not block.packed_parameters:
        return block
    spec = inside[0].spec
    products = 2 if spec.kind == "dora" and spec.dropout else 1
    forward = products + (spec.kind == "dora")
    unpacks = forward + (forward_passes - 1) + products * flows
    return dataclasses.replace(block, unpacks=float(unpacks), unpacks_again=float(forward))


def _without_packed(block: BlockProfile, inside: list[AdaptedLinear]) -> BlockProfile:
    """Return an analytic block without the weights that rest in four bits: these are no parameters."""
    packed = sum(layer.in_features * layer.out_features for layer in inside if isinstance(layer, PackedLinear))
    active = block.active_parameters - packed if block.active_parameters else 0
    return dataclasses.replace(block, parameters=block.parameters - packed, active_parameters=active)


def _with_adapters(block: BlockProfile, inside: list[AdaptedLinear], tokens: int) -> BlockProfile:
    """Return a block with what the adapters beside its layers compute, keep and hold, for `tokens` of a sample."""
    if not inside:
        return block
    shapes = [(layer.in_features, layer.out_features) for layer in inside]
    return with_adapters(block, inside[0].spec, shapes, tokens)

"""The repeated blocks of any module: the units of recompute, of sharding and of compilation."""

from __future__ import annotations

from torch import nn

from paceline.task.models.chain import chain_of

# Blocks of one class must hold this part of the parameters of the largest class to count as well: enough for
# an encoder beside a larger decoder, too much for the few small modules around a chain.
SIBLING_FRACTION = 0.1
# Modules are stages or towers, not blocks, where this part of their parameters lies in blocks of their own.
TOWER_FRACTION = 0.9

NamedBlock = tuple[str, nn.Module]


def find_blocks(model: nn.Module) -> list[NamedBlock]:
    """Return (name, module) of the model's repeated blocks in the order of `named_modules`, [] where it has none.

    Where the model declares a chain, the blocks are those of its container, whatever they are made of: what is planned,
    sharded and computed again is then what a pipeline cuts. Elsewhere they are found.

    Blocks that are found are two or more children of one module (entries of a ModuleList or Sequential, or attributes)
    that share a class and are made of layers with parameters; a bare nn.Linear is no block. The class whose blocks hold
    the most parameters wins; others beside it count too when they hold a tenth as many (an encoder and a decoder).
    Blocks lie never inside another block; stages (of a ResNet, say) and towers are looked into instead.
    """
    declared = _declared(model)
    if declared:
        return declared
    families = _families(model)
    sizes: dict[type, int] = {}
    for family in families:
        sizes[type(family[0][1])] = sizes.get(type(family[0][1]), 0) + sum(_size(block) for _, block in family)
    return [
        block
        for family in families
        for block in family
        if sizes[type(block[1])] >= SIBLING_FRACTION * max(sizes.values())
    ]


def _declared(model: nn.Module) -> list[NamedBlock]:
    """Return the blocks of the chain that a model declares, [] where it declares none."""
    rules = chain_of(model)
    container = dict(model.named_modules()).get(rules.blocks) if rules else None
    if rules is None or container is None:
        return []
    return [(f"{rules.blocks}.{name}", block) for name, block in container.named_children()]


def _families(module: nn.Module, prefix: str = "") -> list[list[NamedBlock]]:
    """Return the outermost families of blocks at or below `module`."""
    by_class: dict[type, list[NamedBlock]] = {}
    for name, child in module.named_children():
        if _is_composite(child) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            by_class.setdefault(type(child), []).append((f"{prefix}{name}", child))
    kept = {
        kind: family
        for kind, family in by_class.items()
        if len(family) > 1 and not (_may_be_towers(module, family) and _are_towers(family))
    }
    families = []
    for name, child in module.named_children():
        if type(child) in kept and _is_composite(child):
            family = kept[type(child)]
            if family[0][1] is child:
                families.append(family)
        else:
            families += _families(child, f"{prefix}{name}.")
    return families


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module is made of others with parameters, and is not one bare layer."""
    return any(_size(child) for child in module.children())


def _may_be_towers(parent: nn.Module, family: list[NamedBlock]) -> bool:
    """Return whether to look for blocks inside the members: not inside list entries that repeat in size.

    Those are layers whatever they hold; a layer of experts, too, keeps nearly all of its parameters in a list.
    """
    sizes = {_size(child) for _, child in family}
    is_list = isinstance(parent, nn.ModuleList | nn.Sequential)
    return not is_list or isinstance(family[0][1], nn.Sequential) or len(sizes) == len(family)


def _are_towers(family: list[NamedBlock]) -> bool:
    inner = sum(_size(block) for _, child in family for inner in _families(child) for _, block in inner)
    return inner >= TOWER_FRACTION * sum(_size(child) for _, child in family)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

"""Learning rates that fall from the head of a model down to its embeddings, block by block.

As in BEiT (Bao et al. 2021, arXiv:2106.08254, appendix): what comes after the last block has the schedule's rate, the
last block `decay` of it, each block below another factor of `decay`, and what comes before the first block one more.
What lies between two blocks, such as what joins the stages of a ConvNeXt, has the rate of the block before it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.errors import ConfigError
from paceline.task.models.blocks import find_blocks


def layer_scales(model: nn.Module, decay: float) -> Mapping[str, float]:
    """Return the factor on the learning rate of each parameter of a whole model, by all of its names.

    A tied weight has the lower one of its places' factors. Raises ConfigError for a model without blocks.
    """
    blocks = [name for name, _ in find_blocks(model)]
    if not blocks:
        raise ConfigError(
            f"task.optimizer.layer_decay = {decay:g} for a {type(model).__name__}",
            "it has no repeated blocks, so nothing says what is above and what below",
            "groups with lr_scale",
        )
    by_parameter: dict[nn.Parameter, list[str]] = {}
    depths: dict[nn.Parameter, int] = {}
    above = len(blocks) + 1
    below = 0  # blocks that come before
    for place, module in model.named_modules(remove_duplicate=False):  # a block may have no parameter of its own
        block = next((at for at, prefix in enumerate(blocks) if f"{place}.".startswith(f"{prefix}.")), None)
        if block is not None:
            below, depth = max(below, block + 1), above - (block + 1)
        else:
            depth = 0 if below == len(blocks) else above - below
        for name, parameter in module.named_parameters(place, recurse=False, remove_duplicate=False):
            by_parameter.setdefault(parameter, []).append(name)
            depths[parameter] = max(depths.get(parameter, 0), depth)
    return {name: decay ** depths[parameter] for parameter, names in by_parameter.items() for name in names}

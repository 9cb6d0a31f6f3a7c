"""What the layers of one model share about the tensor axis: how an activation becomes whole, and is summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.task.models.held import is_spread
from paceline.task.models.layers.collectives import add, gather, once, scatter, share
from paceline.task.models.layers.vocabulary import first_row

ENTERED = "_paceline_entered"  # attribute of an activation that several layers read


@dataclass
class Region:
    """What the layers of one model share about the axis."""

    group: dist.ProcessGroup
    splits_sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """Return the whole `x` for layers that each compute a part: communicated once for all that read the same.

        What came of `x` is kept with it, and so no longer than it.
        """
        state = (x._version, torch.is_grad_enabled())
        kept = getattr(x, ENTERED, None)
        if kept is not None and kept[0] == state:
            return kept[1]
        entered = gather(x, self.group) if self.splits_sequence else share(x, self.group)
        setattr(x, ENTERED, (state, entered))
        return entered

    def once(self, x: Tensor) -> Tensor:
        """Return `x`, which all ranks compute alike from what entered, with a gradient on one of them alone."""
        return once(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' partial `x`: whole, or this rank's part of the sequence."""
        return scatter(x, self.group) if self.splits_sequence else add(x, self.group)


def own_bias(layer: nn.Linear, region: Region) -> Tensor | None:
    """Return this rank's part of a whole bias: its gradient is zero elsewhere, and summed over ranks complete."""
    if layer.bias is None:
        return None
    rows = layer.weight.to_local().shape[0] if is_spread(layer.weight) else layer.weight.shape[0]
    return layer.bias.narrow(0, first_row(layer.bias.shape[0], region.group), rows)

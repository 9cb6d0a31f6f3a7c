"""Several update rules as one optimizer over a model's parameters, sharded or whole.

A rule that works element by element updates every rank's local tensors: no operator of torch needs to know of
shards. A rule that needs whole parameters (Muon, Adafactor) gets them one at a time: the weight, its gradient and what
its state has of the same shape are gathered, every rank computes the same update, and each keeps its part. The price
is a few copies of the largest parameter, the gathers, and an update that is not shared out; the state stays sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from paceline.run.updates.one_rule import LocalPart, ParameterGroup, UpdatePart, WholePart
from paceline.task.models.held import is_spread
from paceline.task.optimizer.eager import EagerOptimizer


class JoinedOptimizer(EagerOptimizer):
    """Updates each parameter by the rule of its group; `state` holds tensors with the parameters' placements.

    A group has "params", "use" (a Use whose scope is known), "lr", "lr_scale" and perhaps "weight_decay".
    """

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        super().__init__([dict(group) for group in groups], {})
        local: dict[int, list[ParameterGroup]] = {}
        self._parts: list[tuple[list[nn.Parameter], UpdatePart]] = []
        for group in self.param_groups:
            sharded = [is_spread(weight) for weight in group["params"]]
            assert all(sharded) or not any(sharded), "a group is sharded or whole"
            if group["use"].scope == "element" or not any(sharded):
                local.setdefault(id(group["use"]), []).append(group)
            else:
                self._parts += [([weight], WholePart(group, weight, self.state)) for weight in group["params"]]
        for own in local.values():
            self._parts.append(([weight for group in own for weight in group["params"]], LocalPart(own, self.state)))

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # a loss is of no use here
        """Update every weight that has a gradient. Every rank calls it: parameters may be gathered."""
        assert closure is None, "the loss is not evaluated again"
        for _, part in self._parts:
            part.step()

    @torch.no_grad()
    def materialise(self) -> None:
        """Give every parameter the state it has before its first update, where it has none yet and that is known."""
        self._begin(lambda weight, part: part.known)

    @torch.no_grad()
    def begin(self, weights: Collection[nn.Parameter]) -> None:
        """Give parameters without state one to load into, of the right names and shapes."""
        chosen = set(weights)
        self._begin(lambda weight, part: weight in chosen)

    def _begin(self, wanted: Callable[[nn.Parameter, UpdatePart], bool]) -> None:
        for weights, part in self._parts:
            for weight in weights:
                if not self.state.get(weight) and wanted(weight, part):
                    part.begin(weight)

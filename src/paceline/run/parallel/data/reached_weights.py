"""Which sharded weights the ranks' backward passes reached: one that no rank reached has no gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.run.parallel.data.settled_weights import SettledWeights
from paceline.task.models.held import is_sharded_unit


class ReachedWeights:
    """Notes the weights that got a gradient on this rank, among those that FSDP2 holds for `model`."""

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup], left: Collection[nn.Parameter]) -> None:
        self._groups = groups
        counted = {n: p for n, p in model.named_parameters() if p.requires_grad and p not in left}
        self._names = list(counted)
        self._reached: set[str] = set()
        self._settled = SettledWeights()
        self._units: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}  # the owners of what is not yet watched
        unit_of = _units(model)
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{key}" if path else key
                if counted.get(name) is parameter:
                    self._units.setdefault(unit_of[module], []).append((module, key, name))
        for unit in self._units:
            unit.register_forward_pre_hook(self._look)  # behind FSDP2's own, which gathers the weights

    def look(self, unit: nn.Module) -> None:
        """Watch the whole weights of a unit from now on; they are gathered, and will be the same objects next time."""
        for owner, key, name in self._units.pop(unit, ()):
            weight = owner._parameters[key]
            assert weight is not None
            if not weight.requires_grad:
                raise ConfigError(
                    f"'{name}' is trained no more, and was when the model was laid out",
                    "the model changes requires_grad while it runs, which no rank can tell the others",
                    "frozen_until or frozen_after of a group in task.optimizer.groups",
                )
            weight.register_post_accumulate_grad_hook(self._note(name))

    def forget(self) -> None:
        """Forget the last step."""
        self._reached.clear()
        self._settled.forget()

    def missed(self) -> int:
        """Return how many weights this rank did not reach in the step, 0 where they are those that were asked for last.

        What no rank had reached then has no gradient from here on.
        """
        return self._settled.news(self._missed())

    def _missed(self) -> list[str]:
        if len(self._names) == len(self._reached):
            return []
        return [name for name in self._names if name not in self._reached]

    def drop_unreached(self, model: nn.Module) -> None:
        """Take the gradient from every parameter of `model` that no rank reached. All ranks call it."""
        self._settled.give_back()
        held = dict(model.named_parameters())  # not those of the start: building without storage makes others
        device = next(iter(held.values())).device
        ranks = torch.tensor([float(name in self._reached) for name in self._names], device=device)
        for group in self._groups:
            dist.all_reduce(ranks, group=group)
        counts = zip(self._names, ranks.tolist(), strict=True)
        self._settled.settle(self._missed(), [held[name] for name, count in counts if not count])

    def _look(self, unit: nn.Module, *_: object) -> None:
        if unit in self._units:
            self.look(unit)

    def _note(self, name: str) -> object:
        return lambda _: self._reached.add(name)


def _units(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return the unit of every module: the innermost sharded module that holds it."""
    found: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, unit: nn.Module) -> None:
        unit = module if is_sharded_unit(module) else unit
        if module not in found:
            found[module] = unit
            for child in module.children():
                walk(child, unit)

    walk(root, root)
    return found

"""One update rule over some parameters: on this rank's parts of all, or on a whole parameter after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import NeedsWholeWeights
from paceline.run.updates.first_state import fresh_state, knows_fresh_state
from paceline.run.updates.shards import Cutter, wrapped
from paceline.task.models.held import is_spread, local_of, whole_of
from paceline.task.optimizer.update_scope import made

ParameterGroup = dict[str, Any]
OURS = ("params", "use", "lr_scale")  # keys of a parameter group that the optimizers inside do not get


class UpdatePart(Protocol):
    """Updates some parameters.

    What the part keeps of each parameter is in the joined optimizer's `state`, as tensors to be saved.
    """

    known: bool  # whether the state before a first update can be made

    def step(self) -> None:
        """Update every weight that has a gradient."""

    def begin(self, weight: nn.Parameter) -> None:
        """Give a parameter a state to load into."""


class RuleNumbers:
    """State that an optimizer keeps as numbers of Python's, shown as tensors of one element so that it is saved."""

    def __init__(self) -> None:
        self._kinds: dict[str, type] = {}

    def show(self, state: Mapping[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
        """Put the numbers of a state into `shown` and return the rest."""
        for name, value in state.items():
            if isinstance(value, bool | int | float):
                self._kinds[name] = type(value)
                shown.setdefault(name, torch.zeros((), dtype=torch.float64)).fill_(value)
        return {name: value for name, value in state.items() if not isinstance(value, bool | int | float)}

    def read(self, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Return the plain numbers of a state that was shown as tensors, into which a load may have written others."""
        return {name: kind(shown[name].item()) for name, kind in self._kinds.items() if name in shown}


COUNT = "group."  # before the name of a number that an optimizer keeps in a parameter group, where it is shown


def counted(group: ParameterGroup, counts: Sequence[str]) -> ParameterGroup:
    """Return the numbers that updates change in a group, such as a count of steps, by the names they are shown by."""
    return {COUNT + name: group[name] for name in counts}


def of_weight(numbers: ParameterGroup) -> ParameterGroup:
    """Return what of a state is a parameter's own, and not its group's."""
    return {name: value for name, value in numbers.items() if not name.startswith(COUNT)}


def go_on(group: ParameterGroup, numbers: ParameterGroup) -> None:
    """Give a group the numbers that a state was shown with, into which a load may have written others."""
    group.update({name.removeprefix(COUNT): value for name, value in numbers.items() if name.startswith(COUNT)})


class LocalPart:
    """A rule that works element by element, on this rank's parts of all its parameters at once."""

    def __init__(self, groups: Sequence[ParameterGroup], state: Any) -> None:
        self._groups, self._state, self._numbers = groups, state, RuleNumbers()
        self._plain = {weight: _plain(weight) for group in groups for weight in group["params"]}
        self._place = {weight: at for at, group in enumerate(groups) for weight in group["params"]}
        inside = [{**options(g), "params": [self._plain[w] for w in g["params"]]} for g in groups]
        self._worker = made(groups[0]["use"], groups[0]["lr"], inside)
        self.known = knows_fresh_state(self._worker)
        self._counts: tuple[str, ...] = groups[0]["use"].counts

    def step(self) -> None:
        """Update every weight that has a gradient."""
        changed = [weight for weight in self._plain if weight.grad is not None]
        if not changed:  # another objective's turn
            return
        for ours, theirs in zip(self._groups, self._worker.param_groups, strict=True):
            theirs.update(options(ours))
            for weight in ours["params"] if self._counts else ():
                go_on(theirs, self._numbers.read(self._state.get(weight, {})))
        for weight in changed:
            plain = self._plain[weight]
            if plain is not weight:
                assert weight.grad is not None
                plain.data = local_of(weight.detach())  # FSDP2 may have moved its part since
                plain.grad = local_of(weight.grad)
            self._worker.state[plain].update(of_weight(self._numbers.read(self._state.get(weight, {}))))
        self._worker.step()
        for weight in changed:
            self._show(weight)
            if self._plain[weight] is not weight:
                self._plain[weight].grad = None
        for weight in self._plain if self._counts else ():  # a group counts for weights that it leaves, too
            if self._state.get(weight):
                self._show(weight)

    def begin(self, weight: nn.Parameter) -> None:
        """Give a parameter a state to load into."""
        plain = self._plain[weight]
        self._worker.state[plain] = fresh_state(self._worker, self._group_of(weight), plain)
        self._show(weight)

    def _group_of(self, weight: nn.Parameter) -> ParameterGroup:
        """Return the worker's group of a parameter."""
        found: ParameterGroup = self._worker.param_groups[self._place[weight]]
        return found

    def _show(self, weight: nn.Parameter) -> None:
        """Show the state of a parameter with the parameter's placements; the memory is the worker's."""
        plain = self._plain[weight]
        inside = {**self._worker.state[plain], **counted(self._group_of(weight), self._counts)}
        if not inside:
            return
        shown = self._state[weight]
        for name, value in self._numbers.show(inside, shown).items():
            if not isinstance(value, Tensor) or not value.dim() or not is_spread(weight):
                shown[name] = value
            elif value.shape != plain.shape:
                raise NeedsWholeWeights(
                    f"the optimizer '{self._groups[0]['use'].name}' cannot be sharded",
                    f"its state '{name}' of shape {list(value.shape)} does not follow a parameter's "
                    f"{list(plain.shape)}, so no other layout could read it",
                    'paceline_scope = "parameter" on its factory, or plan.dp_shard = 1',
                )
            elif name not in shown or local_of(shown[name]).data_ptr() != value.data_ptr():
                shown[name] = wrapped(value, weight)


class WholePart:
    """A rule that needs a whole parameter, for one sharded parameter. Every rank computes the same update."""

    def __init__(self, group: ParameterGroup, weight: nn.Parameter, state: Any) -> None:
        assert is_spread(weight)
        self._group, self._weight, self._state, self._numbers = group, weight, state, RuleNumbers()
        self._plain = nn.Parameter(_stand_in(weight))
        self._worker = made(group["use"], group["lr"], [{**options(group), "params": [self._plain]}])
        self._cutter: Cutter | None = None
        self.known = knows_fresh_state(self._worker)

    def step(self) -> None:
        """Update the weight if it has a gradient. Every rank that holds a part of it calls it."""
        weight, plain, worker = self._weight, self._plain, self._worker
        if weight.grad is None:
            return
        worker.param_groups[0].update(options(self._group))
        plain.data, plain.grad = whole_of(weight.detach()), whole_of(weight.grad)
        held = self._state.get(weight, {})
        if held:
            numbers = self._numbers.read(held)
            go_on(worker.param_groups[0], numbers)
            worker.state[plain] = of_weight({n: numbers[n] if n in numbers else whole_of(v) for n, v in held.items()})
        worker.step()
        local_of(weight.detach()).copy_(self._cut(plain.data))
        self._keep(worker.state.pop(plain, {}))
        plain.data, plain.grad = _stand_in(weight), None

    def begin(self, weight: nn.Parameter) -> None:
        """Give the parameter a state to load into."""
        whole = nn.Parameter(torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device))
        self._keep(fresh_state(self._worker, self._worker.param_groups[0], whole))

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Keep this rank's part of what has the parameter's shape, and the rest as it is."""
        state = {**state, **counted(self._worker.param_groups[0], self._group["use"].counts)}
        if not state:
            return
        held = self._state[self._weight]
        for name, value in self._numbers.show(state, held).items():
            cut = isinstance(value, Tensor) and value.dim() > 0 and value.shape == self._weight.shape
            kept = wrapped(self._cut(value), self._weight) if cut else value
            if isinstance(held.get(name), Tensor):
                local_of(held[name]).copy_(local_of(kept))
            else:
                held[name] = kept

    def _cut(self, whole: Tensor) -> Tensor:
        self._cutter = self._cutter or Cutter(self._weight)
        return self._cutter.cut(whole)


def options(group: ParameterGroup) -> ParameterGroup:
    """Return a group's options without those of our own, which the optimizer inside does not know."""
    return {name: value for name, value in group.items() if name not in OURS}


def _plain(weight: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter over this rank's part of a weight, the weight itself where it is whole."""
    if not is_spread(weight):
        return weight
    return nn.Parameter(local_of(weight.detach()).detach())


def _stand_in(weight: nn.Parameter) -> Tensor:
    """Return a tensor of a parameter's whole shape that takes the memory of one element."""
    return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)

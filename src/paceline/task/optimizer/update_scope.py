"""What an update depends on, found out by trying: an element alone, its whole parameter, or other parameters too."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError, PacelineError
from paceline.spec.optimizers import Use
from paceline.task.optimizer.eager import eager

# More than 4,096 elements of a matrix: from there on 8-bit optimizers keep their state in blocks. Cuts are uneven, and
# below that. A vector is short, since some rules invert a matrix as wide as it.
MATRIX, VECTOR = (96, 64), (333,)
# Rules that factor moments, or precondition, do so from 128 rows on; kernels and stacks of experts have rules of their
# own, or the same for all that has more than two dimensions.
MORE_SHAPES = ((160, 144), (6, 24, 16), (24, 16, 3, 3))
# For the many steps of a rule that needs whole parameters: one of two has less than two thirds of the norm of both.
SMALL_MATRICES, SMALL_VECTOR = ((24, 16), (40, 16)), (30,)
CUTS = {  # by shape: (sizes, dimension)
    MATRIX: [((37, 59), 0), ((41, 23), 1)], VECTOR: [((111, 222), 0)], (160, 144): [((61, 99), 0)],
    (6, 24, 16): [((2, 4), 0), ((7, 17), 1)], (24, 16, 3, 3): [((9, 15), 0)],
}  # fmt: skip
STEPS = 3
MORE_STEPS = 32  # of what looks element by element: preconditioners wait for some twenty steps, slow weights for five
LR = 1e-2
TOLERANCE = 1e-4  # of the largest change, in fp32; what depends on other elements differs in the first digits
# Sizes of gradients, each half as large again as the one before: a bound on a norm, as of rules that skip or tame a
# spike, lies between that of a part and that of its whole at one of them, wherever it is.
LADDER = tuple(1e-3 * 1.5**rung for rung in range(46))  # up to 8e4
LAST_PLACES = 2e-6  # of weights of the ladder, which are near 1: smaller changes are rounding
SAME_RATE = 1e-6  # of a learning rate that an optimizer keeps in a tensor of fp32

UpdateOnce = Callable[[Use, Sequence[Tensor]], list[Tensor]]


def scope_known(use: Use) -> Use:
    """Return the optimizer with its scope: from its rule, else as its factory declares, else as a trial shows.

    Of one that is tried it is also known which numbers of its groups it counts in. Raises ConfigError for an optimizer
    that cannot be made, draws random numbers (each rank would draw its own), or keeps what no checkpoint has.
    """
    if use.scope:
        return use
    asked = _Asked(use, use.factory, tuple((name, type(each), each) for name, each in sorted(use.arguments.items())))
    try:
        hash(asked)
    except TypeError:  # a list, or an object of the user's
        return _tried(use)
    known = _tried_once(asked)
    return dataclasses.replace(use, scope=known.scope, counts=known.counts)


@dataclass(frozen=True)
class _Asked:
    """An optimizer with its arguments: what a trial of it depends on."""

    use: Use = field(compare=False)
    factory: Any
    arguments: tuple[tuple[str, type, Any], ...]


@functools.lru_cache(maxsize=16)  # a proof asks for the optimizer of the task in each part of it, as each start does
def _tried_once(asked: _Asked) -> Use:
    return _tried(asked.use)


def made(use: Use, lr: float, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    """Return an optimizer over groups of plain tensors. Raises ConfigError where it cannot be made, or is none."""
    given = [_members(group, lr) for group in groups]  # torch makes a group of the very dictionary
    try:
        optimizer = eager(use.factory)(groups, lr=lr, **use.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"the optimizer '{use.name}' cannot be made", f"{type(error).__name__}: {error}",
            "task.optimizer.arguments holds what it takes beside `params` and `lr`",
        ) from error  # fmt: skip
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"task.optimizer.name = '{use.name}' returned a {type(optimizer).__name__}",
            "it must return a torch.optim.Optimizer over the groups that it gets", "return the optimizer",
        )  # fmt: skip
    _require_groups(use, given, [_members(group, lr) for group in optimizer.param_groups])
    return optimizer


def _members(group: Mapping[str, Any], lr: float) -> tuple[list[int], float]:
    rate = group.get("lr")
    return [id(weight) for weight in group["params"]], float(rate if isinstance(rate, Tensor | int | float) else lr)


def _require_groups(use: Use, given: list[tuple[list[int], float]], has: list[tuple[list[int], float]]) -> None:
    """Raise ConfigError for an optimizer that has regrouped its parameters, or has learning rates of its own making.

    Every step sets the rates of the groups by the schedule, and so would take the optimizer's own away.
    """
    if [members for members, _ in given] != [members for members, _ in has]:
        because = f"it was given {len(given)}, and has {len(has)}, or has other parameters in them"
    elif not all(math.isclose(one, other, rel_tol=SAME_RATE) for (_, one), (_, other) in zip(given, has, strict=True)):
        because = "its groups begin with other learning rates than it was given, which every step sets by the schedule"
    else:
        return
    raise ConfigError(
        f"the optimizer '{use.name}' makes parameter groups of its own", because,
        "lr_scale and weight_decay in task.optimizer.groups, by names of parameters; or factors within step()",
    )  # fmt: skip


def _tried(use: Use) -> Use:
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(MATRIX, generator=generator), torch.randn(VECTOR, generator=generator)
    try:
        _changes(use, [vector])
        wholes = [matrix, vector]
    except (RuntimeError, ValueError):  # ConfigError is one: it takes matrices alone
        wholes = [matrix, torch.randn(MATRIX, generator=generator)]
    try:
        alone = [change for whole in wholes for change in _changes(use, [whole])]
    except PacelineError:
        raise
    except Exception as error:  # whatever an optimizer of the user's raises
        raise _no_step(use, f"on a matrix, in one process: {type(error).__name__}: {error}") from error
    if not _same(alone, [change for whole in wholes for change in _changes(use, [whole], seed=1)]):
        raise ConfigError(
            f"the optimizer '{use.name}' draws random numbers in its update", "ranks would draw different ones",
            "an option of it that turns this off, or another optimizer",
        )  # fmt: skip
    use = dataclasses.replace(use, counts=_counts(use, wholes))
    _require_resumable(use, wholes)
    return dataclasses.replace(use, scope=_widest(use, wholes, generator))


def _widest(use: Use, wholes: Sequence[Tensor], generator: torch.Generator) -> str:
    """Return the widest scope that any run shows."""
    scope = _scope(use, wholes, _few)
    # What looks element by element costs little, and may do otherwise from some size of a parameter on.
    values = _small(use, wholes, generator) if scope == "parameter" else wholes
    scope = _scope(use, values, _many, at_least=scope)
    with contextlib.suppress(RuntimeError, ValueError):  # it stops at large gradients, or its matrices have no inverse
        scope = _scope(use, values, _ladder, at_least=scope)
    for whole in _more_shapes(use, generator) if scope == "element" else ():
        scope = _scope(use, [whole], _few, at_least=scope)
    return scope


def _small(use: Use, wholes: Sequence[Tensor], generator: torch.Generator) -> Sequence[Tensor]:
    """Return values of fewer elements than the wholes have, or the wholes where the optimizer does not take so few."""
    shapes = SMALL_MATRICES if wholes[1].dim() > 1 else (SMALL_MATRICES[0], SMALL_VECTOR)
    small = [torch.randn(shape, generator=generator) for shape in shapes]
    try:
        for value in small:
            _changes(use, [value], MORE_STEPS)
    except (RuntimeError, ValueError):  # ConfigError is one
        return wholes
    return small


def _more_shapes(use: Use, generator: torch.Generator) -> list[Tensor]:
    """Return values of further shapes, of those that the optimizer takes."""
    found = []
    for shape in MORE_SHAPES:
        whole = torch.randn(shape, generator=generator)
        with contextlib.suppress(RuntimeError, ValueError):  # ConfigError is one
            _changes(use, [whole])
            found.append(whole)
    return found


def _scope(use: Use, wholes: Sequence[Tensor], run: UpdateOnce, at_least: str = "element") -> str:
    """Return what the updates of a run depend on, which gives the changes of each parameter as [looks, ...].

    What is known to be so already is `at_least`: no further look could tell less.
    """
    if at_least == "model":
        return "model"
    alone = [change for whole in wholes for change in run(use, [whole])]
    if not _same_in_each(alone, run(use, wholes)):
        return "model"
    if at_least == "parameter":
        return "parameter"
    for whole, change in zip(wholes, alone, strict=True):
        for sizes, dimension in CUTS[tuple(whole.shape)]:
            try:
                parts = run(use, list(whole.split(sizes, dimension)))
            except (RuntimeError, ValueError):  # it wants more of a parameter than a part of it
                return "parameter"
            if not _same_in_each([torch.cat(parts, 1 + dimension)], [change]):
                return "parameter"
    return "element"


def _few(use: Use, values: Sequence[Tensor]) -> list[Tensor]:
    return [change[None] for change in _changes(use, values, STEPS)]


def _many(use: Use, values: Sequence[Tensor]) -> list[Tensor]:
    return [change[None] for change in _changes(use, values, MORE_STEPS)]


def _ladder(use: Use, values: Sequence[Tensor]) -> list[Tensor]:
    """Return how each of some steps changes parameters, by gradients that grow: [steps, ...] for each of them.

    Weights go back after each step, so that small changes are seen beside large ones.
    """
    weights, changes = _weights(values), [list[Tensor]() for _ in values]
    optimizer = made(use, LR, [{"params": weights}])
    for rung, size in enumerate(LADDER):
        _step(use, optimizer, weights, values, range(rung, rung + 1), size)
        for weight, value, found in zip(weights, values, changes, strict=True):
            found.append((weight.detach() - value).nan_to_num(posinf=0.0, neginf=0.0))
            weight.data.copy_(value)
    return [torch.stack(found) for found in changes]


def _counts(use: Use, wholes: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the numbers of a parameter group that updates change."""
    weights = _weights(wholes)
    optimizer = made(use, LR, [{"params": weights}])
    before = numbers_in(optimizer.param_groups[0])
    _step(use, optimizer, weights, wholes, range(STEPS))
    return tuple(name for name, value in numbers_in(optimizer.param_groups[0]).items() if before.get(name) != value)


def numbers_in(kept: Mapping[str, object]) -> dict[str, object]:
    """Return what of a state or a group is a number of Python's."""
    return {name: value for name, value in kept.items() if isinstance(value, bool | int | float)}


def _require_resumable(use: Use, wholes: Sequence[Tensor]) -> None:
    """Raise ConfigError for an optimizer whose updates a checkpoint would change: it lacks what they follow from."""
    weights = _weights(wholes)
    optimizer = made(use, LR, [{"params": weights}])
    _step(use, optimizer, weights, wholes, range(STEPS))
    again = _weights(weights)
    resumed = made(use, LR, [{"params": again}])
    counts = {name: optimizer.param_groups[0][name] for name in use.counts}
    resumed.param_groups[0].update(counts)
    for weight, other in zip(weights, again, strict=True):
        for name, value in optimizer.state.get(weight, {}).items():
            if not isinstance(value, Tensor | bool | int | float | None):
                raise _not_kept(use, f"its state '{name}' is a {type(value).__name__}, no tensor and no number")
        resumed.state[other] = copy.deepcopy(optimizer.state.get(weight, {}))
    begun = {name: copy.deepcopy(value) for name, value in vars(resumed).items() if isinstance(value, int | float)}
    for weights_of, each in ((weights, optimizer), (again, resumed)):
        _step(use, each, weights_of, wholes, range(STEPS, MORE_STEPS))
    if not _same(again, weights):
        changed = [name for name, value in begun.items() if getattr(resumed, name, value) != value]
        raise _not_kept(use, f"it follows what it keeps beside its state, such as {', '.join(changed) or 'attributes'}")


def _no_step(use: Use, because: str) -> ConfigError:
    return ConfigError(
        f"the optimizer '{use.name}' makes no step",
        because,
        "an optimizer that takes the gradients as they are: a step computes its loss once, and has summed them over"
        " all ranks",
    )


def _not_kept(use: Use, because: str) -> ConfigError:
    return ConfigError(
        f"the optimizer '{use.name}' cannot go on from a checkpoint",
        because,
        "tensors and numbers in self.state[parameter], or numbers in its groups: these are saved",
    )


def _changes(use: Use, values: Sequence[Tensor], steps: int = STEPS, seed: int = 0) -> list[Tensor]:
    """Return how some steps of one optimizer change parameters of these values, by gradients made of them."""
    weights = _weights(values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _step(use, made(use, LR, [{"params": weights}]), weights, values, range(steps))
    return [(weight - value).detach() for weight, value in zip(weights, values, strict=True)]


def _weights(values: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format)) for value in values]


def _step(
    use: Use,
    optimizer: torch.optim.Optimizer,
    weights: Sequence[nn.Parameter],
    values: Sequence[Tensor],
    steps: range,
    size: float = 1.0,
) -> None:
    """Make steps of an optimizer, by gradients of a size that follow from values and the number of the step."""
    for step in steps:
        for weight, value in zip(weights, values, strict=True):
            weight.grad = size * torch.sin((7 + step) * value) * (1 + value.abs())
        try:
            optimizer.step()
        except (RuntimeError, ValueError):  # it wants parameters of another shape, perhaps
            raise
        except Exception as error:  # whatever an optimizer of the user's raises
            raise _no_step(use, f"step() without a closure: {type(error).__name__}: {error}") from error


def _same_in_each(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether changes of parameters are the same in each of the looks along their first dimension."""
    return _same([look for each in ours for look in each], [look for each in theirs for look in each], LAST_PLACES)


def _same(ours: Sequence[Tensor], theirs: Sequence[Tensor], least: float = 0.0) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max() + least) for a, b in pairs)

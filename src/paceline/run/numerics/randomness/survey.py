"""A look at a program: which dimension of each random tensor counts samples.

The objective runs twice without gradients, on two samples and on three, or on other numbers where it takes no such.
What grows with them belongs to them; what does not is shared by all. No shape alone could tell: with one sample, or
where two lengths are equal, all look alike. A program that takes one number of samples alone can be looked at only
once, which tells whether and where it draws, but not for whom.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import ConfigError
from paceline.run.numerics.nested import leaves_of
from paceline.run.numerics.randomness.attributes_kept import attributes_kept
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.others import Others
from paceline.run.numerics.randomness.shares import Pattern, SampleRows, Share
from paceline.run.numerics.randomness.sites import Site, site_of_caller, where
from paceline.run.numerics.randomness.weights_kept import WeightsKept
from paceline.task.entries_read import tried_reading
from paceline.task.models.held import buffers_kept

FEW, MORE = 2, 3  # samples of the two looks
EVEN = 4  # the second number for a program that takes even ones alone
SurveyedObjective = Callable[[nn.Module, Any], Any]


class _Observer(SampleRandomness):
    """Notes the shapes of random tensors by site, whatever they are, and what is drawn past it."""

    def __init__(
        self, device: torch.device, count: int, generators: dict[torch.Generator, Tensor], reads: Collection[Site] = ()
    ) -> None:
        super().__init__(0, device, Survey())
        self.count, self._generators = count, generators
        self.shapes: dict[Site, list[tuple[int, ...]]] = {}
        self.numbers: dict[Site, list[dict[str, float]]] = {}  # with which operators were called
        self.apart: dict[Site, list[tuple[int, ...]]] = {}  # shapes of what came from generators of the program's own
        self.began: dict[torch.Generator, Tensor] = {}  # those generators, and where they stood at first
        self.strays: dict[str, str] = {}
        self.modules: set[type] = set()
        self.moved: list[str] = []  # generators that are not torch's, and drew
        self.read: dict[Site, list[Tensor | None]] = {site: [] for site in reads}  # what functions there were given
        self._given: Tensor | None = None

    @property
    def draws(self) -> bool:
        """Whether anything was drawn."""
        return bool(self.shapes or self.apart or self.strays or self.moved)

    def stray(self, name: str, because: str) -> None:
        self.strays.setdefault(name, because)

    def _share(self, shape: tuple[int, ...], device: torch.device) -> Share:
        modules: list[object] = []
        site = site_of_caller(modules.append)
        self.shapes.setdefault(site, []).append(shape)
        if site in self.read:
            self.read[site].append(self._given)
        self.modules.update(type(module) for module in modules[:1] if module is not None)
        if modules == [None]:
            self.stray(where(site), "a function that is run again in the backward pass, and no module in it, draws")
        return Share(None, shape, None)

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> object:
        if self.read:
            tensors = (each.detach() for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            self._given = next(tensors, None)
        try:
            return super()._drawn(func, args, kwargs)
        finally:
            self._given = None

    def calls(self, numbers: dict[str, float]) -> None:
        self.numbers.setdefault(site_of_caller(), []).append(numbers)

    def draws_apart(self, generator: torch.Generator) -> None:
        self.began.setdefault(generator, generator.get_state())
        self._generators.setdefault(generator, self.began[generator])

    def drew_apart(self, out: object) -> None:
        shapes = [tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.apart.setdefault(site_of_caller(), []).extend(shapes)


@dataclass(frozen=True)
class _LookedAt:
    """A program to look at, and all that its looks move and that is put back."""

    model: nn.Module
    batch: Any
    device: torch.device
    generators: dict[torch.Generator, Tensor] = field(default_factory=dict)  # its own, and where they stood

    def look(
        self, objective: SurveyedObjective, count: int, batch: object = None, reads: Collection[Site] = ()
    ) -> _Observer:
        """Return what is seen where the objective runs on so many samples, all the same unless a batch is given.

        What functions that draw are given is kept for the sites in `reads` alone: it is as large as activations.
        """
        observer = _Observer(self.device, count, self.generators, reads)
        others = Others(self.model)
        with observer.during(SampleRows(np.arange(count), 0)):
            objective(self.model, repeated(self.batch, count) if batch is None else batch)
        observer.moved = others.moved()
        return observer

    def first_look(self, objective: SurveyedObjective, count: int) -> tuple[_Observer, tuple[str, ...]]:
        """Return what `look` sees, and the entries of the batch that the objective did not read."""
        return tried_reading(objective, lambda what: self.look(what, count))

    @contextlib.contextmanager
    def left_as_it_is(self, objective: SurveyedObjective) -> Iterator[None]:
        """Put weights, buffers, gradients, random states and what else the program holds back at the end."""
        grads = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        others = Others(self.model)
        try:
            devices = [self.device] if self.device.type == "cuda" else []
            with contextlib.ExitStack() as kept:
                held = kept.enter_context(attributes_kept(self.model, objective))
                kept.enter_context(buffers_kept(self.model))
                kept.enter_context(WeightsKept(self.model, held.tensors))
                kept.enter_context(torch.random.fork_rng(devices=devices))
                yield
        finally:
            others.restore()
            for generator, state in self.generators.items():
                generator.set_state(state)
            for parameter, grad in grads:  # an objective may go backward itself
                parameter.grad = grad


def survey(model: nn.Module, objective: SurveyedObjective, batch: object, device: torch.device) -> Survey:
    """Return what two looks at `objective(model, batch)` tell of its random numbers; only one, where it draws none.

    The first dimension of the batch's tensors counts samples. Weights, buffers and random states are left as they were.
    """
    program = _LookedAt(model, batch, device)
    with program.left_as_it_is(objective):
        return _surveyed(program, objective)


def _surveyed(program: _LookedAt, objective: SurveyedObjective) -> Survey:
    """Return what is found by as many looks as it takes; `failed` says what the program said to the first of them."""
    failed = ""
    rows = rows_of_batch(program.batch)
    for few, more in dict.fromkeys(((FEW, MORE), (FEW, EVEN), (rows, 2 * rows))):
        try:
            one, unread = program.first_look(objective, few)
            other = program.look(objective, more) if one.draws else one
        except Exception as error:  # whatever a program says to other samples than its own
            if _is_of_compiler(error):
                raise _compiles_itself(error) from error
            failed = failed or f"{type(error).__name__}: {error}"
            continue
        found = _concluded(one, other, length_of(program.batch))
        return replace(found, patterns=_side_by_side(program, objective, found), unread=unread, failed=failed)
    try:
        one, unread = program.first_look(objective, rows)
    except Exception:  # its first step will say it again
        return Survey(failed=failed, unseen=True)
    return replace(_of_one_look(one, failed), unread=unread)


def _side_by_side(program: _LookedAt, objective: SurveyedObjective, found: Survey) -> dict[Site, tuple[Pattern, ...]]:
    """Return the patterns, of which those are `apart` where a sample's own places along its dimension do not adjoin.

    Two looks at two samples, the second of which is another one in the second look, tell: of what a function that draws
    is given, its places have other numbers.
    """
    sites = [site for site, patterns in found.patterns.items() if any(_each(pattern) > 1 for pattern in patterns)]
    if not sites:
        return found.patterns
    two = repeated(program.batch, FEW)
    try:
        one, other = (program.look(objective, FEW, batch, sites).read for batch in (two, _with_another_second(two)))
    except Exception:  # whatever a program says to a row of other numbers
        return found.patterns
    return {
        site: tuple(
            replace(pattern, apart=_is_apart(pattern, one.get(site, []), other.get(site, []))) for pattern in patterns
        )
        for site, patterns in found.patterns.items()
    }


def _each(pattern: Pattern) -> int:
    """Return how many places of its dimension a sample has."""
    return 1 if pattern.dim is None else pattern.shape[pattern.dim] // pattern.rows


def _is_apart(pattern: Pattern, one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Return whether places of the second of two samples lie in steps of two, by what two looks have read."""
    each, dim = _each(pattern), pattern.dim
    if each == 1 or dim is None:
        return False
    size, changed = FEW * each, set[int]()
    for here, there in zip(one, other, strict=False):
        if here is None or there is None or here.shape != there.shape or here.dim() <= dim or here.shape[dim] != size:
            continue
        differs = (here != there).movedim(dim, 0).flatten(1).any(1)
        changed |= set(differs.nonzero().flatten().tolist())
    return bool(changed) and all(place % FEW for place in changed) and any(place < each for place in changed)


def _with_another_second(batch: object) -> object:
    """Return a batch of two samples with another second sample: numbers are moved, whole ones in another order."""

    def other(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != FEW:
            return leaf
        second = leaf[1:] + 0.5 if leaf.is_floating_point() or leaf.is_complex() else leaf[1:].flip(-1)
        return torch.cat((leaf[:1], second))

    return tree_map(other, batch)


def _is_of_compiler(error: Exception) -> bool:
    """Return whether torch's compiler raised an error: one of its own, or (torch 2.11) an assertion in its code."""
    names, trace = [type(error).__module__], error.__traceback__
    while trace is not None:
        names[1:] = [trace.tb_frame.f_globals.get("__name__", "")]  # of the innermost frame
        trace = trace.tb_next
    return any(name.startswith("torch._dynamo") for name in names)


def _compiles_itself(error: Exception) -> ConfigError:
    """Return the error for a program with compiled parts: torch's compiler does not work within a function mode."""
    return ConfigError(
        "the program compiles parts of itself with torch.compile",
        "the compiler cannot follow a forward pass in which random numbers belong to samples, "
        f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
        "the same program without torch.compile; plan.compile = true compiles its blocks",
    )


def _of_one_look(seen: _Observer, failed: str) -> Survey:
    """Return what is known of a program that takes so many samples and no others: whether and where it draws."""
    found = Survey(modules=_sorted(seen.modules), failed=failed)
    unknown = {where(site): found.why_unknown for site in (*seen.shapes, *seen.apart)}
    strays = {**seen.strays, **_beside(seen, seen), **unknown}
    return replace(found, strays=_told(strays))


def survey_all(
    model: nn.Module, objectives: Iterable[SurveyedObjective], batch: object, device: torch.device
) -> Survey:
    """Return what looks at several objectives of one model tell together."""
    found = [survey(model, objective, batch, device) for objective in objectives]
    sites = dict.fromkeys(site for one in found for site in one.patterns)
    patterns = {site: tuple(dict.fromkeys(p for one in found for p in one.patterns.get(site, ()))) for site in sites}
    strays = dict.fromkeys(stray for one in found for stray in one.strays)
    modules = dict.fromkeys(kind for one in found for kind in one.modules)
    unread = [name for name in found[0].unread if all(name in one.unread for one in found)]
    failed = next((one.failed for one in found if one.failed), "")
    unseen = any(one.unseen for one in found)
    return Survey(patterns, tuple(strays), tuple(modules), tuple(unread), failed, unseen)


def repeated(batch: object, count: int) -> object:
    """Return a batch of `count` samples: the first one again and again."""
    rows = rows_of_batch(batch)
    return tree_map(
        lambda leaf: (
            leaf[:1].expand(count, *leaf.shape[1:]).clone()
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
            else leaf
        ),
        batch,
    )


def rows_of_batch(batch: object) -> int:
    """Return the rows of a batch: the first dimension of its tensors."""
    return next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def length_of(batch: object) -> int | None:
    """Return the second dimension of a batch's first tensor that has one."""
    leaves = (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim() > 1)
    return next((leaf.shape[1] for leaf in leaves), None)


def _concluded(few: _Observer, more: _Observer, length: int | None) -> Survey:
    patterns: dict[Site, tuple[Pattern, ...]] = {}
    strays = {**few.strays, **more.strays, **_beside(few, more)}
    for site in few.shapes | more.shapes:
        patterns[site] = ()
        pairs = few.shapes.get(site, []), more.shapes.get(site, [])
        if len(pairs[0]) != len(pairs[1]):
            strays[where(site)] = "how often it draws depends on how many samples there are"
            continue
        found = [_pattern(few.count, more.count, *shapes, length) for shapes in zip(*pairs, strict=True)]
        if None in found:
            at = found.index(None)
            strays[where(site)] = (
                f"a random tensor of shape {list(pairs[0][at])} for {few.count} samples is {list(pairs[1][at])} for"
                f" {more.count}"
            )
        patterns[site] = tuple(dict.fromkeys(pattern for pattern in found if pattern is not None))
    for site, numbers in few.numbers.items():
        for one, other in zip(numbers, more.numbers.get(site, []), strict=False):
            if changed := [name for name in one if one[name] != other.get(name)]:
                name = changed[0]
                strays[where(site)] = (
                    f"{name} = {one[name]} for {few.count} samples is {other.get(name)} for {more.count}: it draws from"
                    " the samples of a micro-batch, which so see each other"
                )
    return Survey(patterns, _told(strays), _sorted(few.modules | more.modules))


def _beside(few: _Observer, more: _Observer) -> dict[str, str]:
    """Return what is drawn from other generators than torch's, unless they are set anew by what the program does."""
    strays = {name: "its numbers are not torch's" for name in few.moved if name in more.moved}
    for site, shapes in few.apart.items():
        if shapes != more.apart.get(site):
            strays[where(site)] = "it draws for samples from a generator of its own, which does not know them"
    for generator, state in few.began.items():
        if generator in more.began and not torch.equal(state, more.began[generator]):
            site = next(iter(few.apart), ())
            strays[where(site)] = "it draws from a generator of its own, which goes on with every micro-batch"
    return strays


def _told(strays: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}: {because}" for name, because in strays.items())


def _sorted(kinds: Iterable[type]) -> tuple[type, ...]:
    return tuple(sorted(kinds, key=lambda kind: kind.__qualname__))


def _pattern(few: int, more: int, one: tuple[int, ...], other: tuple[int, ...], length: int | None) -> Pattern | None:
    """Return the pattern of which these are instances for `few` samples and for `more`, None if there is none."""
    if len(one) != len(other):
        return None
    grown = [dim for dim, (here, there) in enumerate(zip(one, other, strict=True)) if here != there]
    if not grown:
        return Pattern(one, few, None, length)
    if len(grown) > 1 or one[grown[0]] * more != other[grown[0]] * few:
        return None
    return Pattern(one, few, grown[0], length)

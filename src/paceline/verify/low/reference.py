"""The reference in low precision: updates of one device (update.py), and how near is near enough."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.run.numerics.precision import COMPUTE_DTYPES, MASTER_DTYPES, scaler_for
from paceline.run.numerics.randomness.mode import Survey
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.optimizers import rounds_inside
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.models.sizes import is_named
from paceline.task.objective import BUILT_IN
from paceline.task.turns import turns_of
from paceline.verify.compare.diagnosis import traits_of
from paceline.verify.compare.measures import number_differences, tensor_differences
from paceline.verify.compare.tolerance import tolerance
from paceline.verify.low.choices import Choices, HandedChoices, Misrouted, misrouted, routed_blocks
from paceline.verify.low.going_on import Held, put_in
from paceline.verify.low.update import MASTER, Hyper, one_evaluation, one_update
from paceline.verify.reference.passes import own_parameters, reference_model, reference_randomness
from paceline.verify.rounding.conditioning import DRAWS, MARGIN, moved_by_one_ulp

HEADROOM = 8.0  # of the loss scale: ranks that add up in another order may overflow a little earlier
At = tuple[str, str]  # (quantity, name)


@dataclass(frozen=True)
class LowReference:
    """What one device computes, how far a layout may be off, and which formats are one device's own too."""

    numbers: Hyper
    allowed: dict[At, float]  # empty where numbers say nothing
    scale: float  # of the loss
    loss_dtype: torch.dtype
    coupled: bool  # whether rows of a batch see each other
    follows: bool  # whether numbers say something once tokens go where the layout sends them, and not before
    misrouted: tuple[Misrouted, ...] = ()

    @property
    def state_bits(self) -> dict[str, int]:
        """The fewest bits of any parameter's optimizer state, by its key."""
        return dict(self.numbers["state_bits"])

    def compares(self, quantity: str, name: str) -> bool:
        """Return whether a difference says anything: it has a bound, or one device has no such tensor."""
        is_extra = bool(self.allowed) and quantity in ("gradients", "weights") and name not in self.numbers[quantity]
        return (quantity, name) in self.allowed or is_extra

    def bound(self, quantity: str, name: str) -> float:
        """Return the largest relative difference that is none; of a tensor that one device lacks, hardly any."""
        return self.allowed.get((quantity, name), 1e-30)


@dataclass(frozen=True)
class _Given:
    """What one device is told of an update: its step, the scale of its loss, what a layout chose and holds."""

    step: int
    scale: float
    choices: Choices | None = None
    starts: Sequence[Held] = ()  # before each turn


@dataclass(frozen=True)
class LowDevice:
    """One device that computes updates of a task with the casts of a plan.

    `draws` are the times that it does so again from weights that are moved; with none, numbers that a layout rounds at
    other places are not compared.
    """

    task: Task
    plan: Plan
    source: Source
    items_per_sample: int
    draws: int = DRAWS

    def reference(self) -> LowReference:
        """Return what one device computes when it chooses experts itself, and how near a layout must come to that."""
        model = self._model()
        scaler = scaler_for(self.plan.precision)
        scale = scaler.scale if scaler else 1.0
        numbers = self._computed(_Given(1, scale))
        while scaler is not None and scale > scaler.smallest and not numbers["finite"]:
            scale /= 2
            numbers = self._computed(_Given(1, scale))
        if scaler is not None:
            scale = max(scaler.smallest, scale / HEADROOM)
            numbers = self._computed(_Given(1, scale))
        turns = turns_of(self.task, self.source.unit)
        coupled = any(is_coupled(model, turn.objective) for turn in turns)
        follows = _rounds_inside_layers(self.plan.layout) and bool(routed_blocks(model))
        family = isinstance(self.task.model, ModelSpec) and is_named(self.task.model.name)
        built_in = (self.task.objective == "auto" or self.task.objective in BUILT_IN) and not self.task.turns
        loss_dtype = MASTER if family and built_in else numbers["loss_dtype"]
        moved = [] if coupled or follows else [self._computed(_Given(1, scale), move) for move in self._draws()]
        allowed = {} if coupled or follows else self._allowed(numbers, moved)
        return LowReference(numbers, allowed, scale, loss_dtype, coupled, follows and len(turns) == 1 and not coupled)

    def following(self, known: LowReference, choices: Choices) -> LowReference:
        """Return the reference `known` computed again, each token sent to the experts that a layout has chosen."""
        return self._held_to(known, _Given(1, known.scale, choices))

    def going_on(
        self, known: LowReference, starts: Sequence[Held], step: int, scale: float, choices: Choices | None
    ) -> LowReference:
        """Return what one device computes in a later step, whose turns start from what a layout has before them.

        Where tokens go with the layout's they do so again. The optimizer's state is not looked at, so changes of
        weights are not compared.
        """
        later = self._held_to(known, _Given(step, scale, choices, starts))
        allowed = {at: most for at, most in later.allowed.items() if at[0] != "weights"}
        return dataclasses.replace(later, allowed=allowed if later.numbers["finite"] else {})

    def evaluated(self, held: Held, step: int, choices: Choices | None, reach: float = 0.0) -> tuple[float, float]:
        """Return the loss of a step's batch as evaluations measure it, at weights that a layout has, and a bound.

        The bound is relative to the loss, or to `reach` where the loss is smaller.
        The bound is infinite where the model has chosen experts in a way that is not known.
        """
        found = [self._evaluated(held, step, choices, move) for move in (0, *self._draws(handed=True))]
        expected, *others = (loss for loss, _ in found)
        squares = sum((other - expected) ** 2 for other in others) / max(1, len(others))
        by = math.sqrt(squares) / max(abs(expected), reach, 1e-300)
        known = all(is_known for _, is_known in found)
        return expected, max(tolerance("evaluation", "fp32"), MARGIN * by) if known else math.inf

    def _held_to(self, known: LowReference, given: _Given) -> LowReference:
        """Return what one device computes of what it is given, where it can be: else nothing is compared."""
        if known.follows and given.choices is None:
            return dataclasses.replace(known, allowed={}, misrouted=())
        numbers = self._computed(given)
        if given.choices is not None and numbers["scores"] is None:
            return dataclasses.replace(known, allowed={}, misrouted=())
        moved = [self._computed(given, move) for move in self._draws(handed=bool(given.starts))]
        scores = [one["scores"] for one in (numbers, *moved)]
        wrong = [] if given.choices is None else misrouted(given.choices, scores[0], scores[1:])
        allowed = self._allowed(numbers, moved, handed=bool(given.starts))
        return dataclasses.replace(known, numbers=numbers, allowed=allowed, misrouted=tuple(wrong))

    def _draws(self, handed: bool = False) -> range:
        """Return the numbers of the draws of moved weights: none where a layout makes one device's very products."""
        return range(1, self.draws + 1) if self._rounded_apart(handed) else range(0)

    def _evaluated(self, held: Held, step: int, choices: Choices | None, move: int) -> tuple[float, bool]:
        """Return the loss, and whether tokens went where they were told to."""
        model = self._model(held, move)
        handed = None if choices is None else HandedChoices(model, choices)
        loss = one_evaluation(model, self.task, self.plan, self.source, step, handed, self._looked)
        return loss, handed is None or handed.is_complete()

    def _model(self, held: Held | None = None, move: int = 0) -> nn.Module:
        model = reference_model(self.task, self.source, self.items_per_sample, MASTER)
        self._begin(model, held, move)
        return model

    def _begin(self, model: nn.Module, held: Held | None, move: int) -> None:
        """Have a model begin from what a layout holds, where that is given, and from moved weights where asked to."""
        if held is not None:
            put_in(model, held)
        if move:
            moved_by_one_ulp(model, COMPUTE_DTYPES[self.plan.precision], seed=move)

    def _computed(self, given: _Given, move: int = 0) -> Hyper:
        model = self._model(given.starts[0] if given.starts else None, move)
        handed = None if given.choices is None else HandedChoices(model, given.choices)
        later = [functools.partial(self._begin, model, held, move) for held in given.starts[1:]]
        program = (model, self.task, self.plan, self.source, self.items_per_sample)
        return one_update(*program, given.scale, handed, given.step, later, self._looked)

    def _allowed(self, numbers: Hyper, moved: Sequence[Hyper], handed: bool = False) -> dict[At, float]:
        """Return the differences allowed; `moved` are the numbers from moved weights, where they say anything."""
        rounded = self._rounded_apart(handed)
        allowed = _sums_alone(numbers)
        places = [at for at in allowed if at[1] in rounded or (rounded and at[0] == "grad_norm")]
        if places and self.draws:
            by = _moved(numbers, moved)
            allowed |= {at: max(allowed[at], MARGIN * by[at]) for at in places}
        allowed = {at: most for at, most in allowed.items() if self.draws or at not in places}
        if rounds_inside(self.task.optimizer):  # the last digit of a gradient decides how its update rounds
            allowed = {at: most for at, most in allowed.items() if at[0] != "weights"}
        counted = numbers["router"] if allowed else ()  # tokens that went where they were told to, or were free to
        return {("router", name): 0.0 for name in counted} | allowed

    def _rounded_apart(self, handed: bool) -> Collection[str]:
        """Return the names of the numbers that a layout rounds at other places than one device.

        Data axes and a pipeline make the very products of one device. But a weight on two stages has its gradients
        added in fp32, which on one device come together in the compute format. And what comes after a first objective's
        update sees weights that were cast anew from sums in another order, unless one device is `handed` them.
        """
        every, tied, later = self._names_apart
        if _rounds_inside_layers(self.plan.layout):
            return {"loss", "grad_norm", *every}
        return {*(tied if self.plan.layout.pp > 1 else ()), *(later if not handed else ())}

    @functools.cached_property
    def _looked(self) -> Survey:
        """What the program draws, by a look at a model of it."""
        objectives = [turn.objective for turn in turns_of(self.task, self.source.unit)]
        program = (self.task, self.plan, self.source, self._model(), objectives)
        return reference_randomness(*program, MASTER_DTYPES[self.plan.precision]).survey

    @functools.cached_property
    def _names_apart(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        """The names of all weights, of those of several uses, and of those of later turns than the first."""
        model = self._model()
        names = {parameter: name for name, parameter in model.named_parameters()}
        later = own_parameters(model, turns_of(self.task, self.source.unit))[1:]
        of_later = frozenset(names[weight] for weights in later for weight in weights)
        return frozenset(names.values()), frozenset(traits_of(model).tied), of_later


def _rounds_inside_layers(layout: Layout) -> bool:
    return max(layout.tp, layout.cp, layout.ep) > 1


def _sums_alone(numbers: Hyper) -> dict[At, float]:
    """Return the differences allowed to a layout that adds up the same products in fp32."""
    allowed = {at: tolerance(at[0], "fp32") for at in _places(numbers)}
    for name, coarse in numbers["stored"].items():
        allowed["weights", name] += coarse
    return allowed


def _moved(numbers: Hyper, others: Sequence[Hyper]) -> dict[At, float]:
    """Return how far each quantity is from what it was in others, by the root of the mean square."""
    alone = World(0, 1, 0, torch.device("cpu"))
    squares = dict.fromkeys(_places(numbers), 0.0)
    for other in others:
        found = number_differences(
            {name: other[name] for name in ("loss", "grad_norm")},
            {name: numbers[name] for name in ("loss", "grad_norm")}, 1, alone, numbers["reach"],
        )  # fmt: skip
        for kind in ("gradients", "weights"):
            found += tensor_differences(kind, other[kind], numbers[kind], 1, alone, Layout())
        for difference in found:
            squares[difference.quantity, difference.name] += difference.relative**2 / len(others)
    return {at: math.sqrt(square) for at, square in squares.items()}


def _places(numbers: Hyper) -> list[At]:
    tensors = [(kind, name) for kind in ("gradients", "weights") for name in numbers[kind]]
    return [("loss", "loss"), ("grad_norm", "grad_norm"), *tensors]

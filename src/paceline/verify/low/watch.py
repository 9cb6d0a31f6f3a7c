"""The watch of a layout in low precision: formats of what travels, is added up and rests, and what ranks decide."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from paceline.run.assemble import Assembled
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.passes import AnyObjective
from paceline.run.loop.step import StepStats
from paceline.run.numerics.invariants import numbers_of
from paceline.run.numerics.precision import COMPUTE_DTYPES
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.build import evaluating
from paceline.task.models.held import local_of
from paceline.task.models.moe import routers
from paceline.verify.compare.difference import Difference, DifferenceKind
from paceline.verify.low.choices import Choices, ChoicesSeen, disagreeing, joined, score_bits
from paceline.verify.low.reference import LowReference
from paceline.verify.low.update import MASTER
from paceline.verify.low.wire import CollectivesSeen, Finishing, Seen, held_in_less

BIAS = "e_score_correction_bias"


class Watch:
    """Runs steps of a layout and looks at formats and decisions."""

    def __init__(self, built: Assembled, plan: Plan, world: World, expected: LowReference) -> None:
        self.built, self.plan, self.world, self.expected = built, plan, world, expected
        self._compute = COMPUTE_DTYPES[plan.precision]
        self._overflows = False
        self._losses: set[torch.dtype] = set()
        self._chosen = ChoicesSeen(built.model, built.randomness, plan.layout, world.rank)
        self._score_bits = score_bits(built.model)
        self._wire = CollectivesSeen(MASTER, self._compute, _tensor_ranks(plan.layout, world.rank))
        built.stepper.gradients = Finishing(built.stepper.gradients, self._wire)
        if not expected.coupled:  # such an objective is told apart by its class
            built.stepper.wrap_objectives(self._seen)

    def _seen(self, objective: AnyObjective) -> AnyObjective:
        def seen(model: nn.Module, batch: object) -> tuple[torch.Tensor, object]:
            loss_sum, weight = objective(model, batch)
            self._losses.add(loss_sum.dtype)
            if self._overflows and loss_sum.requires_grad:
                loss_sum.register_hook(lambda gradient: gradient * math.inf)
            return loss_sum, weight

        return seen

    def step(self, stream: BatchStream, step: int, lr: float) -> StepStats:
        """Make a step, seen by the watch."""
        self._chosen.parts.clear()
        with self._wire:
            return self.built.stepper.step(stream.at((step - 1) * self.plan.batch_samples), lr)

    def evaluated(self, stream: BatchStream, step: int) -> float:
        """Return the mean loss of a step's batch as evaluations measure it. It leaves weights gathered."""
        self._chosen.parts.clear()
        batch = stream.at((step - 1) * self.plan.batch_samples)
        with evaluating(self.built.model), torch.no_grad():
            mine = self.built.stepper.passes.evaluate(batch.micro_batches)
        loss_sum, weight = self.world.sum(list(mine))
        return loss_sum / weight

    def choices(self, step: int) -> Choices | None:
        """Return the experts that all ranks chose in the step just made; None where those of a token are not known."""
        everyone = self.world.gather((self._chosen.length, dict(self._chosen.parts)))
        length = max(length for length, _ in everyone)  # a pipeline stage may have no experts
        return joined([parts for _, parts in everyone], self.plan, length, (step - 1) * self.plan.batch_samples)

    def formats(self, step: int, sum_bits: Mapping[str, int] | None = None) -> list[Difference]:
        """Return what is in a format of fewer bits than one device has it in, on any rank, in order of cause.

        `sum_bits` are those of the values of this rank's gradients: where all of a gradient has as few as one addend,
        and not on one device, micro-batches were added up in so few.
        """
        least = torch.finfo(self.expected.loss_dtype).bits
        small = {dtype for dtype in self._losses if torch.finfo(dtype).bits < least}
        mine = [Seen("the sum of losses", dtype) for dtype in sorted(small, key=str)]
        mine += held_in_less(self.built.model, self.built.optimizer, MASTER, self.expected.state_bits)
        scores = self.expected.numbers["score_bits"]
        few = [f"the scores of {name}" for name, bits in self._score_bits.items() if bits < scores[name]]
        mine += [Seen(f"{what}, by their values,", self._compute) for what in few]
        if not self.expected.coupled:  # rows that see each other are added up in the format of their activations
            mine += sorted(self._wire.wrong, key=str)
        sums = [f"the gradient of {name}" for name in self._few(sum_bits or {})]
        mine += [Seen(f"{what}, by its values,", self._compute) for what in sums]
        return [
            wrong_at(
                "dtype",
                f"{seen.what} is in {seen.dtype}, not {seen.wanted}",
                step,
                rank,
                "exchange" if seen.is_exchanged else "",
            )
            for rank, found in enumerate(self.world.gather(mine))
            for seen in found
        ]

    def _few(self, sum_bits: Mapping[str, int]) -> list[str]:
        """Return the names of gradients of which every rank has few bits, and one device has more."""
        if self.plan.accumulation == 1:
            return []
        everyone = self.world.gather(dict(sum_bits))
        expected = self.expected.numbers["sum_bits"]
        return [
            name
            for name, bits in sum_bits.items()
            if bits < expected.get(name, 0) and all(other.get(name, 0) <= bits for other in everyone)
        ]

    def decisions(self, stats: StepStats, step: int) -> list[Difference]:
        """Return the decisions that ranks have not taken alike."""
        scaler = self.built.stepper.scaler
        mine: dict[str, object] = {**numbers_of(stats, scaler.scale if scaler else None)}
        mine["the clean steps of the loss scale"] = scaler.clean_steps if scaler else 0
        everyone = self.world.gather({name: repr(value) for name, value in mine.items()})
        wrong = [(name, r) for r, other in enumerate(everyone) for name in other if other[name] != everyone[0][name]]
        chosen = self.world.gather(dict(self._chosen.parts))
        wrong += [("the experts that tokens go to", rank) for rank in disagreeing(chosen, self.plan.layout)]
        return [wrong_at("decision", f"{name}: ranks do not agree", step, rank) for name, rank in wrong]

    def overflow(self, stream: BatchStream, step: int, lr: float) -> list[Difference]:
        """Let gradients of one rank overflow, and return what the ranks have not decided alike: all must skip."""
        if self.expected.coupled:
            return []
        layout = self.plan.layout
        # The ranks of the last pipeline stage have the loss. Not the first of them: what only it knows would not show.
        last = [rank for rank in range(self.world.size) if layout.coordinates(rank)["pp"] == layout.pp - 1]
        self._overflows = self.world.rank == last[-1]
        before = {name: tensor.detach().clone() for name, tensor in self._state().items()}
        stats = self.step(stream, step, lr)
        self._overflows = False
        wrong = self.decisions(stats, step)
        if not wrong and any(self.world.gather(stats.updated)):
            wrong = [wrong_at("decision", "an overflow changed weights", step, 0)]
        changed = [name for name, tensor in self._state().items() if not torch.equal(tensor.detach(), before[name])]
        everyone = self.world.gather(changed[:1])
        return wrong or [
            wrong_at("decision", f"a step that was skipped changed {name}", step, rank)
            for rank, found in enumerate(everyone)
            for name in found
        ]

    @torch.no_grad()
    def _state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of all that an update changes, by name; other buffers belong to forward passes."""
        model, optimizer = self.built.model, self.built.optimizer
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        held = {name: local_of(parameter) for parameter, name in names.items()}
        held |= {f"{name}.{BIAS}": router.e_score_correction_bias for name, router in routers(model).items()
                 if router.e_score_correction_bias is not None}  # fmt: skip
        for parameter, state in optimizer.state.items():
            own = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            held |= {f"the optimizer's {key} of {names[parameter]}": local_of(value) for key, value in own.items()}
        return held


def wrong_at(quantity: str, name: str, step: int, rank: int, kind: DifferenceKind = "") -> Difference:
    """Return a difference that has no size."""
    return Difference(quantity, name, step, rank, math.inf, math.nan, 0.0, 0.0, kind=kind)


def _tensor_ranks(layout: Layout, rank: int) -> list[int]:
    """Return the ranks that differ from a rank by their place on `tp` alone; none where it is the only one."""
    place = {**layout.coordinates(rank), "tp": 0}
    ranks = [other for other in range(layout.devices) if {**layout.coordinates(other), "tp": 0} == place]
    return ranks if len(ranks) > 1 else []

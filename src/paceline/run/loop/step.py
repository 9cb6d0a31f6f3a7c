"""The step: one optimizer update on one global batch, exact whatever the layout.

The objective gives a sum of losses and the weight (the number of items) it is over. With L and W the sums over all
ranks and micro-batches, the step's loss is L / W and its gradient is the gradient of L divided by W. W is known only
after the forward passes, so the backward passes run on the loss divided by the power of two nearest to the
expected weight (exact in floating point, and of the right size for low precision), and one factor, which also
carries the clipping, corrects the summed gradients. A step of several objectives does this once for each of them, in
turn (task/turns.py).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from paceline.errors import NothingToLearn, NumericalStop
from paceline.run.loop.clock import PhaseClock
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.passes import AnyObjective, Passes
from paceline.run.loop.routing import RouterStats, RouterWatch
from paceline.run.loop.turns import StepTurn
from paceline.run.numerics.host_numbers import NumbersOnTheWay, one_vector
from paceline.run.numerics.norm import norm_of
from paceline.run.numerics.precision import LossScaler
from paceline.run.parallel.expert.slots import ExpertSlots
from paceline.run.parallel.gradients import Gradients
from paceline.run.process.world import World
from paceline.run.replicas.copy_sync import CopySync, StepTotals
from paceline.run.survive.buffers import BuffersBefore
from paceline.run.survive.health.guard import UpdateGuard
from paceline.run.survive.last_update import LastUpdate
from paceline.run.survive.listener import refuse_ended_groups
from paceline.run.survive.points import nowhere
from paceline.run.updates.growth import BatchGrowth
from paceline.run.updates.optimizer import Names
from paceline.run.updates.rates import ScheduledRates
from paceline.run.updates.update_protocols import StepWatch, Updates
from paceline.spec.plan import Plan
from paceline.spec.steps.update import GroupSpec
from paceline.task.models.held import buffers_kept, is_spread, local_of
from paceline.task.optimizer.groups import frozen_groups, group_of
from paceline.task.plain_names import named_parameters

DONE_FIRST = 0.05  # of what the host did while the device computed: a shorter wait after it is none
CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping equals torch's to the last digits


@dataclass(frozen=True)
class TurnStats:
    """What one turn of a step did, over all ranks."""

    loss: float  # mean per item
    weight: float  # items
    grad_norm: float  # of its own parameters, before clipping
    updated: bool


@dataclass(frozen=True)
class StepStats:
    """What one step did, over all ranks."""

    step: int
    position_before: int
    position_after: int
    loss: float  # mean per item
    weight: float  # items
    grad_norm: float  # global, before clipping
    lr: float
    # Phases of rank 0; `total` is their sum. On CUDA `optimizer` is the last step's: nobody waits for this one's.
    seconds: dict[str, float]
    updated: bool  # False where an fp16 overflow, or the run's policy, left the update out
    stop_requested: bool  # any rank asked to stop
    router: RouterStats | None = None  # of a model with experts
    # Of `forward_backward` and `reduce`, what rank 0 waited in: for peers, or for its core. None where unknown (CUDA).
    waiting_seconds: float | None = None
    turns: Mapping[str, TurnStats] = field(default_factory=dict)  # of a task of several objectives, in their order
    # On CUDA: for how long the device had nothing to do before this step, and the host waited for the device within it.
    idle_seconds: float | None = None
    awaited_seconds: float | None = None
    held_seconds: float | None = None  # what the host did while the device computed, where the device was done first


@dataclass(frozen=True)
class _Made:
    """One update: what it did, and what the ranks told each other on the way."""

    stats: TurnStats
    stop_requested: bool
    router: RouterStats | None


class _PassTotals(NamedTuple):
    """What ranks told each other of the passes of a turn: sums over them, of this rank's sums and numbers."""

    loss: float
    weight: float
    squares: float  # of the norm of the gradients
    stop: float
    short: float  # layers whose experts had fewer slots than rows
    routed: tuple[torch.Tensor, list[float]]  # what routers did: on the device, and the same on the host


@dataclass
class Stepper:
    """Runs steps of one assembled model.

    Between steps it keeps the loss scale, and what ranks that have lost a peer ask of the broken step: its buffers from
    before the passes, and whether its update was made.
    """

    model: nn.Module
    turns: Sequence[StepTurn]  # a task of one objective has one
    optimizer: torch.optim.Optimizer
    gradients: Gradients
    scaler: LossScaler | None
    plan: Plan
    world: World
    items_per_sample: int
    clip_norm: float
    sync: CopySync
    updater: Updates  # changes the weights: the optimizer, or who makes its steps
    main: int = 0  # the turn that is evaluated, and whose loss is the step's
    # Called with the complete gradients' factor before they are scaled; `verify` looks at gradients here.
    observe: Callable[[float], None] | None = None
    routing: RouterWatch | None = None
    slots: ExpertSlots | None = None  # for rows that go to other ranks' experts, where the plan has any
    # Called with each phase and the step's number as a step comes to it; run/survive/points.py has who is told.
    reached: Callable[[str, int], None] = nowhere
    guard: UpdateGuard | None = None  # decides on updates, where a run's policy is not to stop at once
    growth: BatchGrowth | None = None  # says how large batches are, where they grow
    # Parameters that more than one pipeline stage holds, and how many do.
    stages_holding: Mapping[nn.Parameter, int] = field(default_factory=dict)

    names: Names = field(default_factory=dict)  # all names of each parameter of the whole model, by any of them
    groups: Sequence[GroupSpec] = ()  # of parameters, some of which may stay as they are in some steps
    freezes: bool = False  # whether they do: a proof trains all of them
    leaves_out: bool = False  # the update of the next step
    health: StepWatch | None = None  # looks at gradients and updates of some steps

    def __post_init__(self) -> None:
        self._copies = {p: self.copies_of(p) for turn in self.turns for p in turn.parameters}
        self._others = {turn.turn.name: self._copies.keys() - turn.parameters for turn in self.turns}
        self._clock = PhaseClock(self.world.device)
        self._groups_of = {weight: group_of(self.groups, self.names.get(name, (name,)))
                           for name, weight in named_parameters(self.model)}  # fmt: skip
        self._awaited_seconds = self._held_seconds = 0.0
        self.is_whole = True  # False within an update: the state is of no step
        self.last_update = LastUpdate(self.world.device)
        self.buffers, self.rates = BuffersBefore(self.model), ScheduledRates()
        self._is_refused = False  # whether an update of the step was left out: by the guard, a callback, an overflow

    @property
    def passes(self) -> Passes:
        """The passes of the objective that is evaluated."""
        return self.turns[self.main].passes

    def wrap_objectives(self, wrapper: Callable[[AnyObjective], AnyObjective]) -> None:
        """Call `wrapper(objective)` in the place of every objective from now on; a proof looks at losses there."""
        for turn in self.turns:
            turn.passes.wrap_objective(wrapper)

    def step(
        self, batch: StepBatch, lr: float, stop_requested: bool = False, while_busy: Callable[[], None] | None = None
    ) -> StepStats:
        """Make one update and return what it did. `while_busy` runs on the host while the device computes.

        The host waits for the device once for each objective, for the sums over all ranks that decide on the update;
        where these say that experts had fewer slots than rows, the passes are made again (parallel/expert/slots.py).
        Raises NumericalStop, before the weights that it is of change, where a loss or a gradient norm is not finite.
        """
        self._clock.begin()
        # Those that are left of a broken step go on from before it, and so does a run that leaves the batch out.
        may_leave_out = self.leaves_out or self.scaler is not None or (self.guard and self.guard.may_leave_out)
        if self.world.size > 1 or may_leave_out:
            self.buffers.begin()
        self._is_refused = False
        if self.health is not None:
            self.health.begin(batch.step)
        self._awaited_seconds = self._held_seconds = 0.0
        on_cuda = self.world.device.type == "cuda"
        made: dict[str, _Made] = {}
        for turn in self.turns:
            if turn.turn.is_due(batch.step):
                made[turn.turn.name] = self._make(turn, batch, lr, stop_requested, while_busy)
                while_busy = None
        if self._is_refused and not any(one.stats.updated for one in made.values()):
            self.buffers.put_back()  # running statistics that the passes have moved
        self.sync.after_update(batch.step)
        self.last_update.launched()
        self.is_whole = True
        self.buffers.end()
        self._clock.mark("optimizer")
        main = made[self.turns[self.main].turn.name]
        waiting, seconds = self._clock.waiting_seconds("forward_backward", "reduce"), self._clock.take_seconds()
        return StepStats(
            step=batch.step,
            position_before=batch.position,
            position_after=batch.position + batch.samples,
            loss=main.stats.loss,
            weight=main.stats.weight,
            grad_norm=main.stats.grad_norm,
            lr=lr,
            waiting_seconds=waiting,
            seconds=seconds,
            updated=any(one.stats.updated for one in made.values()),
            stop_requested=main.stop_requested,
            router=main.router,
            turns={name: one.stats for name, one in made.items() if name},
            idle_seconds=self._clock.idle_seconds(),
            awaited_seconds=self._awaited_seconds if on_cuda else None,
            held_seconds=self._held_seconds if on_cuda else None,
        )

    def _make(
        self,
        turn: StepTurn,
        batch: StepBatch,
        lr: float,
        stop_requested: bool,
        while_busy: Callable[[], None] | None,
    ) -> _Made:
        """Make the update of one turn."""
        expected = 2.0 ** round(math.log2(batch.samples * self.items_per_sample))  # of the weight: keeps sums in range
        down = (self.scaler.scale if self.scaler else 1.0) / expected
        told = self._passed(turn, batch, down, stop_requested, while_busy)
        if self.slots is not None and told.short:
            self.buffers.put_back()  # running statistics that the passes have moved
            self.buffers.begin()
            if self.health is not None:
                self.health.begin(batch.step)
            told = self._passed(turn, batch, down, stop_requested, None, again=True)
        if self.slots is not None:
            self.slots.settle(batch.step)
        scale = self.scaler.scale if self.scaler else 1.0
        correction = expected / told.weight / scale if told.weight > 0 else 0.0
        if told.weight <= 0:  # of copies that make steps by themselves one may have no item: it makes no update
            self._drop(turn.parameters)
        norm = math.sqrt(told.squares) * correction if told.squares >= 0 else math.nan
        seen = self.sync.over_all(StepTotals(told.loss, told.weight, norm, told.stop))
        if seen.weight <= 0:
            raise NothingToLearn(
                f"{_place(batch.step, turn)} has no item to learn from",
                "the objective's weights add up to zero over the whole global batch",
                "check the labels: are all of them masked?",
            )
        loss = seen.loss / seen.weight
        self.is_whole = False
        updated = self._may_update(turn, batch.step, loss, seen.grad_norm)
        self.reached("update", batch.step)
        if updated:
            self._update(turn, norm, correction, lr)
        router = self.routing.finish(*told.routed, told.weight, updated) if self.routing else None
        self._clock.mark("optimizer")
        return _Made(TurnStats(loss, seen.weight, seen.grad_norm, updated), seen.stop > 0, router)

    def _passed(
        self,
        turn: StepTurn,
        batch: StepBatch,
        down: float,
        stop_requested: bool,
        while_busy: Callable[[], None] | None,
        again: bool = False,
    ) -> _PassTotals:
        """Run the passes of a turn on the loss times `down`, sum up gradients, and return what the ranks come to."""
        self.gradients.zero()
        self.reached("forward", batch.step)
        with self.slots.during_passes(again) if self.slots is not None else contextlib.nullcontext():
            loss_sum, weight = turn.passes.accumulate(batch.micro_batches, down)
        self.reached("reduce", batch.step)
        self._clock.mark("forward_backward")
        self.gradients.finish()
        self._keep_own(turn, batch.step)
        local = [loss_sum, weight, self._local_squares(), stop_requested, self.gradients.unreached()]
        local += [self.slots.short()] if self.slots is not None else []
        sums = one_vector(local, self.routing.take() if self.routing else None, self.world.device)
        self.sync.add_up(sums)
        self._clock.mark("reduce")
        coming = NumbersOnTheWay(sums)
        asked = time.perf_counter()
        if while_busy is not None:
            while_busy()
        began = time.perf_counter()
        numbers = coming.arrived()
        refuse_ended_groups()
        awaited = time.perf_counter() - began
        self._awaited_seconds += awaited
        if awaited < DONE_FIRST * (began - asked):  # the device has waited for the host meanwhile, for so long at most
            self._held_seconds += began - asked
        loss, weight, squares, stop, unreached, *short = numbers[: len(local)]
        if unreached:
            self.gradients.settle()
            self._clock.mark("reduce")
        return _PassTotals(loss, weight, squares, stop, sum(short), (sums[len(local) :], numbers[len(local) :]))

    def grad_norm_of(self, batch: StepBatch) -> float:
        """Return the gradient norm of a batch, and change nothing: no weight, no state. Every rank calls it.

        It is that of the objective that is evaluated, before clipping.
        """
        turn = self.turns[self.main]
        self.gradients.zero()
        expected = 2.0 ** round(math.log2(batch.samples * self.items_per_sample))
        down = (self.scaler.scale if self.scaler else 1.0) / expected
        with buffers_kept(self.model):  # such as running means
            _, weight = turn.passes.accumulate(batch.micro_batches, down)
        self.gradients.finish()
        self._keep_own(turn, batch.step)
        sums = one_vector([weight, self._local_squares(), self.gradients.unreached()], None, self.world.device)
        self.sync.add_up(sums)
        weight_total, square_total, unreached = NumbersOnTheWay(sums).arrived()
        if unreached:
            self.gradients.settle()
        self.gradients.zero()
        if self.routing:
            self.routing.take()
        if not (weight_total > 0 and square_total >= 0):
            return math.nan
        return math.sqrt(square_total) * expected / weight_total / (self.scaler.scale if self.scaler else 1.0)

    def _keep_own(self, turn: StepTurn, step: int) -> None:
        """Drop the gradients of parameters that a turn does not train in a step."""
        self._drop(self._others[turn.turn.name])
        if self.freezes and (frozen := frozen_groups(self.groups, step)):
            for parameter in turn.parameters:
                if self._groups_of[parameter] in frozen:
                    parameter.grad = None

    @staticmethod
    def _drop(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    @torch.no_grad()  # the local part of a DTensor is then no step of a graph
    def _local_squares(self) -> torch.Tensor:
        """Return this rank's contribution to the squared global norm of the unscaled gradients."""
        by_copies: dict[int, list[torch.Tensor]] = {}
        for parameter, copies in self._copies.items():
            if parameter.grad is not None and (local := local_of(parameter.grad)).numel():
                by_copies.setdefault(copies, []).append(local)
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for copies, gradients in by_copies.items():
            norm = norm_of(gradients)
            # Copies hold equal gradients, so each contributes its share of the sum over all ranks.
            total += norm.double().square() / copies
        return total

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Return how many of the ranks that make an update together hold the same part of a parameter."""
        # A parameter lives on the ranks of one stage, unless the first and the last share it.
        holders = self.sync.ranks // self.plan.layout.pp * self.stages_holding.get(parameter, 1)
        if not is_spread(parameter):
            return holders
        mesh = parameter.device_mesh
        shards = math.prod(mesh.size(i) for i, place in enumerate(parameter.placements) if not place.is_replicate())
        return holders // shards

    def _may_update(self, turn: StepTurn, step: int, loss: float, norm: float) -> bool:
        """Return whether weights are to change; raise NumericalStop where a number over all copies is not finite."""
        if self.leaves_out:
            self._is_refused = True
            return False
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite and self.guard is None:
            return True
        if not is_finite and self.scaler and math.isfinite(loss) and self.scaler.scale > self.scaler.smallest:
            self.scaler.update(overflowed=True)
            self._is_refused = True
            return False
        may = self.guard.may_update(step, _place(step, turn), turn.turn.name, loss, norm) if self.guard else None
        if may is not None:
            self._is_refused = self._is_refused or not may
            return may
        raise NumericalStop(
            f"{_place(step, turn)}: loss {loss}, gradient norm {norm}",
            f"they are not finite numbers; no weight was changed by this {'turn' if turn.turn.name else 'step'}",
            "lower task.optimizer.lr, lengthen task.schedule.warmup, or train with plan.precision=bf16 or fp32",
        )

    @torch.no_grad()
    def _update(self, turn: StepTurn, norm: float, correction: float, lr: float) -> None:
        """Scale, clip and apply the gradients of a turn, which have this norm."""
        factor = correction
        clip_norm = self.clip_norm if turn.clip_norm is None else turn.clip_norm
        if clip_norm:
            factor *= min(1.0, clip_norm / (norm + CLIP_EPS))
        if self.observe is not None:
            self.observe(correction)
        measured = self.health if self.health is not None and self.health.is_measuring else None
        if measured is not None:
            measured.before_update(turn.parameters, correction)
        # There may be none: all that a turn trains may stay as it is in a step.
        if factor != 1.0 and any(p.grad is not None for p in turn.parameters):
            torch._foreach_mul_([local_of(p.grad) for p in turn.parameters if p.grad is not None], factor)
        self.rates.give(self.optimizer.param_groups, lr)
        self.updater.step()
        if measured is not None:
            measured.after_update()
        if self.scaler:
            self.scaler.update(overflowed=False)


def _place(step: int, turn: StepTurn) -> str:
    return f"step {step}, turn '{turn.turn.name}'" if turn.turn.name else f"step {step}"

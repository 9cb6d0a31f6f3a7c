"""The reference: the same steps on one device, written plainly with torch alone.

It shares the model, the objective, the sample order, the random numbers of a sample and the learning rate with the
run, and nothing else: no loader, no sharding, no accumulation scheme, no loss scaling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.spec.plan import Plan
from paceline.spec.steps.turns import main_turn
from paceline.spec.task import Task
from paceline.task.coupling import is_coupled
from paceline.task.data.order.chosen import ONE, start_of
from paceline.task.data.protocol import Source
from paceline.task.models.shape import MoEConfig
from paceline.task.optimizer.schedule import learning_rate
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.difference import reach_of
from paceline.verify.reference.noise_scale import NoiseScale
from paceline.verify.reference.passes import (
    backward,
    ids_of,
    in_step,
    mean_gradients,
    micro_batches,
    moments_of,
    norm_of,
    norm_together,
    own_parameters,
    positions_of,
    reference_randomness,
    update,
)
from paceline.verify.reference.plain_documents import placed_plainly
from paceline.verify.reference.plain_optimizer import plain_optimizers
from paceline.verify.reference.plain_selection import Selected, selected
from paceline.verify.reference.router import RouterSums, counted_choices, move_biases


@dataclass(frozen=True)
class ReferenceTurn:
    """The numbers of one objective in a step."""

    loss: float
    weight: float
    grad_norm: float
    clip_norm: float  # the norm above which its gradients were scaled down; 0 where the task does not clip
    gradients: dict[str, torch.Tensor]  # of the parameters that it trains, before they were scaled down
    reach: float = 0.0  # what the loss counts as at least where it is compared


@dataclass(frozen=True)
class ReferenceStep:
    """One step's numbers on a single device; tensors are on the CPU, by parameter name."""

    loss: float
    weight: float
    grad_norm: float
    clip_norm: float  # the norm above which this step's gradients were scaled down; 0 where the task does not clip
    turns: dict[str, ReferenceTurn]  # by name, in their order; empty for a task of one objective
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    ids: list[int]  # of all samples that the step read
    router: dict[str, torch.Tensor]  # tokens per expert, by router; empty for a model without experts
    moments: dict[str, torch.Tensor]  # the optimizer's state after the update, by `PARAMETER.KEY`
    selected: Selected | None = None  # where a step trains on some of what it read
    routing: dict[str, float] = field(default_factory=dict)  # what is told of routers' entropy and balance, by name
    reach: float = 0.0  # what the loss counts as at least where it is compared


def reference_steps(
    task: Task,
    plan: Plan,
    source: Source,
    items_per_sample: int,
    steps: int,
    model: nn.Module,
    *,
    rate: Callable[[int], float] | None = None,
    last: Plan | None = None,
    sizes: Sequence[int] = (),
    clip_norms: Sequence[Mapping[str, float]] = (),
    noise: NoiseScale | None = None,
    selects: bool = False,
    until: int = 0,
) -> list[ReferenceStep]:
    """Run `steps` steps of the task on one device and return their numbers.

    The rows of a batch are read in the micro-batches of `plan`, one after the other; a batch whose rows see each other
    is read whole. So is that of a model which draws random numbers and takes any number of rows: the numbers belong to
    the samples, whatever else is read.

    With `rate`, the learning rate of a step, gradients are clipped and groups of parameters are left as they are in
    the steps in which the task says so; without it all parameters are trained. `last` is the plan whose
    micro-batches the last step reads, where that is another, and `sizes` are the samples of every step, where they are
    not all the plan's. With `clip_norms`, by turn, those of so many steps,
    these are the norms above which gradients are scaled down, and no further steps are run. `noise` measures the steps
    and says how many samples the next one has; `sizes` are then its own, which grow. With `selects` a step trains on
    those of its samples that the task selects, one after the other. `until` is the last step that is run, where that is
    not the last of all.
    """
    device = _device(task, plan, source, model)
    results = []
    for step in range(1, (len(clip_norms) or until or steps) + 1):
        cut = last if last is not None and step == steps else plan
        lr = rate(step) if rate else learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        small_norm = device.small_norm(step, sizes, noise.small()) if noise is not None else 0.0
        positions = positions_of(plan, step, sizes)
        chosen = device.selected(positions) if selects else None
        done: dict[str, ReferenceTurn] = {}
        sums = RouterSums()
        with counted_choices(model, sums) as router:
            for number, turn in enumerate(device.turns):
                if not turn.is_due(step):
                    continue
                read = device.read(step, cut, sizes, positions, chosen)
                factors = chosen.weights if chosen is not None else ()
                loss, weight, trained = device.gradients(number, step, read, factors, is_real=rate is not None)
                gradients = device.mean(trained, weight)
                limit = task.optimizer.clip_norm if turn.clip_norm is None else turn.clip_norm
                norm = norm_together(gradients.values())
                reach = reach_of(norm, (p for p in trained if p.grad is not None))
                clip_norm = limit if rate else clip_norm_of(limit, norm, step)
                clip_norm = clip_norms[step - 1][turn.name] if clip_norms else clip_norm
                if clip_norm:
                    torch.nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], clip_norm)
                update(device.updates[number], lr)
                done[turn.name] = ReferenceTurn(loss / weight, weight, norm, clip_norm, gradients, reach)
        move_biases(model, router)
        if noise is not None:
            noise.after(noise.small(), small_norm, done[device.main.name].grad_norm)
        results.append(device.numbers(done, positions, router, sums, chosen))
    return results


def _device(task: Task, plan: Plan, source: Source, model: nn.Module) -> _Device:
    """Return the one device that trains a model as a task says."""
    turns = turns_of(task, source.unit)
    own = own_parameters(model, turns)
    dtype = MASTER_DTYPES[plan.precision]
    objectives = [turn.objective for turn in turns]
    randomness = reference_randomness(task, plan, source, model, objectives, dtype)
    coupled = any(is_coupled(model, objective) for objective in objectives)
    return _Device(
        task=task,
        plan=plan,
        source=source,
        model=model,
        turns=turns,
        own=own,
        updates=[plain_optimizers(task.optimizer, model, parameters) for parameters in own],
        dtype=dtype,
        randomness=randomness,
        is_whole=coupled or randomness.survey.is_cut_freely,
    )


@dataclass(frozen=True)
class _Device:
    """One device and what it trains: a model, its turns, and each turn's parameters and optimizers."""

    task: Task
    plan: Plan
    source: Source
    model: nn.Module
    turns: Sequence[Turn]
    own: list[list[nn.Parameter]]
    updates: list[list[tuple[torch.optim.Optimizer, float]]]  # with the scale of the learning rate of each
    dtype: torch.dtype
    randomness: SampleRandomness
    is_whole: bool  # whether a step is read in one piece

    @property
    def main(self) -> Turn:
        """The turn whose numbers are the step's."""
        return self.turns[main_turn(self.task)]

    def read(
        self, step: int, cut: Plan, sizes: Sequence[int], positions: np.ndarray, chosen: Selected | None
    ) -> Iterable[tuple[np.ndarray, object]]:
        """Return (positions, data) of each piece of a step: micro-batches, or the samples chosen, one by one."""
        if chosen is None:
            return micro_batches(self.task, cut, self.source, step, self.is_whole, sizes=sizes)
        each = positions[list(chosen.places)].reshape(-1, 1)
        return ((at, self.source.read(ids_of(self.task, self.source, at), at)) for at in each)

    def gradients(
        self,
        number: int,
        step: int,
        read: Iterable[tuple[np.ndarray, object]],
        factors: Sequence[float],
        *,
        is_real: bool,
    ) -> tuple[float, float, list[nn.Parameter]]:
        """Run a turn forward and backward; return the sums of losses and weights, and the parameters in this step."""
        loss, weight = backward(self.model, self.turns[number], read, self.randomness, self.dtype, step, factors)
        trained = self.own[number]
        return loss, weight, in_step(self.task.optimizer.groups, self.model, trained, step) if is_real else trained

    def mean(self, trained: Iterable[nn.Parameter], weight: float) -> dict[str, torch.Tensor]:
        """Divide gradients by the sum of weights; return those of these parameters by name."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return mean_gradients(self.model, trained, weight, names)

    def small_norm(self, step: int, sizes: Sequence[int], small: int) -> float:
        """Return the norm of the mean gradient of the first `small` samples of a step; 0 without any."""
        if not small:
            return 0.0
        number = main_turn(self.task)
        trained = in_step(self.task.optimizer.groups, self.model, self.own[number], step)
        positions = positions_of(self.plan, step, sizes)[:small]
        first = [(positions, self.source.read(ids_of(self.task, self.source, positions), positions))]
        return norm_of(self.model, self.turns[number], first, trained, self.randomness, self.dtype, step)

    def selected(self, positions: np.ndarray) -> Selected:
        """Return which of the samples at these positions the task trains on, at the weights of the moment."""

        def score(at: np.ndarray) -> tuple[float, float]:
            data = self.source.read(ids_of(self.task, self.source, at), at)
            objective = self.main.objective
            loss, weight = objective(self.model, placed_plainly(objective, cast_floats(data, self.dtype)))
            return float(loss), float(weight)

        scores = [functools.partial(score, at) for at in positions.reshape(-1, 1)]
        start = start_of(self.task.seed, int(positions[0])) / ONE
        return selected(self.task.selection, self.plan.batch_samples, start, self.model, scores)

    def numbers(
        self,
        done: Mapping[str, ReferenceTurn],
        positions: np.ndarray,
        router: dict[str, torch.Tensor],
        sums: RouterSums,
        chosen: Selected | None,
    ) -> ReferenceStep:
        """Return what a step has left, after its update."""
        told = done[self.main.name]
        config = getattr(self.model, "config", None)
        return ReferenceStep(
            loss=told.loss,
            weight=told.weight,
            grad_norm=told.grad_norm,
            clip_norm=told.clip_norm,
            turns={name: numbers for name, numbers in done.items() if name},
            gradients={name: grad for numbers in done.values() for name, grad in numbers.gradients.items()},
            weights={name: p.detach().clone() for name, p in self.model.named_parameters()},
            buffers={name: b.detach().clone() for name, b in self.model.named_buffers()},
            ids=ids_of(self.task, self.source, positions).tolist(),
            router=router,
            moments=moments_of(self.model, *(optimizer for updates in self.updates for optimizer, _ in updates)),
            selected=chosen,
            reach=told.reach,
            routing=sums.numbers(router, config.top_k, told.weight) if isinstance(config, MoEConfig) else {},
        )


def clip_norm_of(limit: float, grad_norm: float, step: int) -> float:
    """Return the largest norm that a step's gradients keep: half of theirs, and in every second step twice as much.

    Thresholds far from the norms of a twin would say nothing of clipping, or nothing of steps that are not clipped.
    """
    if not limit or not 0 < grad_norm < math.inf:
        return limit
    return grad_norm * (2.0 if step % 2 == 0 else 0.5)

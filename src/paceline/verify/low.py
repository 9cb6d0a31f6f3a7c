"""The check of low precision: a layout in bf16 or fp16 against one device that makes the same casts.

Two kinds of mistakes look like rounding and are none: a sum kept or sent in the compute format, and a decision (skip
this step, send this token there) that ranks take for themselves. So formats are looked at where gradients travel and
rest, and ranks are asked for their decisions; numbers are compared on top of that, for one update:

- A layout that computes each micro-batch whole on one device (data axes, a pipeline) makes the same products, bit for
  bit, and differs by sums in fp32 alone: fp32's tolerances hold.
- `tp`, `cp` and `ep` add up in other orders inside of layers, and round in between. How far that may move each quantity
  is measured: one device computes it again from weights that are moved by up to one unit in the last place of the
  compute format, at random. Differences beyond MARGIN times that movement are mistakes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run.assemble import Assembled, assemble
from paceline.run.invariants import numbers_of
from paceline.run.loader import BatchStream
from paceline.run.parallel.apply import apply_plan
from paceline.run.precision import COMPUTE_DTYPES
from paceline.run.rng import seed_at
from paceline.run.step import StepStats
from paceline.run.world import World
from paceline.task.coupling import is_coupled
from paceline.task.data.source import Source
from paceline.task.models.blocks import find_blocks
from paceline.task.models.moe import routers
from paceline.task.objective import resolve_objective
from paceline.task.task import Task
from paceline.verify.conditioning import moved_by_one_ulp
from paceline.verify.diagnosis import Diagnosis
from paceline.verify.difference import Difference, number_differences, tensor_differences
from paceline.verify.plain_optimizer import plain_optimizers
from paceline.verify.reference import masks_follow_cut, micro_batches, reference_model, stop_dropout
from paceline.verify.tolerance import larger, tolerance
from paceline.verify.wire import ReductionsSeen, held_in_less

MARGIN = 8.0  # rounding happens several times between two weights, in forward and backward
DRAWS = 2  # re-runs from moved weights
STEPS = 2
MASTER = torch.float32  # what weights, gradients and sums are in, whatever the run's own tables say
OVERFLOWING_RANK = 0
Numbers = dict[str, Any]  # loss and norm as floats, gradients by name


def low(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[Any, Any] | None = None,
) -> dict[str, Any]:
    """Return the record of a check (see checks.py), its quantities those of `compare`, `dtype` and `decision`."""
    began = time.perf_counter()
    expected = None
    if world.is_first:
        expected = _expected(task, plan, source, items_per_sample)
    numbers, allowed = world.gather(expected)[0]
    unclipped = dataclasses.replace(task, optimizer=dataclasses.replace(task.optimizer, clip_norm=0.0))
    built = assemble(unclipped, plan, world, source, items_per_sample)
    if masks_follow_cut(task, plan, source, built.model):
        stop_dropout(built.model)
    before = {name: weight.detach().clone() for name, weight in built.model.named_parameters()}
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    watch = _Watch(built, plan, world)
    wrong: list[Difference] = []
    found: list[Difference] = []
    for step in range(1, STEPS + 1):
        gradients: dict[str, torch.Tensor] = {}

        def observe(correction: float, gradients: dict[str, torch.Tensor] = gradients) -> None:
            for name, parameter in built.model.named_parameters():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad * correction

        built.stepper.observe = observe
        stats = watch.step(stream, step, task.optimizer.lr)
        if step == 1 and stats.updated:
            ours = {"loss": stats.loss, "grad_norm": stats.grad_norm}
            found += number_differences(ours, {name: numbers[name] for name in ours}, step, world)
            found += tensor_differences("gradients", gradients, numbers["gradients"], step, world, plan.layout)
            updates = {
                name: w.detach() - before[name] for name, w in built.model.named_parameters() if name in gradients
            }
            found += tensor_differences("weights", updates, numbers["weights"], step, world, plan.layout)
        wrong += watch.formats(step) + watch.decisions(stats, step)
    if built.stepper.scaler is not None:
        wrong += watch.overflow(stream, task.optimizer.lr)
    wrong += [d for d in found if not d.relative <= allowed.get((d.quantity, d.name), 0.0)]
    worst = dict.fromkeys(("loss", "gradients", "grad_norm", "weights"), 0.0)
    for difference in found:
        worst[difference.quantity] = larger(worst[difference.quantity], difference.relative)
    return {
        "equal": not wrong,
        "dtype": plan.precision,
        "steps": STEPS,
        "seconds": time.perf_counter() - began,
        "differences": worst,
        "first_difference": _told(wrong) if wrong else None,
    }


class _Watch:
    """Runs steps of a layout and looks at formats and decisions."""

    def __init__(self, built: Assembled, plan: Plan, world: World) -> None:
        self.built, self.plan, self.world = built, plan, world
        self._losses: set[torch.dtype] = set()
        self._chosen: list[int] = []
        self._wire = ReductionsSeen(MASTER, _tensor_group(built.model, plan))
        for router in routers(built.model).values():
            router.register_forward_hook(self._keep_choice)
        passes: Any = built.stepper.passes
        inner = passes.objective

        def objective(model: nn.Module, batch: Any) -> Any:
            loss_sum, weight = inner(model, batch)
            self._losses.add(loss_sum.dtype)
            return loss_sum, weight

        passes.objective = objective

    def _keep_choice(self, router: nn.Module, args: Any, output: Any) -> None:
        self._chosen.append(hash(tuple(output[2].flatten().tolist())))

    def step(self, stream: BatchStream, step: int, lr: float) -> StepStats:
        """Make a step, seen by the watch."""
        self._chosen.clear()
        with self._wire:
            return self.built.stepper.step(stream.at((step - 1) * self.plan.batch_samples), lr)

    def formats(self, step: int) -> list[Difference]:
        """Return what is in a format of fewer bits than weights have, on any rank."""
        seen = [*self._wire.wrong, *held_in_less(self.built.model, self.built.optimizer, MASTER)]
        mine = [(found.what, str(found.dtype)) for found in seen]
        small = {dtype for dtype in self._losses if torch.finfo(dtype).bits < torch.finfo(MASTER).bits}
        mine += [("the sum of losses", str(dtype)) for dtype in sorted(small, key=str)]
        return [
            Difference("dtype", f"{what}: {dtype}, not {MASTER},", step, rank, math.inf, math.nan, 0.0, 0.0)
            for rank, found in enumerate(self.world.gather(sorted(mine)))
            for what, dtype in found
        ]

    def decisions(self, stats: StepStats, step: int) -> list[Difference]:
        """Return the decisions that ranks have not taken alike."""
        scaler = self.built.stepper.scaler
        mine: dict[str, Any] = {**numbers_of(stats, scaler.scale if scaler else None)}
        mine["the clean steps of the loss scale"] = scaler.clean_steps if scaler else 0
        everyone = self.world.gather({name: repr(value) for name, value in mine.items()})
        wrong = [(name, r) for r, other in enumerate(everyone) for name in other if other[name] != everyone[0][name]]
        # Ranks that differ by their place on `tp` alone route the same tokens.
        places = [{**self.plan.layout.coordinates(rank), "tp": 0} for rank in range(self.world.size)]
        choices = self.world.gather(list(self._chosen))
        wrong += [
            ("the experts that tokens go to", rank)
            for rank, chosen in enumerate(choices)
            if chosen != choices[places.index(places[rank])]
        ]
        return [Difference("decision", name, step, rank, math.inf, math.nan, 0.0, 0.0) for name, rank in wrong]

    def overflow(self, stream: BatchStream, lr: float) -> list[Difference]:
        """Let gradients of one rank overflow, and return what the ranks have not decided alike: all must skip."""
        passes: Any = self.built.stepper.passes
        inner, step = passes.objective, STEPS + 1

        def overflowing(model: nn.Module, batch: Any) -> Any:
            loss_sum, weight = inner(model, batch)
            if loss_sum.requires_grad:
                loss_sum.register_hook(lambda gradient: gradient * math.inf)
            return loss_sum, weight

        # The rank of the last pipeline stage has the loss.
        last = [r for r in range(self.world.size) if self.plan.layout.coordinates(r)["pp"] == self.plan.layout.pp - 1]
        if self.world.rank == last[OVERFLOWING_RANK]:
            passes.objective = overflowing
        stats = self.step(stream, step, lr)
        passes.objective = inner
        wrong = self.decisions(stats, step)
        if not wrong and any(self.world.gather(stats.updated)):
            wrong = [Difference("decision", "an overflow that changed weights", step, 0, math.inf, math.nan, 0.0, 0.0)]
        return wrong


def _tensor_group(model: nn.Module, plan: Plan) -> Any:
    """Return the group of the tensor axis that a layout's weights lie on, None without one."""
    if plan.layout.tp == 1:
        return None
    from torch.distributed.tensor import DTensor

    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    return next((m.get_group("tp") for m in meshes if "tp" in (m.mesh_dim_names or ())), None)


def computes_alike(layout: Layout, tied: bool) -> bool:
    """Return whether a layout makes the very products of one device, and adds up in fp32 alone what is another order.

    A weight that two stages of a pipeline share has its two gradients added in fp32, on one device in the compute
    format.
    """
    return layout.tp == layout.cp == layout.ep == 1 and not (layout.pp > 1 and tied)


def _expected(task: Task, plan: Plan, source: Source, items_per_sample: int) -> tuple[Numbers, dict[Any, float]]:
    """Return one device's numbers, and the relative difference allowed for each quantity and name."""

    def computed(move: int) -> Numbers:
        model = reference_model(task, source, items_per_sample, MASTER)
        if masks_follow_cut(task, plan, source, model):
            stop_dropout(model)
        if move:
            moved_by_one_ulp(model, COMPUTE_DTYPES[plan.precision], seed=move)
        return _one_update(model, task, plan, source)

    numbers = computed(0)
    names = [
        ("loss", "loss"),
        ("grad_norm", "grad_norm"),
        *((kind, name) for kind in ("gradients", "weights") for name in numbers[kind]),
    ]
    allowed = {at: tolerance(at[0], "fp32") for at in names}
    for name, coarse in numbers["stored"].items():
        allowed["weights", name] += coarse
    tied = reference_model(task, source, items_per_sample, torch.float32)
    shared = len(list(tied.named_parameters())) < len(list(tied.named_parameters(remove_duplicate=False)))
    if not computes_alike(plan.layout, shared):
        for move in range(1, DRAWS + 1):
            for at, moved in _movement(numbers, computed(move)).items():
                allowed[at] = max(allowed[at], MARGIN * moved)
    return numbers, allowed


def _movement(numbers: Numbers, other: Numbers) -> dict[Any, float]:
    """Return how far each quantity is from what it was, relative to the same sizes as differences are."""
    alone = World(0, 1, 0, torch.device("cpu"))
    found = number_differences(
        {name: other[name] for name in ("loss", "grad_norm")},
        {name: numbers[name] for name in ("loss", "grad_norm")}, 1, alone,
    )  # fmt: skip
    for kind in ("gradients", "weights"):
        found += tensor_differences(kind, other[kind], numbers[kind], 1, alone, Layout())
    return {(d.quantity, d.name): d.relative for d in found}


def _one_update(model: nn.Module, task: Task, plan: Plan, source: Source) -> Numbers:
    """Return loss, gradient norm, gradients and changes of weights of the first batch on one device, summed in fp32.

    The loss scale is a power of two near that of a run, and taken out again exactly. `stored` says how far, relative to
    its change, a weight is off for being stored in fp32.
    """
    alone = dataclasses.replace(plan, layout=Layout(), recompute="none", offload="none", compile=False, stages=())
    apply_plan(model, [block for _, block in find_blocks(model)], alone, None)
    objective: Callable[..., Any] = resolve_objective(task.objective, source.unit)
    scale = 2.0**6 if plan.precision == "fp16" else 1.0
    losses, weights = [], []
    for position, data in micro_batches(task, plan, source, 1, is_coupled(model, objective)):
        torch.manual_seed(seed_at(task.seed, position))
        loss_sum, weight = objective(model, data)
        (loss_sum * scale).backward()
        losses.append(float(loss_sum.detach()))
        weights.append(float(weight))
    total = sum(weights)
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: p.grad / (total * scale) for name, p in trained.items() if p.grad is not None}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    before = {name: p.detach().clone() for name, p in trained.items()}
    for name, parameter in trained.items():
        parameter.grad = gradients[name].clone()
    for optimizer, factor in plain_optimizers(task.optimizer, model):
        for group in optimizer.param_groups:
            group["lr"] = task.optimizer.lr * factor
        optimizer.step()
    updates = {name: p.detach() - before[name] for name, p in trained.items()}
    eps = torch.finfo(MASTER).eps
    stored = {name: eps * float(before[name].norm() / u.norm().clamp_min(1e-30)) for name, u in updates.items()}
    return {"loss": sum(losses) / total, "grad_norm": norm, "gradients": gradients, "weights": updates,
            "stored": stored}  # fmt: skip


def _told(wrong: list[Difference]) -> dict[str, Any]:
    """Return the first difference as plain data, with what it means."""
    first = wrong[0]
    meaning = {
        "dtype": Diagnosis("half-reduced precision", "it is kept or sent in fewer bits than weights have"),
        "decision": Diagnosis("update", "ranks that must decide alike do not"),
    }.get(first.quantity, Diagnosis("half-reduced precision", "it differs by more than rounding in this format can"))
    same = [d.name for d in wrong if d.quantity == first.quantity]
    return {**vars(first), "tensors": same[:8], "tensors_in_all": len(same), **vars(meaning)}

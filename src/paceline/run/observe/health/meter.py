"""The meter: gradients, updates and activations of each block, in some steps, the same on every layout.

Everything is added up on the device, and read once: one sum and one maximum over the ranks for each step that is
measured. A parameter that several ranks hold alike counts with its share on each, as in the global norm.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.observe.health.activations import OTHERS, ActivationWatch
from paceline.run.observe.health.scores import ScoreWatch
from paceline.run.process.world import World, build_mesh
from paceline.run.updates.optimizer import named_parameters
from paceline.task.models.held import local_of

MOST_COPIED = 1 << 26  # elements of weights that one step keeps a copy of; the others' turn comes in later steps
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.)")
OUTPUT = "output"  # of the model: its logits, where the model gives them
IN_STAGES = "not measured over pipeline stages"
NO_LOGITS = "the model gives no logits: it adds up the loss itself, or part by part"


@dataclass(frozen=True)
class MeasuredHealth:
    """What one step's blocks were like, on rank 0; elsewhere without values."""

    step: int
    values: Mapping[str, Mapping[str, float]]
    absent: Mapping[str, str]
    seconds: float  # of this rank's host


@dataclass
class _Step:
    """What is kept of the step that is measured."""

    number: int
    correction: float = 1.0
    gradients: torch.Tensor | None = None  # squares by block, before the correction
    weights: torch.Tensor | None = None
    updates: torch.Tensor | None = None
    copies: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class HealthMeter:
    """Measures some steps of a stepper, which calls it. Every rank has one."""

    def __init__(self, stepper: Stepper, world: World, every: int) -> None:
        """A step is measured whose number `every` divides. Every rank makes one at the same time."""
        self._stepper, self._world, self._every = stepper, world, every
        layout = stepper.plan.layout
        names = {weight: (name, stepper.names.get(name, (name,))[0])
                 for name, weight in named_parameters(stepper.model) if weight.requires_grad}  # fmt: skip
        own = dict.fromkeys(block_of(whole) for _, whole in names.values())
        tied = [name for name, child in stepper.model.named_children()
                if name not in own and next(child.parameters(recurse=False), None) is not None]  # fmt: skip
        self.blocks = [*self._all_blocks(list(own)), *(tied if layout.pp == 1 else ()), OUTPUT]
        at = {name: number for number, name in enumerate(self.blocks)}
        self._of = {weight: at[block_of(whole)] for weight, (_, whole) in names.items()}
        # On the device once: what is made of numbers of the host in a step is copied there, and waited for.
        self._row = {weight: row for row, weight in enumerate(names)}
        self._at = torch.tensor(list(self._of.values()), dtype=torch.int64, device=world.device)
        shares = [1.0 / stepper.copies_of(weight) for weight in names]
        self._shares = torch.tensor(shares, dtype=torch.float64, device=world.device)
        modules = dict(stepper.model.named_modules(remove_duplicate=False))  # one may have several names
        here = {block_of(whole): modules.get(block_of(local)) for local, whole in names.values()}
        here |= {name: modules[name] for name in tied} | {OUTPUT: stepper.model}
        watched = {name: here.get(name) or nn.Module() for name in self.blocks} if layout.pp == 1 else {}
        self._watch = ActivationWatch(watched, world.device)
        for turn in stepper.turns:
            if isinstance(turn.passes, SequentialPasses):
                turn.passes.watched_by = self._watch
        self._scores = ScoreWatch(stepper.model, watched, stepper.plan, world.device, lambda: self._watch.counts)
        self._absent = dict(self._scores.absent)
        if layout.pp > 1:
            names_absent = ("activation_rms", "activation_max", "dead_share", "attention_max", "logit_max")
            self._absent |= dict.fromkeys(names_absent, IN_STAGES)
        elif not self._watch.silent_blocks:
            self._absent["dead_share"] = OTHERS
        self._turns_of_copies = self._in_turn()
        self._copied = 0  # how many of those turns there have been
        self._step: _Step | None = None

    def _all_blocks(self, own: list[str]) -> list[str]:
        """Return the blocks of the whole model: a stage of a pipeline has some."""
        mesh = build_mesh(self._stepper.plan.layout, self._world)
        if mesh is None or self._stepper.plan.layout.pp == 1:
            return own
        of_stages: list[Any] = [None] * self._stepper.plan.layout.pp
        dist.all_gather_object(of_stages, own, group=mesh.get_group("pp"))
        return list(dict.fromkeys(name for stage in of_stages for name in stage))

    def _in_turn(self) -> list[set[int]]:
        """Return which blocks are copied together before an update: as many as memory is taken for."""
        sizes = [0.0] * len(self.blocks)
        for weight, at in self._of.items():
            sizes[at] += local_of(weight).numel()
        sizes = self._world.maximum(sizes) if sizes else sizes
        turns: list[set[int]] = []
        room = 0.0
        for at, size in enumerate(sizes):
            if size > MOST_COPIED:
                self._absent[f"update_ratio of {self.blocks[at]}"] = f"{size:.3g} weights are too many to copy"
                continue
            if not turns or size > room:
                turns.append(set())
                room = float(MOST_COPIED)
            turns[-1].add(at)
            room -= size
        return turns

    # ---- what a stepper calls --------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Begin a step, which is measured where it is one of those that are."""
        self._watch.end()  # of a step that was broken off
        self._scores.end()
        self._step = _Step(step) if step % self._every == 0 else None
        if self._step is not None:
            self._watch.begin()
            self._scores.begin(step // self._every, *self._part())

    @property
    def is_measuring(self) -> bool:
        """Whether the step that is made is measured."""
        return self._step is not None

    @torch.no_grad()
    def before_update(self, parameters: Sequence[nn.Parameter], correction: float) -> None:
        """Look at complete gradients, whose factor is `correction`, and keep the weights of some blocks."""
        assert self._step is not None
        began = time.perf_counter()
        self._watch.end()
        self._scores.end()
        step, known = self._step, [p for p in parameters if p.grad is not None and p in self._of]
        step.correction = correction
        step.gradients = self._squares(known, [local_of(p.grad) for p in known], step.gradients)
        step.weights = self._squares(known, [local_of(p) for p in known], step.weights)
        copied = self._turns_of_copies[self._copied % len(self._turns_of_copies)] if self._turns_of_copies else set()
        step.copies |= {p: local_of(p).clone() for p in known if self._of[p] in copied}
        step.seconds += time.perf_counter() - began

    @torch.no_grad()
    def after_update(self) -> None:
        """Look at how far the weights that were kept have moved, and let go of them."""
        assert self._step is not None
        began = time.perf_counter()
        step = self._step
        moved, before = list(step.copies), list(step.copies.values())
        if moved:
            torch._foreach_sub_(before, [local_of(p) for p in moved])
        step.updates = self._squares(moved, before, step.updates)
        step.copies = {}
        step.seconds += time.perf_counter() - began

    @torch.no_grad()
    def _squares(
        self, parameters: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor], into: torch.Tensor | None
    ) -> torch.Tensor:
        """Add this rank's share of the squares of each block's tensors."""
        device = self._world.device
        into = torch.zeros(len(self.blocks), dtype=torch.float64, device=device) if into is None else into
        kept = [(p, t) for p, t in zip(parameters, tensors, strict=True) if t.numel()]
        if kept:
            norms = [torch.zeros((), dtype=torch.float64, device=device)] * len(self._row)  # of those left out
            for (parameter, _), norm in zip(kept, torch._foreach_norm([t for _, t in kept]), strict=True):
                norms[self._row[parameter]] = norm.double()
            into.index_add_(0, self._at, torch.stack(norms).square() * self._shares)
        return into

    # ---- what a run calls ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, step: int) -> MeasuredHealth | None:
        """Return what a step's blocks were like, None where it was not measured. Every rank calls it, each step."""
        self._watch.end()
        self._scores.end()
        seen, self._step = self._step, None
        if seen is None or seen.number != step or seen.gradients is None or seen.updates is None:
            return None  # of a step whose update was left out nothing is known
        began = time.perf_counter()
        self._copied += 1
        zeros = torch.zeros_like(seen.gradients)
        has = len(self._watch.silent_blocks) > 0
        watches = self._stepper.plan.layout.pp == 1
        activations = self._watch.sums() if watches else torch.stack([zeros, zeros])
        sums = torch.cat([seen.gradients, seen.weights if seen.weights is not None else zeros, seen.updates,
                          activations.flatten()])  # fmt: skip
        self._world.add_up(sums)
        most = self._watch.most() if watches else zeros
        scores = self._scores.most() if watches else torch.zeros(len(zeros) + 1, dtype=zeros.dtype, device=zeros.device)
        dead, widths = self._dead(has)
        most = torch.cat([most, scores, dead])
        self._maximum(most)
        values: dict[str, dict[str, float]] = {}
        if self._world.is_first:
            values = self._told(torch.cat([sums, most]).tolist(), seen.correction, widths)
        absent = self._absent if OUTPUT in values else {"logits": NO_LOGITS} | self._absent
        return MeasuredHealth(step, values, absent, seen.seconds + time.perf_counter() - began)

    def _dead(self, has: bool) -> tuple[torch.Tensor, list[int]]:
        """Return what this rank's units have given at most, laid out alike on all ranks, and how many there are."""
        if not has:
            return torch.zeros(0, dtype=torch.float64, device=self._world.device), []
        widths = [int(each) for each in self._world.maximum(self._watch.widths())]
        part, tp = self._part()
        return self._watch.reached(widths, part, tp), [each * tp for each in widths]

    def _part(self) -> tuple[int, int]:
        """Return which part of heads and units this rank has, of how many."""
        mesh, tp = build_mesh(self._stepper.plan.layout, self._world), self._stepper.plan.layout.tp
        return (mesh.get_local_rank("tp") if mesh is not None and tp > 1 else 0), tp

    def _maximum(self, vector: torch.Tensor) -> None:
        if self._world.size > 1:
            dist.all_reduce(vector, op=dist.ReduceOp.MAX)

    def _told(self, numbers: list[float], correction: float, widths: list[int]) -> dict[str, dict[str, float]]:
        """Return the numbers of each block by name."""
        count = len(self.blocks)
        rows = [numbers[start : start + count] for start in range(0, 7 * count, count)]
        copies = self._world.size // self._stepper.sync.ranks  # that make updates by themselves: their mean
        logit, silent = numbers[7 * count], self._dead_shares(numbers[7 * count + 1 :], widths)
        found: dict[str, dict[str, float]] = {}
        for at, name in enumerate(self.blocks):
            gradient, weight, update, squares, values, most, score = (row[at] for row in rows)
            own: dict[str, float] = {}
            if weight > 0 or gradient != 0:  # a head that shares its weights has none of its own
                own["grad_norm"] = math.sqrt(gradient / copies) * correction
                own["weight_norm"] = math.sqrt(weight / copies)
            if self._was_copied(at) and weight > 0:
                own["update_ratio"] = math.sqrt(update / weight)
            if values:
                own |= {"activation_rms": math.sqrt(squares / values), "activation_max": most}
            if score:
                own["attention_max"] = score
            if logit and name == OUTPUT:
                own["logit_max"] = logit
            if at in silent:
                own["dead_share"] = silent[at]
            found |= {name: own} if own else {}
        return found

    def _was_copied(self, at: int) -> bool:
        turns = self._turns_of_copies
        return bool(turns) and at in turns[(self._copied - 1) % len(turns)]

    def _dead_shares(self, reached: list[float], widths: list[int]) -> dict[int, float]:
        """Return by block the share of the units behind its activation functions that gave nothing."""
        dead, whole = dict[int, int](), dict[int, int]()
        start = 0
        for at, width in zip(self._watch.silent_blocks, widths, strict=False):
            units = reached[start : start + width]
            start += width
            if width:
                dead[at] = dead.get(at, 0) + sum(unit == 0 for unit in units)
                whole[at] = whole.get(at, 0) + width
        return {at: dead[at] / whole[at] for at in whole}


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: up to the first number in its name, else its outermost module."""
    found = _BLOCK.match(name)
    return found[0] if found else name.partition(".")[0]

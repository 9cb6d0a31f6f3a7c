"""The meter: gradients, updates and activations of each block, in some steps, the same on every layout.

Everything is added up on the device, over the ranks by one sum and one maximum for each step that is measured, and
copied to the host behind the device's work: nobody waits for it. A parameter that several ranks hold alike counts with
its share on each, as in the global norm.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.numerics.host_numbers import NumbersOnTheWay
from paceline.run.observe.health.activations import OTHERS, ActivationWatch
from paceline.run.observe.health.on_the_way import OUTPUT, HealthOnTheWay
from paceline.run.observe.health.scores import ScoreWatch
from paceline.run.process.world import World, build_mesh
from paceline.task.models.held import local_of
from paceline.task.plain_names import named_parameters

MOST_COPIED = 1 << 26  # elements of weights that one step keeps a copy of; the others' turn comes in later steps
_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.)")
IN_STAGES = "not measured over pipeline stages"


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
        self._widths: list[int] = []  # of the activation functions that are watched, once the ranks have agreed on it
        self._widths_seen: NumbersOnTheWay | None = None  # by any rank, in the last measurement

    def _all_blocks(self, own: list[str]) -> list[str]:
        """Return the blocks of the whole model: a stage of a pipeline has some."""
        mesh = build_mesh(self._stepper.plan.layout, self._world)
        if mesh is None or self._stepper.plan.layout.pp == 1:
            return own
        of_stages: list[list[str]] = [[]] * self._stepper.plan.layout.pp
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
        """Add up the squares of gradients and of weights, and keep copies of the weights of some blocks.

        `correction` is the factor that gradients are still to be multiplied by, as a loss scale leaves one.
        """
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
    def take(self, step: int) -> HealthOnTheWay | None:
        """Return what a step's blocks were like, None where it was not measured. Every rank calls it, each step.

        Nobody waits for the device, except in the first measurement ranks for each other.
        """
        self._watch.end()
        self._scores.end()
        seen, self._step = self._step, None
        if seen is None or seen.number != step or seen.gradients is None or seen.updates is None:
            return None  # of a step whose update was left out nothing is known
        began = time.perf_counter()
        turns = self._turns_of_copies
        copied = turns[self._copied % len(turns)] if turns else set[int]()
        self._copied += 1
        sums, most = self._sums(seen), self._largest()
        self._world.add_up(sums)
        self._world.take_largest(most)
        if silent := len(self._widths):
            self._widths_seen = NumbersOnTheWay(most[-silent:])
        return HealthOnTheWay(
            step=step,
            numbers=NumbersOnTheWay(torch.cat([sums, most])) if self._world.is_first else None,
            blocks=self.blocks,
            copied=frozenset(copied),
            copies=self._world.size // self._stepper.sync.ranks,
            correction=seen.correction,
            silent_blocks=self._watch.silent_blocks,
            widths=tuple(self._widths),
            parts=self._stepper.plan.layout.tp,
            absent=self._absent,
            seconds=seen.seconds + time.perf_counter() - began,
        )

    @property
    def _watches(self) -> bool:
        """Whether activations are measured."""
        return self._stepper.plan.layout.pp == 1

    def _sums(self, seen: _Step) -> torch.Tensor:
        """Return what ranks add up: squares of gradients, weights, updates and activations, and how many these are."""
        assert seen.gradients is not None and seen.updates is not None
        zeros = torch.zeros_like(seen.gradients)
        activations = self._watch.sums() if self._watches else torch.stack([zeros, zeros])
        weights = seen.weights if seen.weights is not None else zeros
        return torch.cat([seen.gradients, weights, seen.updates, activations.flatten()])

    def _largest(self) -> torch.Tensor:
        """Return that of which the largest counts: activations, scores, logits, and what each unit has given."""
        count, device = len(self.blocks), self._world.device
        if not self._watches:
            return torch.zeros(2 * count + 1, dtype=torch.float64, device=device)
        return torch.cat([self._watch.most(), self._scores.most(), self._reached()])

    def _reached(self) -> torch.Tensor:
        """Return what this rank's units have given at most, laid out alike on all ranks."""
        if not self._watch.silent_blocks:
            return torch.zeros(0, dtype=torch.float64, device=self._world.device)
        if self._widths_seen is not None:  # of an earlier step, so that it is here
            seen = self._widths_seen.arrived()
            self._widths = [max(int(new), old) for new, old in zip(seen, self._widths, strict=True)]
        if not self._widths:  # nobody knows before the model has run
            self._widths = [int(each) for each in self._world.maximum(self._watch.widths())]
        return self._watch.reached(self._widths, *self._part())

    def _part(self) -> tuple[int, int]:
        """Return which part of heads and units this rank has, of how many."""
        mesh, tp = build_mesh(self._stepper.plan.layout, self._world), self._stepper.plan.layout.tp
        return (mesh.get_local_rank("tp") if mesh is not None and tp > 1 else 0), tp


def block_of(name: str) -> str:
    """Return the block that a parameter belongs to: up to the first number in its name, else its outermost module."""
    found = _BLOCK.match(name)
    return found[0] if found else name.partition(".")[0]

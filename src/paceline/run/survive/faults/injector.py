"""The injector: makes a plan's faults on this rank, each noted in the run's directory before it strikes.

A process of a run without a plan of faults never imports this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.run.survive.faults.acts import act, keep_busy, without_room
from paceline.run.survive.faults.draws import LASTING, draw, is_due, is_struck
from paceline.run.survive.faults.ledger import Ledger, StruckFault
from paceline.run.survive.faults.storage import damage, hinder_writes, newest_file
from paceline.run.survive.faults.values import spoil, spoiled
from paceline.spec.journal.kinds import InjectedRecord
from paceline.spec.journal.reading import records_of_kind, starts_of
from paceline.spec.journal.record import read
from paceline.spec.survive.faults import OF_A_FILE, FaultPlan, FaultSpec

Numbered = tuple[int, FaultSpec]
DAMAGED = ("corrupt", "truncate")
VALUES = ("nan", "flip")


class Injector:
    """Strikes this rank where the plan says. `reached(phase, step)` is called at every place where a fault can."""

    def __init__(self, plan: FaultPlan, run_dir: Path, rank: int, world_size: int) -> None:
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self._run_dir, self._checkpoints, self._ledger = run_dir, run_dir / "checkpoints", Ledger(run_dir)
        self._told: set[tuple[object, ...]] | None = None  # of rank 0: the strikes that the journal has
        self._by_phase: dict[str, list[Numbered]] = {}
        for number, fault in enumerate(plan.each, 1):
            self._by_phase.setdefault(fault.place, []).append((number, fault))
        self._stepper: Any = None
        self._step = 0
        self._passes_began = 0.0
        self._room_back: tuple[int, Callable[[], None]] | None = None  # from which step on files can grow again
        self._slow: dict[int, float] = {}  # step -> how many times as long this rank takes
        self._here: set[int] = set()  # faults that have struck this process since the step's batch was read

    def bind(self, stepper: Any) -> None:
        """Say which step is struck; its objectives are wrapped where a fault strikes in a backward pass."""
        if self._stepper is None and any(fault.kind in OF_A_FILE for fault in self._plan.each):
            hinder_writes(self._checkpoints, self._hindered)
        self._stepper = stepper
        if "backward" in self._by_phase:
            stepper.wrap_objectives(lambda objective: StruckObjective(objective, self._in_backward))

    def reached(self, phase: str, step: int) -> None:
        """Make the faults due in a phase of a step; in `rendezvous` and `load`, `step` is the number of the start."""
        self._step = step
        if phase == "data":
            self._here.clear()
            if self._room_back is not None and step >= self._room_back[0]:
                self._room_back[1]()
                self._room_back = None
        if phase == "forward":
            self._passes_began = time.perf_counter()
        if phase == "reduce":
            if step in self._slow:
                keep_busy((self._slow[step] - 1) * (time.perf_counter() - self._passes_began))
            for number, fault in self._due("backward", step):  # left where this rank computes no loss (a pipeline)
                self._strike(number, fault, step, phase)
        for number, fault in self._due(phase, step):
            if fault.kind not in OF_A_FILE:  # those strike as a file is opened
                self._strike(number, fault, step, phase)

    def news(self) -> list[StruckFault]:
        """Return the strikes, of all ranks and starts, that are neither in the journal nor told before; on rank 0."""
        if self._rank:
            return []
        strikes = self._ledger.strikes()
        if self._told is None and strikes:
            files = [path for _, path in starts_of(self._run_dir)]
            lines = [line for path in files for line in records_of_kind(path, InjectedRecord.KIND)]
            injected = [read(InjectedRecord, line) for line in lines]
            self._told = {(each.fault, each.step, each.rank, each.struck) for each in injected}
        told = self._told or set()
        new = [strike for strike in strikes if (*strike.key, strike.time) not in told]
        if strikes:
            self._told = told | {(*strike.key, strike.time) for strike in new}
        return new

    # ---- whether ---------------------------------------------------------------------------------------------------

    def _due(self, phase: str, step: int) -> list[Numbered]:
        return [
            (number, fault)
            for number, fault in self._by_phase.get(phase, ())
            if number not in self._here
            and is_due(fault, number, self._plan.seed, step)
            and is_struck(fault, number, self._plan.seed, step, self._rank, self._world_size)
        ]

    def _noted(self, number: int, fault: FaultSpec, step: int, phase: str) -> bool:
        # A fault that waits for something to strike may meet it in any step, but is one strike.
        at = fault.step if fault.kind in LASTING and not fault.rate else step
        noted = self._ledger.note(number, fault, self._rank, at, phase)
        if noted:
            self._here.add(number)
        return noted

    # ---- what ------------------------------------------------------------------------------------------------------

    def _strike(self, number: int, fault: FaultSpec, step: int, phase: str) -> None:
        if fault.kind in DAMAGED:
            path = newest_file(self._checkpoints)
            if path is not None and self._noted(number, fault, step, phase):
                damage(path, fault.kind, self._draw(number, step, "byte"))
        elif not self._noted(number, fault, step, phase):
            return
        elif fault.kind == "slow":
            self._slow |= dict.fromkeys(range(step, step + fault.steps), fault.factor)
            if phase == "reduce":
                keep_busy((fault.factor - 1) * (time.perf_counter() - self._passes_began))
        elif fault.kind == "journal_full":
            self._room_back = (step + fault.steps, without_room(self._run_dir))
        elif fault.kind in VALUES:
            tensor = self._target(fault.target, self._draw(number, step, "tensor"))
            if tensor is not None:
                spoil(tensor, fault.kind, fault.bit, self._draw(number, step, "at"), self._draw(number, step, "bit"))
        else:
            act(fault, number, self._run_dir)

    def _draw(self, number: int, step: int, what: str) -> float:
        return draw(self._plan.seed, number, step, what)

    def _target(self, target: str, drawn: float) -> torch.Tensor | None:
        """Return a tensor of the model, of its gradients or of the optimizer; None where this rank has none."""
        weights = [weight for turn in self._stepper.turns for weight in turn.parameters]
        state = self._stepper.optimizer.state
        found = {
            "weight": lambda: weights,
            "gradient": lambda: [weight.grad for weight in weights],
            "optimizer": lambda: [value for weight in weights for value in state.get(weight, {}).values()],
        }[target]()
        held = [one for one in found if isinstance(one, torch.Tensor) and one.is_floating_point() and _size(one) > 1]
        return held[int(drawn * len(held))] if held else None

    def _in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Strike as a backward pass begins; return the gradient of the loss, which a fault may have spoiled."""
        step = self._step
        for number, fault in self._due("backward", step):
            if fault.kind in VALUES and fault.target == "gradient":
                if self._noted(number, fault, step, "backward"):
                    gradient = spoiled(gradient, fault.kind, fault.bit, 0.0, self._draw(number, step, "bit"))
            else:
                self._strike(number, fault, step, "backward")
        return gradient

    def _hindered(self) -> tuple[str, float]:
        """Return the kind of fault that the next file of a checkpoint meets, or nothing, and its seconds."""
        for number, fault in self._due("save", self._step):
            if fault.kind in OF_A_FILE and self._noted(number, fault, self._step, "save"):
                return fault.kind, fault.seconds
        return "", 0.0


@dataclass(frozen=True)
class StruckObjective:
    """An objective whose backward passes begin with a call of `begins`, which returns the gradient of the loss."""

    objective: Any
    begins: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        loss_sum, weight = self.objective(model, batch)
        if torch.is_grad_enabled() and loss_sum.requires_grad:
            loss_sum.register_hook(self.begins)
        return loss_sum, weight


def _size(tensor: torch.Tensor) -> int:
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()

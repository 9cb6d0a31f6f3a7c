"""Runs of a tiny decoder that save, for tests: in this process, on however many ranks there are."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task, plan_of
from torch import nn

from paceline.checkpoint import list_checkpoints, verify_checkpoint
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.survive.health import HealthSpec
from paceline.spec.task import Task
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

STEPS = 8
ALONE = World(0, 1, 0, torch.device("cpu"))


def here() -> World:
    if not dist.is_initialized():
        return ALONE
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def training(
    run_dir: Path,
    every: int = 2,
    layout: Layout | None = None,
    world: World | None = None,
    cluster: ClusterSpec | None = None,
    health: HealthSpec | None = None,
    task: Task | None = None,
    precision: str = "fp32",
    **checkpoints: Any,
) -> Training:
    world = world or here()
    plan = plan_of(layout or Layout(dp_shard=world.size), batch=6, precision=precision)
    memory_every = checkpoints.pop("memory_every", None)
    in_memory = Amount(memory_every, "steps") if memory_every else None
    spec = CheckpointsSpec(**{"asynchronous": "on", "memory_every": in_memory, **checkpoints})
    run = RunSpec(
        checkpoint_every=Amount(every, "steps"), evaluate_every=None, check_every=None, keep_last=9, checkpoints=spec,
        health=health or HealthSpec(),
    )  # fmt: skip
    task = task or decoder_task(stop=Amount(STEPS, "steps"))
    brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    return Training(Spec(task=task, cluster=cluster or ClusterSpec(learn=False), run=run), brief, world, run_dir)


def through(run: Training, after: Callable[[int], None] = lambda step: None) -> None:
    for batch in run:
        after(run.step(batch).step)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_journal(run_dir) if record["kind"] == kind]


def values_of(run_dir: Path) -> dict[int, dict[str, str]]:
    """Return the digests of the files with values, by step."""
    found = {}
    for each in list_checkpoints(run_dir / "checkpoints").complete:
        verify_checkpoint(each.path)
        files = each.manifest.files
        found[each.manifest.step] = {name: files[name].sha256 for name in files if name != "manifest.json"}
    return found


class Normed(nn.Module):
    """Predicts the next token from the one before, normalised by running statistics that each forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, 16), nn.SyncBatchNorm(16)
        self.head = nn.Linear(16, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))


def normed() -> nn.Module:
    return Normed()


class Counted:
    """Lowers the learning rate with each step that it is called for, and with each that it is told is done."""

    def __init__(self) -> None:
        self.begun = self.done = 0

    def before_step(self, moment: Any) -> dict[str, float]:
        self.begun += 1
        return {"lr": 3e-3 * 0.9 ** (self.begun + self.done)}

    def after_step(self, moment: Any) -> None:
        self.done += 1

    def state(self) -> list[int]:
        return [self.begun, self.done]

    def load(self, state: list[int]) -> None:
        self.begun, self.done = state


class DiesInAStepThatIsMadeAgain:
    """Ends the process of rank 1 as it begins a step that it has begun before."""

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def before_step(self, moment: Any) -> None:
        if moment.step in self._begun and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        self._begun.add(moment.step)


class LeavesAsIfDone:
    """Ends the process of rank 1 once, before its step 4, with the code of a process that is done."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def before_step(self, moment: Any) -> None:
        if moment.step == 4 and os.environ["RANK"] == "1" and not self._mark.exists():
            self._mark.touch()
            os._exit(0)


class WaitsInALock:
    """Has rank 1 wait once, in the passes of its step 6, for a lock that nobody frees."""

    def __init__(self, mark: Path) -> None:
        self._mark, self._waits = mark, False

    def model(self) -> nn.Module:
        """Return the model whose passes wait."""
        made = Dropout()
        made.register_forward_pre_hook(lambda *given: threading.Event().wait() if self._is_to_wait() else None)
        return made

    def before_step(self, moment: Any) -> None:
        self._waits = moment.step == 6 and os.environ["RANK"] == "1" and not self._mark.exists()

    def _is_to_wait(self) -> bool:
        if self._waits:
            self._mark.touch()
        return self._waits

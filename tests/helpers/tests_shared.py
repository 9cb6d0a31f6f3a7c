"""Small tasks that the tests of the run floor share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.run.process.world import World, join_world
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.optimizer.schedule import learning_rate
from paceline.units import Amount

SEQ_LEN = 16
VOCAB = 61  # a prime: rows of the embedding are uneven over any number of shards


class PaddedText:
    """A source of token rows of which a pseudo-random part of the labels is masked: every row weighs differently."""

    samples, items_per_sample, unit, vocab, fingerprint = 1000, SEQ_LEN, "tokens", VOCAB, "padded-text"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [self._row(int(i)) for i in ids]
        return {"tokens": torch.stack([r[0] for r in rows]), "labels": torch.stack([r[1] for r in rows])}

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng(index)
        # A walk with small steps: there is something to learn.
        walk = np.cumsum(generator.integers(0, 3, SEQ_LEN + 1)) % VOCAB
        tokens, labels = torch.from_numpy(walk[:-1].copy()), torch.from_numpy(walk[1:].copy())
        labels[: int(generator.integers(0, SEQ_LEN - 1))] = -100
        return tokens, labels


class Dropout(nn.Module):
    """A small network with dropout, a tied weight and a parameter that gets no gradient."""

    def __init__(self, width: int = 12, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def decoder_task(**changes: Any) -> Task:
    """Return a decoder small enough for a hundred steps in a test."""
    task = Task(
        name="test",
        model=ModelSpec("llama-1m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=40, vocab=VOCAB),
        data=PaddedText(),
        optimizer=OptimizerSpec(lr=3e-3, eps=1e-6),
        schedule=ScheduleSpec(kind="constant"),
        global_batch=Amount(13, "samples"),
        stop=Amount(50, "steps"),
    )
    return dataclasses.replace(task, **changes)


def plan_of(layout: Layout, batch: int = 13, micro_batch: int = 2, **changes: Any) -> Plan:
    """Return a plan for a batch that does not divide evenly."""
    return Plan(
        layout=layout,
        micro_batch=micro_batch,
        accumulation=accumulation_for(batch, layout.data_degree, micro_batch),
        batch_samples=batch,
        **changes,
    )


def coarse_plan(layout: Layout, batch: int = 13, micro_batch: int = 3, **changes: Any) -> Plan:
    """Return a plan of fewer micro-batches, as uneven: of two ranks, one has no row in the last."""
    return plan_of(layout, batch, micro_batch, **changes)


def device_here() -> torch.device:
    """Return where a test's processes compute: on the CPU, and on the GPU where NCCL joins them (distributed.py)."""
    on_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def world_here() -> World:
    """Join the processes of a test where they compute."""
    return join_world(device_here().type, threads=1)


def run_steps(task: Task, plan: Plan, steps: int, world: World | None = None) -> tuple[list[StepStats], Assembled]:
    """Assemble the task under the plan in this world and run steps; every rank calls it."""
    world = world or world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    stats = []
    for step in range(1, steps + 1):
        lr = learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        stats.append(built.stepper.step(stream.at((step - 1) * plan.batch_samples), lr))
    return stats, built

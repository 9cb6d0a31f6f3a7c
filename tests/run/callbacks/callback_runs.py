"""Runs of a tiny decoder with callbacks, for tests: in this process, on however many ranks there are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

ALONE = World(0, 1, 0, torch.device("cpu"))


def world_here() -> World:
    if not dist.is_initialized():
        return ALONE
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def brief_for(layout: Layout, steps: int, batch: int = 6, seq_len: int = SEQ_LEN) -> Brief:
    plan = plan_of(layout, batch=batch)
    return Brief(plan, steps, seq_len, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())


def run_with(run_dir: Path, steps: int, *callbacks: Any, layout: Layout | None = None, **task: Any) -> Training:
    """Return a run of so many steps that saves every two steps, with callbacks."""
    world = world_here()
    made = decoder_task(stop=Amount(steps, "steps"), callbacks=callbacks, **task)
    run = RunSpec(checkpoint_every=Amount(2, "steps"), evaluate_every=None, check_every=None)
    spec = Spec(task=made, cluster=ClusterSpec(learn=False), run=run)
    return Training(spec, brief_for(layout or Layout(dp_shard=world.size), steps), world, run_dir)


def through(run: Training) -> None:
    for batch in run:
        run.step(batch)

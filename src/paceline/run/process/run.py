"""A run to its end in this process, as one rank of the world that the environment describes."""

from __future__ import annotations

from paceline.run.loop.training import Training
from paceline.run.process.brief import Brief
from paceline.run.process.world import join_world, leave_world
from paceline.run.record.tensorboard import asked_sinks
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec


def train_here(spec: Spec, brief: Brief) -> None:
    """Train a spec as its brief says. Every rank of the brief's plan calls it."""
    world = join_world(brief.device, brief.threads)
    training = Training(spec, brief, world, run_directory(spec), asked_sinks(spec.run))
    for batch in training:
        training.step(batch)
    world.wait()
    leave_world()

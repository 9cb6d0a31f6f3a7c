"""A run to its end in this process, which is one rank of the run's world."""

from __future__ import annotations

from paceline.lock import RunLock, take
from paceline.observe.exports.tensorboard import asked_sinks
from paceline.run.loop.training import Training
from paceline.run.process.brief import Brief
from paceline.run.process.place import Place
from paceline.run.process.world import World, join_world, leave_world
from paceline.run.survive.points import points_of
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.supervise.trace_signal import traced_by_signal


def train_here(
    spec: Spec, brief: Brief, place: Place | None = None, lock: RunLock | None = None, world: World | None = None
) -> None:
    """Train a spec as its brief says. Every rank of the brief's plan calls it, with its own place.

    `lock` is the run directory's; rank 0 takes it where its caller has not. `world` is this process's, if it has one.
    """
    run_dir = run_directory(spec)
    if world is None and place is not None:
        points_of(spec.run, run_dir, place.rank, place.world_size).starting("rendezvous", run_dir)
    world = world or join_world(brief.device, brief.threads, place, spec.run)
    if lock is None and world.is_first:
        lock = take(run_dir)
    training = Training(spec, brief, world, run_dir, asked_sinks(spec.run), lock)
    with traced_by_signal(run_dir):
        for batch in training:
            training.step(batch)
    training.world.wait()
    leave_world()

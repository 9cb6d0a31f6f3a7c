"""`paceline train` in a process that a launcher has started as one rank, with nobody to supervise it."""

from __future__ import annotations

from collections.abc import Callable

from paceline.launch.run import train_here
from paceline.session.begin import join_peers
from paceline.session.closing import say_report
from paceline.session.watch.alerting import alerts_beside
from paceline.session.watch.exporting import exports_beside
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.supervise.logs.tee import kept_here
from paceline.supervise.parent import name_process
from paceline.supervise.told.place import Place

Say = Callable[[str], None]


def train_as_rank(spec: Spec, place: Place, say: Say) -> None:
    """Train as the rank of this place, to the run's end. The first rank watches over the run, and reports."""
    name_process(f"rank-{place.rank}-paceline")
    world, brief, lock = join_peers(spec, place)
    run_dir = run_directory(spec)
    try:
        with kept_here(run_dir, spec.run, place.rank):
            if world.is_first:
                with alerts_beside(spec, say, supervises=False), exports_beside(spec, say):
                    train_here(spec, brief, place, lock, world)
            else:
                train_here(spec, brief, place, lock, world)
    finally:
        if lock is not None and not lock.is_lost:
            say_report(run_dir, say)

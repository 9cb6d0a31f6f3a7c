"""`paceline train` among processes that others have started: as the supervisor of a node, or as one rank."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.session.nodes.attendance import Attended, attend_run
from paceline.session.nodes.launched import as_node, is_attended
from paceline.spec.load import Spec
from paceline.supervise.blame import Outcome
from paceline.supervise.told.place import Place

Say = Callable[[str], None]


def train_among_others(spec: Spec, place: Place | None, say: Say) -> Outcome:
    """Train with the processes that others have started; return how the run has ended, which its coordinator prints.

    `place` is where a launcher has put this process, None where somebody has started it once on each node.
    """
    if place is None:
        return _outcome(attend_run(spec, say))
    if is_attended(spec, place):
        own, seat = as_node(spec, place, os.environ)
        return _outcome(attend_run(own, say, seat))
    if spec.run.nodes.count > 1:
        raise ConfigError(
            f"run.nodes.count = {spec.run.nodes.count} in a process that is one of {place.world_size} ranks",
            "what a launcher has started is a node only where it supervises: run.recovery.supervise, and retries",
            "leave out --nodes, or start `paceline train` once on each node without the launcher",
        )
    from paceline.session.nodes.as_rank import train_as_rank

    train_as_rank(spec, place, say)
    return Outcome(0)


def _outcome(attended: Attended) -> Outcome:
    return Outcome(attended.exit_code, dict(attended.told) if attended.told else None, is_printed=True)

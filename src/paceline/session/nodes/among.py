"""`paceline train` among processes that others have started: as the supervisor of a node, or as one rank."""

from __future__ import annotations

import os
from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.session.nodes.attendance import attend_run
from paceline.session.nodes.launched import as_node, is_attended
from paceline.spec.load import Spec
from paceline.supervise.told.place import Place

Say = Callable[[str], None]


def train_among_others(spec: Spec, place: Place | None, say: Say) -> int:
    """Train with the processes that others have started; return the exit code.

    `place` is where a launcher has put this process, None where somebody has started it once on each node.
    """
    if place is None:
        return attend_run(spec, say).exit_code
    if is_attended(spec, place):
        own, seat = as_node(spec, place, os.environ)
        return attend_run(own, say, seat).exit_code
    if spec.run.nodes.count > 1:
        raise ConfigError(
            f"run.nodes.count = {spec.run.nodes.count} in a process that is one of {place.world_size} ranks",
            "what a launcher has started is a node only where it supervises: run.recovery.supervise, and retries",
            "leave out --nodes, or start `paceline train` once on each node without the launcher",
        )
    from paceline.session.nodes.as_rank import train_as_rank

    train_as_rank(spec, place, say)
    return 0

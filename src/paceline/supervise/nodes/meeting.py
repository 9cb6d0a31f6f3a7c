"""Where the nodes of a run meet: `RUN/nodes.json` names the coordinator's address, and the secret of the run.

Whoever holds the run's lock writes it, so that there is one coordinator at a time, wherever it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.durable import publish
from paceline.errors import StorageError

NAME = "nodes.json"
UNFINISHED = f".{NAME}-"  # and the number of the process that writes
# A coordinator's exit codes: another has the lock; it has lost the most of its nodes, or its own leaves the run.
NOT_ELECTED, STEPPED_DOWN = 77, 78


@dataclass(frozen=True)
class Meeting:
    """Where the coordinator is (address, node, process), and the secret by which it and the nodes know each other.

    Where it has gone with its node, at a notice: why, and after which world of which these ranks have left too.
    """

    host: str
    port: int
    secret: str
    node: int
    process: int
    left: str = ""
    left_world: int = 0
    left_ranks: tuple[int, ...] = ()

    def follows(self, before: Meeting | None) -> bool:
        """Return whether this is another coordinator than the one before, and not that one with word that it goes."""
        return before is None or self.secret != before.secret

    @property
    def address(self) -> tuple[str, int]:
        """The address as sockets take it."""
        return self.host, self.port


def announce(run_dir: Path, host: str, port: int, node: int) -> Meeting:
    """Leave where the coordinator is, for its user's eyes alone, and return it. Raises StorageError."""
    meeting = Meeting(host, port, secrets.token_hex(16), node, os.getpid())
    with contextlib.suppress(OSError):  # no better: what cannot be written is told
        for left in run_dir.glob(f"{UNFINISHED}*"):  # by coordinators that have ended while they wrote
            left.unlink(missing_ok=True)
    _write(run_dir, meeting)
    return meeting


def leave(run_dir: Path, meeting: Meeting, world: int, ranks: Collection[int], because: str) -> None:
    """Leave word that the coordinator goes with its node, after a world of which these ranks have left too."""
    _write(run_dir, replace(meeting, left=because, left_world=world, left_ranks=tuple(sorted(ranks))))


def _write(run_dir: Path, meeting: Meeting) -> None:
    unfinished = run_dir / f"{UNFINISHED}{os.getpid()}"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(meeting), file)
            publish(unfinished, run_dir / NAME)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"cannot say in {run_dir} where the coordinator is", str(error)) from error


def find_meeting(run_dir: Path) -> Meeting | None:
    """Return where the coordinator was last, or None."""
    try:
        told = json.loads((run_dir / NAME).read_text())
        return Meeting(**{**told, "left_ranks": tuple(told.get("left_ranks", ()))})  # as it was written: a list is none
    except (OSError, ValueError, TypeError):
        return None

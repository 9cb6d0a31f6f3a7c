"""Where the nodes of a run meet: `RUN/nodes.json` names the coordinator's address, and the secret of the run.

Whoever holds the run's lock writes it, so that there is one coordinator at a time, wherever it runs.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.durable import publish
from paceline.errors import StorageError

NAME = "nodes.json"
NOT_ELECTED, STEPPED_DOWN = 77, 78  # a coordinator's exit codes: another has the lock; it lost the most of its nodes


@dataclass(frozen=True)
class Meeting:
    """Where the coordinator is (address, node, process), and the secret by which it and the nodes know each other."""

    host: str
    port: int
    secret: str
    node: int
    process: int

    @property
    def address(self) -> tuple[str, int]:
        """The address as sockets take it."""
        return self.host, self.port


def announce(run_dir: Path, host: str, port: int, node: int) -> Meeting:
    """Leave where the coordinator is, for its user's eyes alone, and return it. Raises StorageError."""
    meeting = Meeting(host, port, secrets.token_hex(16), node, os.getpid())
    unfinished = run_dir / f".{NAME}-{os.getpid()}"
    try:
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(meeting), file)
        publish(unfinished, run_dir / NAME)
    except OSError as error:
        raise StorageError(f"cannot say in {run_dir} where the coordinator is", str(error)) from error
    return meeting


def find_meeting(run_dir: Path) -> Meeting | None:
    """Return where the coordinator was last, or None."""
    try:
        return Meeting(**json.loads((run_dir / NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return None

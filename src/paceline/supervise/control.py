"""The control channel: survivors of a lost rank stand by their supervisor, and hear which world they are in next.

A Unix socket in the supervisor's folder. A rank connects when a peer has gone, says what it holds, and waits for its
place in the next generation, or to hear that it has none. No torch on either side.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.supervise.again.held_state import HeldState
from paceline.supervise.lines import Lines, is_ready

CALL_NAME = "call"  # a file in a generation's folder: ranks are to stand by at the next step boundary
ABORT_NAME = "abort"  # another: those that wait for a dead peer are to wait no longer
CONTROL_VARIABLE = "PACELINE_CONTROL"
LONGEST_PATH = 100  # the system's limit for the name of a socket is some bytes more


@dataclass(frozen=True)
class Standing:
    """A rank that waits for its next world, and what it holds of the state."""

    rank: int
    held: HeldState
    lines: Lines

    def answer(self, message: Mapping[str, object]) -> None:
        """Tell the rank where to go on; an empty message says that the rank does not."""
        with contextlib.suppress(OSError):  # it has died meanwhile, which its ending tells
            self.lines.send(message)
        self.lines.end.close()


class Control:
    """The supervisor's end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "control"
        self._server: socket.socket | None = None
        self._unnamed: list[Lines] = []
        self._standing: dict[int, Standing] = {}
        if len(str(self.path)) < LONGEST_PATH:
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(str(self.path))
            self._server.listen(128)

    def environ(self) -> dict[str, str]:
        """Return what the environment of ranks says that may stand by."""
        return {CONTROL_VARIABLE: str(self.path)} if self._server else {}

    def look(self, generation: int) -> Mapping[int, Standing]:
        """Return the ranks of a generation that stand by now."""
        with contextlib.suppress(OSError):  # no descriptor is to be had now: they are heard at a later look
            while self._server and is_ready(self._server, select.POLLIN, 0.0):
                self._unnamed.append(Lines(self._server.accept()[0]))
        for lines in [*self._unnamed]:
            with contextlib.suppress(EOFError):
                told = lines.take(0.0)
                if told is None:
                    continue
                if told["generation"] == generation:
                    self._standing[told["rank"]] = Standing(told["rank"], HeldState.of(told["held"]), lines)
            self._unnamed.remove(lines)
        return self._standing

    def dismiss(self, ranks: Mapping[int, Mapping[str, object]] | None = None) -> None:
        """Answer all that stand by: each with its message, or that it does not go on."""
        for rank, standing in self._standing.items():
            standing.answer((ranks or {}).get(rank, {}))
        self._standing = {}

    def close(self) -> None:
        """Answer all that stand by, and close the channel."""
        self.dismiss()
        if self._server is not None:
            self._server.close()


class Waits:
    """A rank that stands by: it has said what it holds, and hears where it goes on."""

    def __init__(self, rank: int, generation: int, held: HeldState) -> None:
        """Say so at once, and wait for nothing: the supervisor plans the next world meanwhile."""
        self._lines: Lines | None = None
        path = os.environ.get(CONTROL_VARIABLE)
        if not path:
            return
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(path)
            lines = Lines(end)
            lines.send({"rank": rank, "generation": generation, "held": held.as_dict()})
            self._lines = lines
        except OSError:
            end.close()

    def answer(self) -> dict[str, Any]:
        """Wait for the supervisor's answer and return it: empty where this rank does not go on."""
        if self._lines is None:
            return {}
        with self._lines.end, contextlib.suppress(OSError, EOFError):
            return self._lines.take() or {}
        return {}

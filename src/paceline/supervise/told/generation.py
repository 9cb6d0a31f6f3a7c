"""Generation: one world of a run's processes, from the world's start to its end, and why the world came about.

A run that loses a process goes on in the next generation: a world with a number, a rendezvous and a fence of its own.
Plain data, as the supervisor leaves it for the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.spec.journal.kinds import DecisionRecord

GENERATION_VARIABLE, GENERATION_FILE = "PACELINE_GENERATION", "generation.json"

# How a generation comes about, the cheapest first.
REFORMED, FORKED, RESTARTED, FIRST = "reform", "standby", "restart", "start"

FROM_RANKS = "ranks"  # where survivors bring their state together: nowhere, it goes from rank to rank


@dataclass(frozen=True)
class JudgedSoFar:
    """What a call of a run has met so far: whoever judges its next failures goes on from there."""

    starts: int = 0  # of the run, before this call
    lost: int = 0  # failures of ranks that were ended from outside
    failed: int = 0  # failures of the program
    furthest: int = 0  # the last step that any world has made
    fruitless: int = 0  # worlds in a row that have come no further
    has_made_steps: bool = False
    last_failure: tuple[str, int] | None = None  # of the program: its place, and the step before it

    @staticmethod
    def of(told: Mapping[str, Any]) -> JudgedSoFar:
        """Return it as JSON has it."""
        last = told["last_failure"]
        return JudgedSoFar(**{**told, "last_failure": (str(last[0]), int(last[1])) if last else None})


@dataclass(frozen=True)
class Generation:
    """A generation's number, the rung by which it came about, and what its first rank records of that.

    `moments` are `passed_seconds` of: `fault` (when every rank was last known to be well), `noticed` and `ended` (when
    nothing of the old world was left, or it was ready to go on), of the machine that `clock` tells of,
    and how its clock stood. `reached` is the last step on record. `begun_after` are the seconds since the supervisor
    began, and `usd_before` what the worlds since then have cost: limits of time and money count from there. So do the
    budgets of failures from `judged`, for a coordinator that takes over.
    """

    number: int = 1
    rung: str = FIRST
    from_world: int = 0
    to_world: int = 0
    reached: int = 0
    begun_after: float = 0.0
    usd_before: float = 0.0
    judged: JudgedSoFar = JudgedSoFar()
    fault: Mapping[str, Any] = field(default_factory=dict)  # fields of `FaultRecord`, where known
    moments: Mapping[str, float] = field(default_factory=dict)
    clock: Mapping[str, Any] = field(default_factory=dict)
    decisions: tuple[DecisionRecord, ...] = ()  # of the supervisor, for this generation
    lasting: tuple[DecisionRecord, ...] = ()  # those that hold for all of them, and are recorded once
    is_called: bool = False  # nothing has failed: the ranks were called to a world of another size
    # The folder in which survivors bring their state together, or FROM_RANKS, and after how many steps it is; empty
    # where an older state is restored instead.
    rescue: str = ""
    rescue_step: int = 0
    rescue_world: int = 0  # in which they have made it: a rank may hold the state of another; 0 where it is one's own
    pieces: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by rank: files of parts of it, in memory

    def write(self, folder: Path) -> dict[str, str]:
        """Leave the generation in a file and return what the environment of its ranks says of it."""
        path = folder / GENERATION_FILE
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))
        return {GENERATION_VARIABLE: str(path)}


def read_generation(path: Path) -> Generation:
    """Return the generation that `write` left."""
    data = json.loads(path.read_text())
    decided = {name: tuple(DecisionRecord(**each) for each in data[name]) for name in ("decisions", "lasting")}
    return Generation(**{**data, **decided, "judged": JudgedSoFar.of(data["judged"])})


def take_generation() -> Generation:
    """Return the generation that a supervisor left for this process; a first one where there is none.

    It is given once: a second run of the process was not interrupted by what the first was.
    """
    path = os.environ.pop(GENERATION_VARIABLE, None)
    return read_generation(Path(path)) if path else Generation()

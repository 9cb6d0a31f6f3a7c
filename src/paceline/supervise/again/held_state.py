"""What a survivor says of the state that it holds: the step of the state, and whether peers hold the same state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NONE_HELD = -1  # in place of a step: the rank was inside an update, or its state has changed
AGREED, DUE, OPEN = "agreed", "due", "open"  # compared after this step; it was to be; no comparison was due


@dataclass(frozen=True)
class HeldState:
    """A rank's part of the state after `step` steps, as it is told to the supervisor.

    Ranks that hold the same part have the same `digest`. `compared` is one of AGREED, DUE and OPEN, and `agreed_step`
    the last step whose state was compared, 0 where none was. `changed` names what no longer has the bits on which the
    ranks had agreed: such a state is none. `generation` and `rank` say in which world it was made, and where there: a
    survivor keeps its state through worlds that come to nothing.
    """

    step: int = NONE_HELD
    digest: str = ""
    compared: str = OPEN
    agreed_step: int = 0
    changed: str = ""
    generation: int = 0
    rank: int = 0

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> HeldState:
        """Return what `as_dict` gave."""
        return cls(**told)

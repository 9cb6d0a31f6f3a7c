"""RecoverySpec: the `[run.recovery]` table of a spec. What is tried when processes of a run are lost, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.fields import option


@dataclass(frozen=True)
class RecoverySpec:
    """How often a run goes on by itself after a fault, in which processes, and on how many devices."""

    retries: int = option(
        3, "how often one call goes on after a failure of the program; 0 ends it at the first", minimum=0
    )
    preemption_retries: int = option(
        100, "how often one call goes on after a rank was killed from outside; 0 ends it at the first", minimum=0
    )
    standby: bool = option(
        True, "keep a process that has imported torch, from which ranks are forked; where off, each imports it anew"
    )
    reform: bool = option(
        True, "let the ranks that are left form the next world in their own processes, instead of ending them"
    )
    min_devices: int = option(
        0, "fewest devices that a run goes on with when some are lost; 0 keeps the number that it began with", minimum=0
    )
    notice: float = option(30.0, "from a preemption notice to the end of the machine", quantity="duration", above=0.0)
    notice_file: str = option("", "a file whose appearance is a preemption notice")
    notice_url: str = option("", "a URL that answers with status 200 and a text, not NONE, as a preemption notice")

    @property
    def may_go_on(self) -> bool:
        """Whether any fault is survived."""
        return bool(self.retries or self.preemption_retries)

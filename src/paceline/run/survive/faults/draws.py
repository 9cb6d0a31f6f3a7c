"""When and whom a fault strikes: a pure function of its plan, the step and the number of ranks."""

from __future__ import annotations

import hashlib

from paceline.spec.survive.faults import OF_A_FILE, FaultSpec

AT_A_START = ("rendezvous", "load")  # where a fault's `step` is the number of the start
LASTING = ("corrupt", "truncate", *OF_A_FILE)  # strike as soon as there is something to strike


def draw(seed: int, *what: object) -> float:
    """Return a number in [0, 1) that depends on the seed and on what it is drawn for, and on nothing else."""
    text = ":".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


def is_due(fault: FaultSpec, number: int, seed: int, step: int) -> bool:
    """Return whether fault `number` of a plan is meant for this step, on whichever rank."""
    if fault.rate and draw(seed, number, step, "strikes") >= fault.rate:
        return False
    if fault.place in AT_A_START:
        return fault.step in (0, step)
    if fault.rate:
        return step >= fault.step
    return step >= fault.step if fault.kind in LASTING else step == fault.step


def is_struck(fault: FaultSpec, number: int, seed: int, step: int, rank: int, world_size: int) -> bool:
    """Return whether a rank is the one, or one of those, that the fault strikes in this step."""
    if fault.everywhere:
        return True
    if fault.rank >= 0:
        return rank == fault.rank
    # What waits for something to strike must wait on one rank: its step is not known beforehand.
    at = fault.step if fault.kind in LASTING and not fault.rate else step
    return rank == int(draw(seed, number, at, "rank") * world_size)

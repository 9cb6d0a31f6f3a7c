"""Steady steps: those whose time tells what a step of a plan takes. The report and what is learnt from runs agree.

The first step of every start warms up; a step with a checkpoint or an evaluation shares its time with that. Every
other step counts, one that an interruption undid too: it took the time that it took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FIRST = "first"
BUSY = ("evaluation", "checkpoint")  # kinds of records; of a step with both the later one is named
Step = tuple[float, Any]  # the number of its start, and its own as the journal has it


def unsteady(steps: Iterable[Step], busy: Iterable[tuple[str, Step]]) -> dict[Step, str]:
    """Return the steps that do not count, and why: FIRST, or one of BUSY.

    `steps` are all steps of the journal, `busy` the steps of its records of the kinds BUSY.
    """
    found = dict(sorted(((step, kind) for kind, step in busy), key=lambda pair: BUSY.index(pair[1])))
    first: dict[float, object] = {}
    for start, number in steps:
        first[start] = min(number, first.get(start, number))
    return found | dict.fromkeys(first.items(), FIRST)

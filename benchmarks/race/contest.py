"""A contest: loops that do the same work take turns of a few steps, each measured against the first in the same round.

The order rotates from round to round, so that what else the machine does hits all alike. The second entry should be the
first once more: how far its ratio is from 1 is what the measurement cannot see.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Spread, median_of

from race.pacing import Contender, Turn

# Largest relative differences of losses that count as equal work, after the first round and after the last: in the
# course of many steps the choice of experts turns differences of rounding into visible ones.
SAME_WORK, SAME_COURSE = 1e-5, 1e-3
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Entry:
    """A loop and its arguments; it gets a Pacer before them."""

    name: str
    loop: Callable[..., None]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One contender's result in one setting."""

    contender: str
    setting: str
    steps_per_second: float  # median round
    ratio: Spread  # wall seconds over the first entry's, of the same round
    cpu_ratio: Spread  # CPU seconds over the first's: blind to waiting, and to who else uses the machine
    loss: float  # of the last step
    same_work: bool


def compete(setting: str, entries: Sequence[Entry], processes: int, rounds: int, steps: int) -> list[Row]:
    """Return one row per entry. Every entry runs in `processes` ranks; a turn has `steps` steps."""
    print(f"measuring {setting}: {', '.join(entry.name for entry in entries)}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="contest-")))
        running = []
        for entry in entries:
            contender = Contender(entry.name, entry.loop, dict(entry.arguments), processes, _free_port(), folder)
            stack.callback(contender.close)
            running.append(contender)
        for contender in running:
            contender.ready()
        for contender in running:
            contender.turn(WARM_UP_STEPS)
        turns = [_round(running, shift, steps) for shift in range(rounds)]
    return [_row(entry.name, entries[0].name, setting, turns, steps) for entry in entries]


def _round(running: list[Contender], shift: int, steps: int) -> dict[str, Turn]:
    """Let everyone run once, starting with another one each time."""
    first = shift % len(running)
    return {contender.name: contender.turn(steps) for contender in running[first:] + running[:first]}


def _row(name: str, baseline: str, setting: str, rounds: list[dict[str, Turn]], steps: int) -> Row:
    seconds = median_of([turns[name].seconds / steps for turns in rounds]).median
    ratio = median_of([turns[name].seconds / turns[baseline].seconds for turns in rounds])
    cpu_ratio = median_of([turns[name].cpu_seconds / turns[baseline].cpu_seconds for turns in rounds])
    same = all(
        math.isclose(turns[name].loss, turns[baseline].loss, rel_tol=tolerance)
        for turns, tolerance in ((rounds[0], SAME_WORK), (rounds[-1], SAME_COURSE))
    )
    return Row(name, setting, 1 / seconds, ratio, cpu_ratio, rounds[-1][name].loss, same)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def table(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """Return the rows as a Markdown table; `titles` are what contenders are called in it."""
    lines = [
        "| setting | loop | steps/s | time over the loop by hand | CPU time over it | loss of the last step |",
        "|---|---|---:|---|---|---:|",
    ]
    for row in rows:
        note = "" if row.same_work else " (other work)"
        lines.append(
            f"| {row.setting} | {titles[row.contender]} | {row.steps_per_second:.2f} | {_text(row.ratio)} "
            f"| {_text(row.cpu_ratio)} | {row.loss:.6f}{note} |"
        )
    return "\n".join(lines)


def _text(spread: Spread) -> str:
    if spread.low == spread.high == 1.0:
        return "1"
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"

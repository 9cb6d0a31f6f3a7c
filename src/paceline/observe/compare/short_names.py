"""Names of runs as a chart has room for: what all begin with is left out, and no two names become the same."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

MOST_CHARACTERS = 13
CUT = "…"


def short_names(names: Sequence[str], most: int = MOST_CHARACTERS) -> list[str]:
    """Return the names with at most so many characters, no two alike; numbered where no part tells them apart."""
    common = _beginning(min(names), max(names)) if len(names) > 1 else ""
    shared = len(re.sub(r"[^\W_]*\Z", "", common))  # up to the last sign that is neither letter nor digit
    if max(map(len, names), default=0) <= most:
        shared = 0
    short = [_fit(f"{CUT}{name[shared:]}" if shared > 1 else name, most) for name in names]
    if len(set(short)) == len(short):
        return short
    numbers = [f"{place}." for place, _ in enumerate(names, start=1)]
    return [f"{number} {_fit(name, most - len(number) - 1)}" for number, name in zip(numbers, short, strict=True)]


def _beginning(first: str, last: str) -> str:
    """Return what the first and the last of names in order begin with: all between them do."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(each for each, _ in alike)


def _fit(name: str, most: int) -> str:
    """Return the end of a name: that is where those of a sweep differ."""
    return name if len(name) <= most else f"{CUT}{name[len(name) - most + 1 :]}"

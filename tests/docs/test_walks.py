"""How far a reader walks from a verb of the command line to the code that does the work, as docs/house.md counts it.

Both counts are of the code's text alone, so that anybody gets the same: no run, no machine, and no cut after so many
events, on which the figures of traced walks depended.
"""

from __future__ import annotations

import re
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest
from test_floors import SOURCES, all_imports

WALKS = (
    (Path(__file__).parents[2] / "docs" / "house.md")
    .read_text(encoding="utf-8")
    .partition("## Two walks")[2]
    .partition("## ")[0]
)

# From, to, and the most files of the shortest chain of imports, both ends counted. These fall and do not rise.
CHAINS = (
    ("paceline.cli.train", "paceline.run.loop.step", 5),
    ("paceline.session.fit", "paceline.run.loop.step", 4),
    ("paceline.cli.verify", "paceline.run.loop.step", 6),
    ("paceline.cli.plan", "paceline.plan.cost.time.ring", 5),
    ("paceline.cli.report", "paceline.report.build", 2),
)
MOST_FILES, MOST_RETURNS = (22, 11), (2, 0)  # of the two walks of the page, which fall and do not rise


def chain(start: str, end: str) -> list[str]:
    """Return the shortest chain of imports, of modules that a module starts by name too."""
    before: dict[str, str | None] = {start: None}
    waiting = deque([start])
    while end not in before:
        at = waiting.popleft()
        for of in sorted({found.of for found in all_imports()[at] if found.of in SOURCES} - before.keys()):
            before[of] = at
            waiting.append(of)
    found: list[str] = []
    last: str | None = end
    while last is not None:
        found.append(last)
        last = before[last]
    return found[::-1]


@pytest.mark.parametrize(("start", "end", "most"), CHAINS)
def test_a_verb_is_a_few_files_from_what_it_does(start: str, end: str, most: int) -> None:
    found = chain(start, end)
    assert len(found) <= most, " -> ".join(found)


def stops(walk: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py)`", walk)))


def returns(files: list[str]) -> int:
    """Return how often a walk comes back to a room, a folder of the package's top, that it had left."""
    rooms = [name.partition("/")[0] for name in files]
    moves = [now for last, now in pairwise(rooms) if now != last]
    return len(moves) + 1 - len({rooms[0], *moves})


def test_the_walks_of_the_page_are_short_and_seldom_come_back() -> None:
    _, to_a_step, to_a_line = WALKS.split("\n**")
    files = stops(to_a_step), stops(to_a_line)
    assert all(length > 5 for length in map(len, files))
    for walk, most_files, most_returns in zip(files, MOST_FILES, MOST_RETURNS, strict=True):
        assert len(walk) <= most_files and returns(walk) <= most_returns, walk


def test_coming_back_is_counted() -> None:
    assert returns(["cli/a.py", "cli/b.py", "plan/a.py"]) == 0
    assert returns(["cli/a.py", "plan/a.py", "cli/b.py", "plan/b.py", "run/a.py"]) == 2

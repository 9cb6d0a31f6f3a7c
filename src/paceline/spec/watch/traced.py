"""TraceRequest: which steps of a running job are to be traced. A file in the run's directory, which its ranks look for.

No rank asks another: each reads the same file, and steps are named that all come to after they have read it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.spec.journal.reading import read_tail_step

FRESH_SECONDS = 30.0  # in which a request waits for the ranks to come to its steps, before another may take its place
FOLDER = "traces"
NAME = "request.json"
PREFIX = "paceline: "  # of what Paceline names in a trace
STEPS = 3  # traced where nobody says how many


@dataclass(frozen=True)
class TraceRequest:
    """Steps `first` to `last` on `ranks` (None: all). Without `first`, rank 0 names the next `last` steps.

    With `memory` every allocation is traced too, and tensors that are there are counted before and after.
    """

    last: int = STEPS
    first: int | None = None
    ranks: tuple[int, ...] | None = None
    memory: bool = False
    by: str = "command"  # or signal, page, alert
    number: int = 0  # tells requests apart

    def folder(self, run_dir: Path) -> Path:
        """Return where the files are written, one for each rank."""
        return run_dir / FOLDER / f"steps-{self.first}-{self.last}"

    @property
    def text(self) -> str:
        """The request in words: which steps the trace is of."""
        return (
            f"a trace of steps {self.first} to {self.last}" if self.first is not None else "a trace of the next steps"
        )

    def is_of(self, rank: int) -> bool:
        """Return whether a rank is asked."""
        return self.ranks is None or rank in self.ranks


def ask_for_trace(run_dir: Path, request: TraceRequest) -> TraceRequest:
    """Leave a request where the ranks of a run look for it, in the place of one before, and return it numbered."""
    numbered = dataclasses.replace(request, number=request.number or time.time_ns())
    path = run_dir / FOLDER / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{NAME}.{os.getpid()}")
    part.write_text(json.dumps(dataclasses.asdict(numbered)))
    part.replace(path)
    return numbered


def requested_trace(run_dir: Path) -> TraceRequest | None:
    """Return the newest request, None where there is none. A file that is none of ours is passed over."""
    try:
        told = json.loads((run_dir / FOLDER / NAME).read_text())
        ranks = told["ranks"]
        found = TraceRequest(**{**told, "ranks": None if ranks is None else tuple(map(int, ranks))})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found.last, int) and isinstance(found.number, int) else None


def trace_under_way(run_dir: Path) -> TraceRequest | None:
    """Return the request that another one would take away: its steps are being traced, or are soon; else None.

    One whose steps are far ahead gives way to a newer one.
    """
    asked = requested_trace(run_dir)
    if asked is None:
        return None
    done, is_fresh = read_tail_step(run_dir), time.time_ns() - asked.number < FRESH_SECONDS * 1e9
    if asked.first is None:
        return asked if is_fresh else None
    is_over = done >= asked.last or bool(trace_files(asked.folder(run_dir)))
    return asked if not is_over and (is_fresh or done + 1 >= asked.first) else None


def trace_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return folder / f"rank-{rank}.json.gz"


def trace_files(folder: Path) -> list[Path]:
    """Return the files of all ranks' traces that are in a folder, by rank."""
    return sorted(folder.glob("rank-*.json.gz"), key=lambda path: int(path.name.split("-")[1].split(".")[0]))

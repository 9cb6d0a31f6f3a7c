"""What ranks printed: the ends of the files in a run's folder `logs`. Only files of that folder are read, no links."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

TAIL_BYTES, TAIL_LINES = 64 << 10, 200


@dataclass(frozen=True)
class LogTail:
    """The last lines of what a rank printed."""

    rank: int
    lines: tuple[str, ...]
    is_cut: bool  # whether there is more before them


def tail_of(run_dir: Path, rank: int) -> LogTail | None:
    """Return the end of what a rank printed; None where nothing of it is kept.

    Raises OSError where it cannot be read.
    """
    path = run_dir / "logs" / f"rank-{rank:d}.log"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # a link might lead to a file of somebody else's
            return None
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return None
    cut = size > TAIL_BYTES
    kept = lines[1:] if cut and len(lines) > 1 else lines
    return LogTail(rank, tuple(kept[-TAIL_LINES:]), cut or len(kept) > TAIL_LINES)

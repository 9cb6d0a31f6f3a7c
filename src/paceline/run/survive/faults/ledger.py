"""The ledger of strikes: which faults have struck a run, noted durably before each of them does.

`RUN/faults/` holds a small file for each strike. A process that is killed by a fault has noted the fault before, so
that the process that takes its place does not repeat it. Torch-free.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.durable import sync_folder
from paceline.spec.survive.faults import FaultSpec

FOLDER = "faults"


@dataclass(frozen=True)
class StruckFault:
    """A fault that has struck, or was about to: its number in the plan from 1, what it was, and where."""

    fault: int
    kind: str
    rank: int
    step: int  # of `rendezvous` and `load` the number of the start
    phase: str
    time: float

    @property
    def key(self) -> tuple[int, int, int]:
        """The fault, the step and the rank: what tells a strike from others, but for repetitions."""
        return self.fault, self.step, self.rank


class Ledger:
    """The strikes of a run, over all of its starts and ranks."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def note(self, number: int, fault: FaultSpec, rank: int, step: int, phase: str) -> bool:
        """Return whether the fault may strike now; if so, it is on disk that it has. Raises OSError."""
        others = [strike for strike in self.strikes() if strike.fault == number]
        mine = [strike for strike in others if strike.key == (number, step, rank)]
        if mine and not fault.again:
            return False
        before = len(mine) if fault.again else len({strike.step for strike in others} - {step})
        if fault.times and before >= fault.times:
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{number:03d}-{step:08d}-{rank:04d}.{len(mine)}.json"
        strike = StruckFault(number, fault.kind, rank, step, phase, time.time())
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(strike)).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self.folder)
        return True

    def strikes(self) -> list[StruckFault]:
        """Return all strikes so far, in order of time."""
        return sorted(self._read(), key=lambda strike: (strike.time, strike.key))

    def _read(self) -> Iterator[StruckFault]:
        for path in self.folder.glob("*.json"):
            try:
                yield StruckFault(**json.loads(path.read_text()))
            except (ValueError, TypeError):  # killed while it wrote: the name says what counts
                number, step, rest = path.name.split("-")
                yield StruckFault(int(number), "", int(rest.split(".")[0]), int(step), "", path.stat().st_mtime)

"""The runs that a page shows, read while somebody looks, and drawn no more often than drawing is cheap."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.observe.dash.page_parts import PARTS, RunView
from paceline.observe.live.glance import Glances
from paceline.observe.live.run import LiveRun
from paceline.observe.live.shared_spending import SharedSpending
from paceline.spec.run_files import distinct, is_run, runs_at

READ_SECONDS = 0.8  # of one look: a long journal is read over several, and what is there is shown meanwhile
LOOK_SECONDS, BEHIND_SECONDS = 0.3, 0.02  # between two looks; while a long journal is being read
REST = 10.0  # times what drawing a part took, for which it is not drawn again: a tenth of a core at most
OF_TIME = ("head", "logs", "traces")  # parts that change without a record


@dataclass(frozen=True)
class DrawnPart:
    """A part of a page as it was drawn last."""

    html: str
    digest: str
    version: int
    until: float  # it is not drawn again before, by the monotonic clock


def digest_of(html: str) -> str:
    """Return what tells two drawings apart."""
    return hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=12).hexdigest()


class WatchedRun:
    """One run's journal and its drawn parts, shared by all who look at it."""

    def __init__(self, name: str, run_dir: Path, form: str = "") -> None:
        self.name, self.live, self._form = name, LiveRun(run_dir), form
        self._others = SharedSpending(self.live)
        self._lock = threading.Lock()
        self._parts: dict[str, DrawnPart] = {}
        self._looked = -LOOK_SECONDS

    def look(self, rank: int | None = None) -> dict[str, DrawnPart]:
        """Read what is new and return every part, drawn anew where it has changed and was not just drawn."""
        with self._lock:
            if self.live.is_behind or time.monotonic() - self._looked >= LOOK_SECONDS:
                self.live.refresh(READ_SECONDS)
                self._looked = time.monotonic()
            view = RunView(self.live, time.time(), rank, self.name, self._form, self._others.of)
            return {name: self._part(name, view) for name in PARTS}

    def redraw(self, name: str) -> None:
        """Have a part drawn anew at the next look, however long that took the last time: somebody has changed it."""
        with self._lock:
            self._parts.pop(name, None)

    @property
    def rest_seconds(self) -> float:
        """How long to wait before the next look: hardly at all while there is more to read."""
        return BEHIND_SECONDS if self.live.is_behind else LOOK_SECONDS

    @contextlib.contextmanager
    def read(self) -> Iterator[LiveRun]:
        """Read all that is there, and give the run: it does not change before the block is left."""
        with self._lock:
            self.live.refresh()
            yield self.live

    def _part(self, name: str, view: RunView) -> DrawnPart:
        key = f"{name} {view.rank}" if name == "logs" else name
        known, began = self._parts.get(key), time.monotonic()
        if known is not None and (began < known.until or (known.version == view.run.version and name not in OF_TIME)):
            return known
        html = PARTS[name][1](view)
        ended = time.monotonic()
        made = DrawnPart(html, digest_of(html), view.run.version, ended + REST * (ended - began))
        if len(self._parts) > 4 * len(PARTS):  # the output of many ranks was looked at
            self._parts.clear()
        self._parts[key] = made
        return made


class RunSet:
    """The runs of paths: each a run's directory, or a folder of runs, in which new ones may appear."""

    def __init__(self, paths: Sequence[Path], form: str = "") -> None:
        """Raises ConfigError for a path that is no folder. With `form`, the token of forms, pages may ask runs."""
        self.form = form
        self.paths = [Path(path) for path in paths]
        self.glances = Glances()
        self._watched: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        for path in self.paths:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} holds no run", "there is no such folder",
                    "name runs' directories, or the folder that holds them",
                )  # fmt: skip
        self.scan()

    @property
    def is_one(self) -> bool:
        """Whether a single run's directory was asked for."""
        return len(self.paths) == 1 and is_run(self.paths[0])

    def scan(self) -> dict[str, Path]:
        """Return the run directories that are there now, by the names that they have on the page."""
        found = distinct(each for path in self.paths for each in runs_at(path))
        with self._lock:
            known = {watched.live.run_dir: name for name, watched in self._watched.items()}
            for run_dir in found:
                if run_dir not in known:
                    name = self._free_name(run_dir)
                    self._watched[name] = WatchedRun(name, run_dir, self.form)
                    known[run_dir] = name
            return {known[run_dir]: run_dir for run_dir in found}

    def run(self, name: str) -> WatchedRun | None:
        """Return a run by its name on the page; None for any other word: a name is looked up, and never a path."""
        if name not in self._watched:
            self.scan()
        return self._watched.get(name)

    def _free_name(self, run_dir: Path) -> str:
        base = run_dir.resolve().name or "run"
        name, number = base, 1
        while name in self._watched:
            number += 1
            name = f"{base}-{number}"
        return name

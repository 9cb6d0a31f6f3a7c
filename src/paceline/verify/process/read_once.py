"""Tasks and data of a proof, read once for all ranks that are forked afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.run.process.handover import take_over
from paceline.spec.task import DataSpec, Task

if TYPE_CHECKING:
    from paceline.task.data.protocol import Source
    from paceline.verify.process.own_modules import OwnModules


class ReadOnce:
    """Tasks of plain data, and text that is opened, which ranks that are forked have from this process."""

    def __init__(self) -> None:
        self._tasks: dict[Path, Task] = {}
        self._opened: dict[str, Source] = {}
        self.own_modules: OwnModules | None = None
        # Samples that twins read, by spec and whether labels are masked: samples of another length are others.
        self.chosen: dict[tuple[Path | None, bool], tuple[int, ...]] = {}

    def begin(self, paths: Iterable[Path]) -> None:
        """Read the specs that are plain data and open their text: every rank would list its files again."""
        from paceline.task.data.source import open_sources

        for path in dict.fromkeys(paths):
            if path.suffix == ".json":
                task = self._tasks[path] = take_over(path).task
                if _is_local_text(task.data):
                    with contextlib.suppress(PacelineError):  # the ranks say so
                        self._opened[repr(task.data)] = open_sources(task.data, task.seed)[0]

    def task(self, path: Path) -> Task:
        """Return the task of a spec: the same one for plain data, a new one where it holds objects."""
        known = self._tasks.get(path)
        return known if known is not None else take_over(path).task

    def source(self, task: Task, masked: bool, spec: Path | None = None) -> Source:
        """Return the samples of a twin's task, which is that of `spec`."""
        from paceline.task.data.source import open_sources
        from paceline.verify.twin.chosen import of_chosen
        from paceline.verify.twin.fold import for_twin

        opened = self._opened.get(repr(task.data)) if isinstance(task.data, DataSpec) else None
        source = for_twin(open_sources(task.data, task.seed)[0] if opened is None else opened, task, masked)
        return of_chosen(source, self.chosen.get((spec, masked), ()))


def _is_local_text(data: object) -> bool:
    from paceline.task.data.sources.named import kind_of_source

    if not isinstance(data, DataSpec) or data.mix or "://" in data.source:
        return False
    return kind_of_source(data.source)[0] == "text"

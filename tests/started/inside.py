"""Processes that code of ours starts inside of a test's own process: forked as commands of tests are.

A proof in a test's process starts one that imports torch and forks the ranks; a user's model is traced in another.
"""

from __future__ import annotations

import contextlib
import importlib
import select
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.system.end_of_parent import PARENT_VARIABLE
from started.command import Command
from started.popen import COLD, Warm, nursery

STARTERS = (
    "paceline.supervise.supervisor", "paceline.supervise.standby", "paceline.task.profile.apart",
    "paceline.cluster.probe.probe",
)  # fmt: skip


class Attended(Warm):
    """A process that a supervisor looks after: its number stays its own until it is waited for."""

    _told: int | None = None

    @property
    def is_child(self) -> bool:
        """Whether this process may ask the system how it ended; the nursery may where it has forked it."""
        return self._peer is None

    def _fork(self, command: Command, environ: dict[str, str], *rest: Any) -> bool:
        if PARENT_VARIABLE in environ:  # it ends with its parent
            environ = {**environ, PARENT_VARIABLE: str(nursery()[1])}
        return super()._fork(command, environ, *rest)

    def poll(self) -> int | None:
        """Return how it ended, and do not collect it."""
        if self._peer is None or self.returncode is not None:
            return super().poll()
        if self._told is None and select.select([self._peer], [], [], 0)[0]:
            self._told = self._read_end()
        return self._told

    def _read_end(self) -> int:
        return super()._read_end() if self._told is None else self._told


class WarmSubprocess:
    """The module `subprocess` as it is, but for processes that are forked; a `Popen` of a test's own comes first."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    @property
    def Popen(self) -> Any:
        """Return what starts a process."""
        return Attended if subprocess.Popen is COLD else subprocess.Popen

    def run(self, words: Sequence[str], check: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command to its end; nobody who calls it here wants an error of its exit code, or gives it input."""
        assert not check
        with self.Popen(words, **options) as process:
            stdout, stderr = process.communicate()
        return subprocess.CompletedProcess(list(words), process.returncode, stdout, stderr)


@contextlib.contextmanager
def forked_inside() -> Iterator[None]:
    """Have what these modules start be forked."""
    modules: list[Any] = [importlib.import_module(name) for name in STARTERS]
    for module in modules:
        module.subprocess = WarmSubprocess()
    try:
        yield
    finally:
        for module in modules:
            module.subprocess = subprocess

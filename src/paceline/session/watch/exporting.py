"""Exports beside a run: the process that delivers its journal to other tools."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.session.watch.alerting import environment_beside, name_of
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec

Say = Callable[[str], None]
MODULE = "paceline.observe.exports.process"
CLOSE_SECONDS = 2.0  # that a run waits for it when it ends; the process goes on by itself


@contextmanager
def exports_beside(spec: Spec, say: Say) -> Iterator[None]:
    """Have the run's journal delivered where its options say, as long as the block runs and some time after it."""
    exports = begin_exports(spec, say)
    try:
        yield
    finally:
        exports.close()


def begin_exports(spec: Spec, say: Say) -> RunExports:
    """Return what delivers the journal of a run that begins now; nothing runs where no tool is named."""
    return RunExports(spec, say)


class RunExports:
    """The process beside a run that delivers its journal, as whoever runs it has it."""

    def __init__(self, spec: Spec, say: Say) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False
        if not spec.run.exports.names:
            return
        # In a session of its own: what ends the run's processes leaves it alone.
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True, env=environment_beside(),
        )  # fmt: skip
        asked = {
            "dir": str(run_directory(spec)),
            "name": name_of(spec),
            "exports": dataclasses.asdict(spec.run.exports),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: a run goes on without, and the next start delivers
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        self._said = threading.Thread(target=self._say_on, args=(say,), name="paceline-exports", daemon=True)
        self._said.start()

    def close(self) -> None:
        """The run is over. The process is waited for no longer than a moment: it goes on by itself."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._is_over = True
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
            self._said.join(CLOSE_SECONDS)

    def _say_on(self, say: Say) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            say(line.rstrip("\n"))
        if not self._is_over:
            ended = self._process.wait()
            say(f"exports  delivery has ended with {ended} while the run goes on; `paceline deliver` gives the rest")

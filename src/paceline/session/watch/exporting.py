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

MODULE = "paceline.observe.exports.process"
CLOSE_SECONDS = 2.0  # that a run waits for it when it ends; the process goes on by itself


@contextmanager
def exports_beside(spec: Spec, say: Callable[[str], None]) -> Iterator[None]:
    """Have the run's journal delivered where its options say, as long as the block runs and some time after it."""
    if not spec.run.exports.names:
        yield
        return
    # In a session of its own: what ends the run's processes leaves it alone.
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True, env=environment_beside(),
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    asked = {"dir": str(run_directory(spec)), "name": name_of(spec),
             "exports": dataclasses.asdict(spec.run.exports)}  # fmt: skip
    with contextlib.suppress(OSError):  # it is gone: a run goes on without, and the next start delivers
        process.stdin.write(json.dumps(asked, default=str) + "\n")
        process.stdin.flush()
    lines = process.stdout

    def say_on() -> None:
        for line in lines:
            say(line.rstrip("\n"))

    said = threading.Thread(target=say_on, name="paceline-exports", daemon=True)
    said.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_SECONDS)
            said.join(CLOSE_SECONDS)

"""Alerts beside a run: by a thread of the supervisor, or by a process that outlives the supervisor to send them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from paceline.config.declared import declared_table
from paceline.config.plain import to_plain
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.blame import Outcome
from paceline.supervise.ranks_lost import RanksLost

MODULE = "paceline.observe.alerts.process"
CLOSE_SECONDS = 2.0  # that a run waits for its watch when it ends
MOST_STARTS = 3  # of the watch over one start of a run: what ends it as often ends the next one too
MOST_TOLD_AGAIN = 8  # losses of ranks that a watch is told which takes the place of a dead one
Say = Callable[[str], None]


class RunAlerts(Protocol):
    """The watch over a run, as whoever runs it has it."""

    def tell(self, lost: RanksLost) -> None:
        """Take what a supervisor has seen of its ranks. It waits for nothing."""

    def close(self, outcome: Outcome | None = None) -> None:
        """The run is over, with this outcome where it is known."""


def begin_alerts(spec: Spec, say: Say, supervises: bool, goes_on: bool = False) -> RunAlerts:
    """Return the watch over a run that begins now.

    A run that trains in this very process has one where its alerts are sent anywhere: else only `supervises`, which has
    time to look. With `goes_on` the watch over this start was lost with another node, and this one takes its place.
    """
    alerts = spec.run.alerts
    if alerts.enabled and alerts.sinks:
        return _BesideProcess(spec, say, goes_on)
    if alerts.enabled and supervises:
        return _InThread(spec, say, goes_on)
    return _NoAlerts()


@contextmanager
def alerts_beside(spec: Spec, say: Say, supervises: bool, goes_on: bool = False) -> Iterator[_Told]:
    """Yield what is told of the run while it is watched; what it has as `outcome` at the end is told last."""
    told = _Told(begin_alerts(spec, say, supervises, goes_on))
    try:
        yield told
    finally:
        told.alerts.close(told.outcome)


@dataclasses.dataclass
class _Told:
    alerts: RunAlerts
    outcome: Outcome | None = None

    def tell(self, lost: RanksLost) -> None:
        self.alerts.tell(lost)


class _NoAlerts:
    def tell(self, lost: RanksLost) -> None:
        """Take what nobody wants to know."""

    def close(self, outcome: Outcome | None = None) -> None:
        """Nothing is open."""


class _InThread:
    def __init__(self, spec: Spec, say: Say, goes_on: bool) -> None:
        from paceline.observe.alerts.watch_of_run import watch_of

        self._watch = watch_of(spec.run, run_directory(spec), name_of(spec), (), say, goes_on)
        self._watch.watch()

    def tell(self, lost: RanksLost) -> None:
        self._watch.tell(lost)

    def close(self, outcome: Outcome | None = None) -> None:
        if outcome is not None:
            self._watch.ended(outcome.exit_code, outcome.error)
        self._watch.close(CLOSE_SECONDS)


class _BesideProcess:
    """The watch as a process, which is started again where it dies before the run: the next one reads what was told."""

    def __init__(self, spec: Spec, say: Say, goes_on: bool) -> None:
        self._spec, self._say = spec, say
        self._lock = threading.Lock()
        self._is_over, self._lost = False, list[dict[str, object]]()
        self._process = self._started(goes_on)
        self._said = threading.Thread(target=self._say_on, name="paceline-alerts", daemon=True)
        self._said.start()

    def tell(self, lost: RanksLost) -> None:
        from paceline.observe.alerts.process import LOST

        told: dict[str, object] = {LOST: dataclasses.asdict(lost)}
        with self._lock:
            self._lost = [*self._lost, told][-MOST_TOLD_AGAIN:]
            _put(self._process, told)

    def close(self, outcome: Outcome | None = None) -> None:
        from paceline.observe.alerts.process import OVER

        end = {} if outcome is None else {"error": outcome.error}
        with self._lock:
            self._is_over = True
            _put(self._process, {OVER: {"exit_code": outcome.exit_code if outcome else 0, **end}})
        with contextlib.suppress(subprocess.TimeoutExpired):  # a slow sink holds nobody up
            self._process.wait(CLOSE_SECONDS)
            self._said.join(CLOSE_SECONDS)

    def _started(self, goes_on: bool) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", MODULE, str(run_directory(self._spec))]
        # In a session of its own: what ends the run's processes leaves it alone.
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True, env=environment_beside(),
        )  # fmt: skip
        run, name = run_to_plain(self._spec.run), name_of(self._spec)
        for told in ({"run": run, "name": name, "parent": os.getpid(), "goes_on": goes_on}, *self._lost):
            _put(process, told)
        return process

    def _say_on(self) -> None:
        """Say what the watch says, and start another where it dies, which is told again what the first one was."""
        for left in reversed(range(MOST_STARTS)):
            process = self._process
            assert process.stdout is not None
            for line in process.stdout:
                self._say(line.rstrip("\n"))
            code = process.wait()
            with self._lock:
                if self._is_over:
                    return
                if goes_on := left > 0:
                    try:
                        self._process = self._started(goes_on=True)
                    except OSError:  # no process can be had
                        goes_on = False
            what = f"alert    the watch has ended with {code} while the run goes on"
            self._say(f"{what}: another one takes its place" if goes_on else f"{what}: nobody is told of it")
            if not goes_on:
                return


def _put(process: subprocess.Popen[str], told: dict[str, object]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it is gone: a run goes on without its watch, or with the next one
        process.stdin.write(json.dumps(told, default=str) + "\n")
        process.stdin.flush()


def name_of(spec: Spec) -> str:
    """Return what a run is called in messages."""
    return spec.task.name or Path(run_directory(spec)).name


def run_to_plain(run: RunSpec) -> dict[str, object]:
    """Return the run's options as plain data, for another process."""
    plain: dict[str, object] = to_plain(declared_table(RunSpec), run)
    return plain


def environment_beside() -> dict[str, str]:
    """Return the environment of a process beside a run: no rank, and with modules found as here."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}

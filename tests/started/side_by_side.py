"""`pytest --workers N`: files of tests side by side, in processes that are forked once all tests are there.

Tests are collected once, and torch, Transformers and 1,000 files of tests imported once; workers that are started do
all of that again, each for itself. The processes that fork commands and ranks (started/, distributed.py) are shared
too. The tests of a file run in one process, in their order, and who is free takes the next file.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import multiprocessing
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from paceline.verify.process.lanes import handed_out

PR_SET_PDEATHSIG = 1
EXIT_SECONDS = 120.0  # in which a process ends after its last test; an idle machine takes less than one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, metavar="N", help="files of tests that run side by side")


def are_shared(config: pytest.Config) -> bool:
    """Return whether several processes share the files."""
    return config.getoption("workers") > 1 and not config.option.collectonly


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests side by side where that was asked for."""
    if not are_shared(session.config) or session.testsfailed:
        return None  # the next one of this hook runs them, or says what could not be collected
    _Workers(session).run(session.config.getoption("workers"))
    return True


@dataclass
class _Worker:
    """A process that runs tests, seen from the one that has forked it."""

    process: multiprocessing.Process
    pipe: Connection
    begun: str = ""  # the test that it has begun last
    is_within: bool = False
    is_done: bool = False


class _Between(pytest.Item):
    """What stands for the next test between two files: fixtures of the whole session stay."""

    def runtest(self) -> None:
        raise AssertionError("it is never run")


class _Workers:
    """Runs files of tests in several processes, and hears from them."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._config = session, session.config
        self._items = {item.nodeid: item for item in session.items}
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        self._files = list(files.values())
        self._file_of = {item.nodeid: file for file in self._files for item in file}
        self._places: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        self._base = self._places.getbasetemp()
        self._running: list[_Worker] = []
        self._forked = 0

    def run(self, workers: int) -> None:
        """Run all files, and tell pytest what it would have heard had it run them."""
        with handed_out(len(self._files)) as next_file, self._ended():
            for _ in range(min(workers, len(self._files))):
                self._fork([], next_file)
            while self._running:
                ready = wait([worker.pipe for worker in self._running])
                for worker in [each for each in self._running if each.pipe in ready]:
                    self._hear(worker, next_file)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            for worker in self._running:
                worker.process.kill()
                worker.process.join()

    def _fork(self, first: list[pytest.Item], next_file: Callable[[], int | None]) -> None:
        """Fork a process that runs `first`, and then file after file."""
        pipe, far_end = multiprocessing.Pipe(duplex=False)
        given = (first, next_file, far_end, self._forked)
        self._forked += 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or both processes would write what waits there
        process: Any = multiprocessing.get_context("fork").Process(target=self._work, args=given)
        process.start()
        far_end.close()
        self._running.append(_Worker(process, pipe))

    # ---- in the process that has collected --------------------------------------------------------------------------

    def _hear(self, worker: _Worker, next_file: Callable[[], int | None]) -> None:
        try:
            what, told = pickle.loads(worker.pipe.recv_bytes())
        except EOFError:
            self._collect(worker, next_file)
            return
        hook = self._config.hook
        if what == "done":
            worker.is_done = True
        elif what == "report":
            hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=self._config, data=told))
        elif what == "warning":
            text, name, *place, when, nodeid = told
            kind = getattr(builtins, name, UserWarning)
            message = warnings.WarningMessage(kind(text), kind, *place)
            hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": None}
            )
        else:
            item, is_begun = self._items[told], what == "begun"
            worker.begun, worker.is_within = told, is_begun
            log = hook.pytest_runtest_logstart if is_begun else hook.pytest_runtest_logfinish
            log(nodeid=told, location=item.location)

    def _collect(self, worker: _Worker, next_file: Callable[[], int | None]) -> None:
        """Take note of a process that has ended; another one goes on where one has died within a test."""
        worker.process.join()
        worker.pipe.close()
        self._running.remove(worker)
        if worker.is_done:
            return
        how = f"the process of the tests ended with {worker.process.exitcode}"
        if not worker.begun:
            raise RuntimeError(f"{how} before its first test")
        self._tell_failed(worker.begun, f"{how} in {worker.begun}" if worker.is_within else f"{how} after it")
        file = self._file_of[worker.begun]
        self._fork(file[file.index(self._items[worker.begun]) + 1 :], next_file)

    def _tell_failed(self, nodeid: str, because: str) -> None:
        location = self._items[nodeid].location
        report = pytest.TestReport(nodeid, location, {}, "failed", because, "call")
        self._config.hook.pytest_runtest_logreport(report=report)

    # ---- in those that run tests -------------------------------------------------------------------------------------

    def _work(
        self, first: list[pytest.Item], next_file: Callable[[], int | None], to_first: Connection, number: int
    ) -> None:
        self._be_apart(number)
        teller = _Teller(self._config, to_first)
        self._config.pluginmanager.register(teller)
        teller.is_heard = True
        between = _Between.from_parent(self._session, name="between files")
        left: list[pytest.Item] | None = first
        while left is not None:
            for item, following in zip(left, [*left[1:], between], strict=False):
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._session.shouldfail or self._session.shouldstop:
                    return
            place = next_file()
            left = None if place is None else self._files[place]
        self._session._setupstate.teardown_exact(None)
        teller.tell("done", None)
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)
        atexit._run_exitfuncs()

    def _be_apart(self, number: int) -> None:
        """Have this process share nothing with the one that it was forked from, but who forks for both."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a killed run leaves none that go on
        atexit._clear()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self._config.pluginmanager.unregister(name="terminalreporter")
        self._places._given_basetemp, self._places._basetemp = self._base / f"worker-{number}", None
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        if server._forkserver_pid is not None:  # it would be waited for as a child, which it is of the other process
            server.ensure_running = resource_tracker.ensure_running


class _Teller:
    """Tells the first process what pytest says in this one."""

    def __init__(self, config: pytest.Config, to_first: Connection) -> None:
        self._config, self._to_first = config, to_first
        self.is_heard = False  # warnings from before are told to every new plugin

    def tell(self, what: str, told: object) -> None:
        """Send a message."""
        if self.is_heard:
            self._to_first.send_bytes(pickle.dumps((what, told)))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("begun", nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tell("ended", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        of = warning_message
        self.tell("warning", (str(of.message), of.category.__name__, of.filename, of.lineno, when, nodeid))

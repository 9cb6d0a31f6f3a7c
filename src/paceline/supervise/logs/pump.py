"""The pump: a supervisor's thread that reads what ranks print, keeps the text in logs, and has it printed as before.

Of more ranks than `run.observe.log_ranks` only those of rank 0 are printed: a thousand ranks say a thing once.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping
from pathlib import Path

from paceline.said import TERMINAL_VARIABLE
from paceline.scratch import Scratch
from paceline.spec.journal.redact import Redactor
from paceline.spec.run import RunSpec
from paceline.supervise.logs.aside import Printer, printer_here
from paceline.supervise.logs.files import RankLog
from paceline.supervise.logs.rank import LOGS_VARIABLE, STREAMS, pipe_path

CHUNK_BYTES = 1 << 16


class LogPump:
    """Keeps the logs of the ranks that a supervisor starts on this machine."""

    def __init__(self, run_dir: Path, run: RunSpec, printer: Printer | None = None) -> None:
        """Without a `printer` the pump has one of its own."""
        self._printer = printer or Printer()
        self._has_own_printer = printer is None
        self._run_dir, self._observe = run_dir, run.observe
        self._redactor, self._mode = Redactor(run.redact), 0o640 if run.group_read else 0o600
        self._folder = Scratch("logs")
        self._logs: dict[int, RankLog] = {}
        self._pipes: dict[int, tuple[int, str]] = {}  # by descriptor: whose it is, and which stream
        self._known: set[tuple[int, str]] = set()  # pipes that were opened
        self._printed: set[int] = set()
        self._changing = threading.Lock()
        self._poll = select.poll()
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="paceline-logs", daemon=True)
        self._thread.start()

    def place(self, place: Mapping[str, str]) -> dict[str, str]:
        """Return what the environment of a rank with this place has besides, and have its output read from now on.

        Where a pipe cannot be made the rank prints by itself, and has no log.
        """
        rank, folder = int(place["RANK"]), Path(self._folder.name)
        try:
            for stream in STREAMS:
                self._open(folder, rank, stream)
        except OSError:
            return {}
        if int(place.get("WORLD_SIZE", "1")) <= self._observe.log_ranks or rank == 0:
            self._printed.add(rank)
        else:
            self._printed.discard(rank)
        return {LOGS_VARIABLE: str(folder)} | ({TERMINAL_VARIABLE: "1"} if os.isatty(1) else {})

    def _open(self, folder: Path, rank: int, stream: str) -> None:
        """Open the pipe of one of a rank's streams, unless it is open. Raises OSError."""
        if (rank, stream) in self._known:
            return
        path = pipe_path(folder, rank, stream)
        if not path.exists():
            os.mkfifo(path, 0o600)
        # Open for writing too, so that it has no end when the last process of the rank has gone.
        end = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._known.add((rank, stream))
        with self._changing:
            self._pipes[end] = rank, stream
        self._poll.register(end, select.POLLIN)
        with contextlib.suppress(BlockingIOError):  # it wakes anyway
            os.write(self._woken, b"w")

    def close(self) -> None:
        """Read what is left, when no rank runs any more, and close the logs."""
        self._is_over = True
        os.write(self._woken, b"w")
        self._thread.join()
        if self._has_own_printer:
            self._printer.close()
        for log in self._logs.values():
            log.close()
        for end in [*self._pipes, self._wake, self._woken]:
            os.close(end)
        self._pipes.clear()
        self._folder.cleanup()

    def _run(self) -> None:
        while not self._is_over:
            for end, _ in self._poll.poll():
                if end == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, CHUNK_BYTES)
                else:
                    self._take(end)
        for end in list(self._pipes):
            while self._take(end):
                pass

    def _take(self, end: int) -> bool:
        """Keep and print what has come through a pipe; return whether something had."""
        with self._changing:
            rank, stream = self._pipes.get(end, (-1, ""))
        if rank < 0:
            return False
        try:
            data = os.read(end, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if rank not in self._logs:
            limit, files = self._observe.log_limit, self._observe.log_files
            self._logs[rank] = RankLog(self._run_dir, rank, limit, files, self._redactor, self._mode)
        if rank in self._printed:
            self._print(end, STREAMS[stream], data)
        self._logs[rank].write(stream, data)
        return True

    def _print(self, end: int, number: int, data: bytes) -> None:
        try:
            self._printer.put(number, data)
        except BrokenPipeError:  # who read it has left: the rank is told so when it writes again
            self._poll.unregister(end)
            with self._changing:
                rank, stream = self._pipes.pop(end)
            pipe_path(Path(self._folder.name), rank, stream).unlink(missing_ok=True)  # so that it is told (rank.py)
            os.close(end)


def pump_of(run_dir: Path, run: RunSpec) -> LogPump | None:
    """Return what keeps the logs of a run's ranks, None where it is not to, or this system has no pipes with names."""
    can = run.observe.logs and hasattr(os, "mkfifo") and hasattr(select, "poll")
    return LogPump(run_dir, run, printer_here()) if can else None

"""SIGUSR2: a trace of the next steps, asked for by a signal to the process that started a run. No torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from paceline.spec.watch.traced import TraceRequest, ask_for_trace, trace_under_way

SIGNAL = signal.SIGUSR2


@contextlib.contextmanager
def traced_by_signal(run_dir: Path) -> Iterator[None]:
    """Ask for a trace of the run whenever SIGUSR2 comes. Outside of the main thread Python allows no handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def received(number: int, frame: object) -> None:
        # A disk that takes nothing costs the trace: a signal ends no run.
        with contextlib.suppress(OSError):
            if trace_under_way(run_dir) is None:  # which shows the same steps
                ask_for_trace(run_dir, TraceRequest(by="signal"))

    before = signal.signal(SIGNAL, received)
    try:
        yield
    finally:
        signal.signal(SIGNAL, before)

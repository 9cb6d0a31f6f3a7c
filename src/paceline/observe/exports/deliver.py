"""Delivery: each sink in a thread of its own, so that a sink that hangs holds up no other sink."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from paceline.observe.exports.cursor import JournalCursor
from paceline.observe.exports.sink import ExportedRun, ExportSink, OpenExport
from paceline.spec.journal.redact import Redactor

LOOK_SECONDS = 1.0  # between two looks for new records
LONGEST_SECONDS = 60.0  # between two tries of a sink that fails
LAST_TRIES = 3  # when the run is over
SILENT_SECONDS = 30.0  # after which a tool that neither takes nor refuses is told of
Say = Callable[[str], None]


class Delivery:
    """Delivers a run's journal to one sink. It ends when all is delivered after `finish`, or never, where it hangs."""

    def __init__(self, name: str, run: ExportedRun, opened: OpenExport, say: Say) -> None:
        self.name, self._run, self._open, self._say = name, run, opened, say
        self._cursor = JournalCursor(run.dir, name)
        self._over = threading.Event()
        self._sink: ExportSink | None = None
        self._failed = 0  # tries in a row
        self._told_silent = False  # until it takes something
        self._told = ""  # why it takes nothing, until it does
        self._never = threading.Event()  # nobody sets it
        self._thread = threading.Thread(target=self._work, name=f"paceline-export-{name}", daemon=True)

    def start(self) -> Delivery:
        """Begin to deliver."""
        self._thread.start()
        return self

    def finish(self) -> None:
        """Say that nothing more is written to the journal."""
        self._over.set()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for so long until all is delivered, and return whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def has_all(self) -> bool:
        """Whether the sink has got the whole journal, as far as its whole lines go."""
        return not JournalCursor(self._run.dir, self.name).read()[0]

    def _work(self) -> None:
        was_over = False
        while True:
            if self._once():
                continue
            is_over = self._over.is_set()
            if is_over and not was_over:  # what was written just before the end, and new tries for a sink that fails
                was_over, self._failed = True, 0
                continue
            if is_over and self._failed in (0, LAST_TRIES):
                break
            (self._never if is_over else self._over).wait(self._pause())
        if self._sink is not None:
            self._tried(self._sink.close)

    def _pause(self) -> float:
        return min(LONGEST_SECONDS, LOOK_SECONDS * 2.0 ** min(self._failed, 10)) if self._failed else LOOK_SECONDS

    def _once(self) -> bool:
        """Deliver one batch; return whether one was, so that there may be more."""
        return self._tried(self._deliver)

    def _deliver(self) -> bool:
        records, place = self._cursor.read()
        if not records:
            if place != self._cursor.place:
                self._cursor.commit(place, self._cursor.state)
            return False
        with self._watched():
            self._sink = self._sink or self._open(self._run, self._cursor.state)
            self._sink.send(records)
        self._cursor.commit(place, self._sink.state())
        self._failed, self._told_silent, self._told = 0, False, ""
        return True

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Say it once where the tool has not answered for long: it may hang, and a client may try for many minutes."""

        def tell() -> None:
            self._told_silent = True
            self._say(f"exports  {self.name} has not answered for {SILENT_SECONDS:.0f} s; it gets all of it later")

        watch = threading.Timer(SILENT_SECONDS, tell)
        watch.daemon = True
        if not self._told_silent:
            watch.start()
        try:
            yield
        finally:
            watch.cancel()

    def _tried(self, work: Callable[[], bool | None]) -> bool:
        """Return what work returns; False where it fails, which is said once, until it goes on again."""
        try:
            return bool(work())
        except Exception as error:  # of somebody else's program: whatever it is, the records come again later
            self._failed += 1
            # An address may hold a password, and a tool says where it has failed.
            because = Redactor().text(f"{type(error).__name__}: {error}")
            if self._failed == 1 and because != self._told:
                self._told = because
                self._say(f"exports  {self.name} takes nothing: {because}; it gets all of it later")
            sink, self._sink = self._sink, None
            if sink is not None:
                with contextlib.suppress(
                    Exception
                ):  # it has failed already; what it holds open is in the next one's way
                    sink.close()
            return False

"""A link between a node's supervisor and the coordinator: lines of JSON over TCP, and a heartbeat from either end.

Who connects and who is connected to both know the run's secret, which lies in its directory: neither end obeys, or is
obeyed by, anybody else.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.patience import Patience
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.supervise.lines import Lines

BEATS = 5  # in the time after which an end counts as lost
LONGEST_BEAT_SECONDS = 0.5
STUCK_SECONDS = 60.0  # of an idle machine, after which who has not looked at a link is no longer said to live


class NoPeer(Exception):
    """The other end of a connection does not know the run's secret, or is gone."""


class NodeLink:
    """One end of a link. It `is_lost` where the other has closed it, or has said nothing for too long."""

    def __init__(self, lines: Lines, lost_after: float, beats: bool = True) -> None:
        """With `beats` a thread tells the other end that this end lives; a holder of many links has one thread for all.

        It stops where nobody has looked at this end for long, as a supervisor that waits for what cannot be ended.
        """
        self._lines, self._lost_after = lines, lost_after
        self._heard, self._sending = Patience(lost_after), threading.Lock()
        self._senders, self._waiting = set[int](), deque[Mapping[str, object]]()  # threads that send, and what
        self.heard_at = passed_seconds()
        self._closed, self._looked_at = threading.Event(), Patience(STUCK_SECONDS)
        self.because = ""  # why it is lost
        self._asked_at = time.monotonic()  # whether the other end is lost
        self.is_silent = False  # whether that is since the other end says nothing, and not since it has gone
        lines.end.settimeout(lost_after)  # for sending: an end that reads nothing must not stop this one
        lines.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if beats:
            threading.Thread(target=self._keep_beating, name="paceline-beat", daemon=True).start()

    @property
    def end(self) -> socket.socket:
        """The socket of this end."""
        return self._lines.end

    @property
    def address(self) -> str:
        """The address of this end, as the other reaches it."""
        return str(self._lines.end.getsockname()[0])

    @property
    def is_lost(self) -> bool:
        """Whether the other end has gone, or is silent. Who did not ask for long was asleep itself, and hears first."""
        now = time.monotonic()
        if now - self._asked_at > self._lost_after / 2:
            self._heard = Patience(self._lost_after)
        self._asked_at = now
        if not self.because and self._heard.is_over:
            self.is_silent = True
            self.because = f"nothing was heard from it for {self._lost_after:g} s of an idle machine"
        return bool(self.because)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; a link that has gone is found out at the next look.

        A signal handler may do so in the midst of another message of its thread, which then sends that one too.
        """
        self._waiting.append(message)
        self._send_all()

    def _send_all(self) -> None:
        here = threading.get_ident()
        while self._waiting and here not in self._senders:
            with self._as_sender(here), self._sending:
                self._send_waiting()

    @contextlib.contextmanager
    def _as_sender(self, here: int) -> Iterator[None]:
        """Have signal handlers of a thread leave what they send to the thread, while that has the lock or waits for it.

        A lock alone would be waited for by the handler for ever, and one that lets the handler in would cut a message.
        """
        self._senders.add(here)
        try:
            yield
        finally:
            self._senders.discard(here)

    def _send_waiting(self) -> None:
        try:
            while self._waiting:
                self._lines.send(self._waiting.popleft())
        except IndexError:  # another thread has it
            return
        except OSError as error:
            self.because = self.because or f"it takes no message: {error.strerror or error}"

    def taken(self, timeout_seconds: float = 0.0) -> Iterator[dict[str, Any]]:
        """Yield the messages that are there, or come first within some seconds."""
        self._looked_at = Patience(STUCK_SECONDS)
        try:
            while (message := self._lines.take(timeout_seconds)) is not None:
                self._heard, self.heard_at, timeout_seconds = Patience(self._lost_after), passed_seconds(), 0.0
                if message:
                    yield message
        except (EOFError, OSError, ValueError):
            self.because = self.because or "its connection has ended"

    def close(self) -> None:
        """End the link."""
        self._closed.set()
        self.because = self.because or "it is closed"
        self._lines.end.close()

    def beat(self) -> None:
        """Tell the other end that this one lives, if it can be told at once: it reads nothing, or is told more now."""
        with self._as_sender(threading.get_ident()):
            if not self._sending.acquire(blocking=False):
                return
            try:
                self._lines.beat()
            except (OSError, ValueError) as error:  # the second of a socket that was closed just now
                self.because = self.because or f"it takes no message: {error}"
            finally:
                self._sending.release()
        if threading.current_thread() is threading.main_thread():  # whose signal handlers have left something
            self._send_all()

    def _keep_beating(self) -> None:
        while not self._closed.wait(beat_seconds(self._lost_after)) and not self.because:
            if not self._looked_at.is_over:
                self.beat()


def beat_seconds(lost_after: float) -> float:
    """Return how long an end waits between two beats."""
    return min(LONGEST_BEAT_SECONDS, lost_after / BEATS)


def knock(address: tuple[str, int], secret: str, hello: Mapping[str, object], seconds: float) -> Lines:
    """Return a connection to a coordinator that knows the secret, which has been told who this is. Raises NoPeer."""
    try:
        lines = Lines(socket.create_connection(address, timeout=seconds))
    except OSError as error:
        raise NoPeer(f"{address[0]}:{address[1]}: {error.strerror or error}") from error
    try:
        ours = secrets.token_hex(16)
        theirs = _answer(lines, seconds)["challenge"]
        lines.send({"challenge": ours, "proof": _proof(secret, f"node {theirs}")})
        if not hmac.compare_digest(_answer(lines, seconds)["proof"], _proof(secret, f"coordinator {ours}")):
            raise NoPeer(f"{address[0]}:{address[1]} is not this run's coordinator")
        lines.send(hello)
        return lines
    except (OSError, EOFError, KeyError, ValueError, TypeError) as error:
        lines.end.close()
        raise NoPeer(f"{address[0]}:{address[1]} answered something else: {error}") from error
    except NoPeer:
        lines.end.close()
        raise


class Knocking:
    """A connection that somebody has made to the coordinator, who is to show the secret and to say who it is.

    Nobody is waited for: a port scanner says nothing, and the nodes that are there are looked after meanwhile.
    """

    def __init__(self, end: socket.socket, secret: str, seconds: float) -> None:
        """Who connects has so many seconds of an idle machine for each of two answers."""
        end.settimeout(seconds)  # for sending what fits into the system's room
        self.end, self._lines, self._secret, self._seconds = end, Lines(end), secret, seconds
        self._ours, self._is_known, self._patience = "", False, Patience(seconds)

    def look(self) -> tuple[Lines, dict[str, object]] | None:
        """Return a node's connection, and what the node says of itself; None where that has not come yet.

        Raises NoPeer where it is no node of the run, or says nothing. The connection is closed then.
        """
        try:
            return self._heard()
        except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, NoPeer) as error:
            self.end.close()
            raise NoPeer(str(error)) from error

    def _heard(self) -> tuple[Lines, dict[str, object]] | None:
        if not self._ours:
            self._ours = secrets.token_hex(16)
            self._lines.send({"challenge": self._ours})
        while (told := self._lines.take(0.0)) is not None:
            if self._is_known:
                return self._lines, told
            if not hmac.compare_digest(told["proof"], _proof(self._secret, f"node {self._ours}")):
                raise NoPeer("it does not know the run's secret")
            self._lines.send({"proof": _proof(self._secret, f"coordinator {told['challenge']}")})
            self._is_known, self._patience = True, Patience(self._seconds)
        if self._patience.is_over:
            raise NoPeer("it says nothing")
        return None


def _answer(lines: Lines, seconds: float) -> dict[str, Any]:
    told = lines.take(seconds)
    if told is None:
        raise NoPeer("it says nothing")
    return told


def _proof(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()

"""`subprocess.Popen` for processes that are forked: from the nursery, or by a process that was itself."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from started import ENVIRON
from started.become import fork
from started.command import HASHES, Command, is_alike, read

# Threads that hold no lock which a forked process would want, but those of imports (become.py). A supervisor has one
# for its ranks' output and one for its alerts; torchrun one that says it is alive, and its store some without Python.
HARMLESS = ("MainThread", "verify-results", "paceline-logs", "paceline-alerts", "paceline-exports",
            "paceline-devices", "paceline-printer", "paceline-beat", "RendezvousKeepAliveTimer")  # fmt: skip
OF_A_STORE = "pt_tcpstore"
COLD = subprocess.Popen
MOST_KEPT = 4  # descriptors beside the three of standard streams
NURSERY_SECONDS = 10.0  # in which it ends once its input does


class Forked(COLD):  # type: ignore[type-arg,misc]
    """A process that is forked where a command can be, and started where not."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        pipes, (_, gid, gids, uid, umask, session, group) = rest[:6], rest[6:]
        plain = not (executable or preexec_fn or shell) and close_fds and gid is gids is uid is None and umask < 0
        words = [args] if isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        command = read(words) if plain and all(isinstance(word, str) for word in words) else None
        environ = dict(os.environ) if env is None else {os.fsdecode(k): os.fsdecode(v) for k, v in env.items()}
        folder = str(Path(os.fspath(cwd or ".")).absolute())
        ends = [end if end >= 0 else number for number, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        if command is None or not self._fork(command, environ, folder, ends, group, pass_fds, session):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                                   creationflags, shell, *rest)  # fmt: skip
            return
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _fork(self, command: Command, environ: dict[str, str], folder: str, ends: list[int], group: int, kept: Any,
              session: bool) -> bool:  # fmt: skip
        raise NotImplementedError


class Nested(Forked):
    """A process that a warm one starts: its own fork, and so its child, where nothing is lost by that."""

    def _fork(self, command: Command, environ: dict[str, str], folder: str, ends: list[int], group: int, kept: Any,
              session: bool) -> bool:  # fmt: skip
        may = is_alike(environ, ENVIRON, folder) and _may_fork()
        if may:
            self.pid = fork(command, environ, folder, ends, group, kept, session, is_nested=True)
        return may


class Warm(Forked):
    """A process that the nursery forks for a test."""

    _peer: socket.socket | None = None

    def _fork(self, command: Command, environ: dict[str, str], folder: str, ends: list[int], group: int, kept: Any,
              session: bool) -> bool:  # fmt: skip
        if len(kept) > MOST_KEPT or session or group > 0 or not is_alike(environ, nursery_environment(), folder):
            return False
        asked = {"words": command.whole(), "environ": environ, "folder": folder, "group": group, "kept": list(kept)}
        self._peer = socket.socket(socket.AF_UNIX)
        self._peer.connect(nursery()[0])
        text = json.dumps(asked).encode() + b"\n"
        socket.send_fds(self._peer, [text[:1]], [*ends, *kept])
        self._peer.sendall(text[1:])
        self._said = self._peer.makefile("r")
        self.pid = int(self._said.readline())
        return True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._peer is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if wait_flags & os.WNOHANG and not select.select([self._peer], [], [], 0)[0]:
            return 0, 0
        code = self._read_end()
        self._said.close()
        self._peer.close()  # the nursery lets go of its number
        return self.pid, code << 8 if code >= 0 else -code

    def _read_end(self) -> int:
        return int(self._said.readline() or -signal.SIGKILL)

    def _internal_poll(self, *rest: Any, **named: Any) -> int | None:
        if self._peer is None or self.returncode is not None:
            return super()._internal_poll(*rest, **named)  # type: ignore[misc,no-any-return]
        if self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def nursery_environment() -> dict[str, str]:
    """Return what the nursery is started with: the tests' own, no threads of libraries, and hashes as ranks have."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **dict([HASHES])}


@functools.cache
def nursery() -> tuple[str, int]:
    """Return the address and the number of this process's nursery, which it starts once."""
    folder = tempfile.mkdtemp(prefix="nursery-")
    path = str(Path(folder, "at"))
    started = COLD([sys.executable, "-m", "started.nursery", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                   env=nursery_environment(), cwd=folder)  # fmt: skip
    assert started.stdout is not None
    assert started.stdout.readline(), "the nursery has ended"
    atexit.register(_close, started, folder)
    return path, started.pid


def _close(started: subprocess.Popen[bytes], folder: str) -> None:
    assert started.stdin is not None
    started.stdin.close()
    try:
        started.wait(NURSERY_SECONDS)
    except subprocess.TimeoutExpired:  # a process that was forked holds the other end of its input: it reads on
        started.kill()
        started.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _may_fork() -> bool:
    """Return whether this process has no thread but harmless ones, and torch has not computed with several."""
    known = [thread for thread in threading.enumerate() if thread.name.startswith(HARMLESS)]
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return len([name for name in names if not name.startswith(OF_A_STORE)]) == len(known)

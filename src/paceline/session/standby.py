"""The standby process: `python -m paceline.session.standby DESCRIPTOR worker`, or `... script`, or `... proof`.

It imports what a rank needs, which takes seconds, says so over the descriptor, and forks a rank whenever it is asked
to. A rank goes on here as the process would that it stands for, in the words that it is asked with: as a `worker`
(launch/worker.py) of a SPEC, or as the user's `script`, a FILE with ARGUMENTS. The process of a `proof` is forked here
too (verify/process/worker.py), where a run is proven before its ranks begin.

A fork copies only the thread that calls it, so the process must have started none, and a device that it had used could
not be used by its children. Both are looked at before it says that it is ready.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.cluster.here.collector import keep_for_good
from paceline.cluster.here.imported import TORCH_OF_A_RANK
from paceline.lock import LOCK_VARIABLE
from paceline.supervise.forked import leave, split
from paceline.supervise.lines import Lines
from paceline.supervise.logs.rank import into_log
from paceline.supervise.parent import end_with_parent, ends_by, name_process
from paceline.supervise.signals import STOP_SIGNALS
from paceline.supervise.standby import PROOF, SCRIPT, WORKER
from paceline.units import plural


def main() -> int:
    """Fork ranks until the supervisor is gone; in a rank, do its work and return its exit code."""
    end_with_parent(number=signal.SIGKILL)
    # What stops all processes of a run at once (systemd, Slurm) leaves this one: the ranks it has forked still save,
    # and only it can say how they end. It goes with its supervisor, which has kept these signals off until now.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    name_process("paceline-standby")
    lines = Lines(socket.socket(fileno=int(sys.argv[1])), takes_descriptors=True)
    because = prepare(sys.argv[2])
    lines.send({"because": because})
    words = [] if because else serve(lines)
    if not words:
        return 0
    lines.end.close()
    into_log()
    kind, *words = words
    if kind == PROOF:
        _as_proof(words)
    if kind == WORKER:
        _as_worker(words)
    return as_script(words)


def prepare(kind: str) -> str:
    """Import what is forked first without starting a thread, and return why this process must not fork, or "".

    A script may plan; a worker is told its plan, and needs nothing of the planner. What a proof needs is most of what a
    worker does.
    """
    gc.disable()  # until all is imported, of which nothing is garbage: it takes a sixth of the time
    import torch

    for name in TORCH_OF_A_RANK:
        import_module(name)
    if kind == SCRIPT:
        import paceline.session.run
    else:
        import paceline.launch.run
        import paceline.launch.worker
    if kind == PROOF:
        import paceline.verify.compare.in_a_group
        import paceline.verify.process.checks
        import paceline.verify.process.worker  # noqa: F401

    # Or every rank's collections would go through, and so copy, all that this process holds. It is not looked through
    # here either: ranks would wait for that, and it finds next to nothing.
    keep_for_good()
    gc.enable()
    tasks = Path("/proc/self/task")
    threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
    if threads > 1:
        return f"the process that has imported torch has {plural(threads - 1, 'more thread')}, which a fork would lose"
    if torch.cuda.is_initialized():
        return "importing torch has used CUDA, and a fork could not use it again"
    return ""


def serve(lines: Lines) -> list[str]:
    """Fork ranks as asked and tell how they end, until the supervisor is gone; in a rank return the words of its work.

    Returns none here, at the end.
    """
    running: dict[int, bool] = {}  # whether a rank's end is told
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        _tell_ends(running, lines)
        try:
            if not lines.has_more and lines.end.fileno() not in select.select([lines.end.fileno(), wake], [], [])[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 4096)
                continue
            asked = lines.take(0.0)
        except EOFError:
            return []
        if asked is not None and "fork" in asked:
            environ = with_lock_here(asked["fork"], lines.descriptors)
            child = split(environ, ends_by(environ))
            if child is None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake)
                os.close(woken)
                return list(asked["work"])
            running[child.pid] = False
            lines.send({"forked": child.pid})
        elif asked is not None and "collect" in asked:
            os.waitpid(asked["collect"], 0)
            del running[asked["collect"]]


def with_lock_here(environ: Mapping[str, str], descriptors: Sequence[int]) -> dict[str, str]:
    """Return an environment whose lock is the descriptor that has come to this process, where one has.

    The supervisor knows it by another number.
    """
    if not descriptors or LOCK_VARIABLE not in environ:
        return dict(environ)
    rest = environ[LOCK_VARIABLE].partition(":")[2]
    return {**environ, LOCK_VARIABLE: f"{descriptors[-1]}:{rest}"}


def _tell_ends(running: dict[int, bool], lines: Lines) -> None:
    """Tell of ranks that have ended. They are not collected: their numbers stay theirs until the supervisor says so."""
    for pid, is_told in running.items():
        found = None if is_told else os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            lines.send({"ended": pid, "code": code})
            running[pid] = True


def _as_proof(words: list[str]) -> None:
    from paceline.verify.process import worker

    _own_random_numbers()
    sys.argv = [worker.__file__, *words]
    leave(worker.main())


def _as_worker(words: list[str]) -> None:
    from paceline.launch.worker import main as work
    from paceline.supervise.groups import end_own_group

    _own_random_numbers()
    sys.argv = ["paceline.launch.worker", *words]
    supervisor = os.getppid()
    code = work()
    sys.stdout.flush()
    end_own_group(supervisor)
    leave(code)


def as_script(words: list[str]) -> int:
    """Run a script as `python FILE ARGUMENTS` would, and return 0; it ends as it would by itself."""
    _own_random_numbers()
    path = words[0]
    sys.argv = list(words)
    sys.path[0] = str(Path(path).resolve().parent)
    name_process(f"rank-{os.environ['RANK']}-paceline")
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = script
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), script.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace: Any = error.__traceback__
        error.__traceback__ = trace.tb_next  # without this file's own line
        sys.excepthook(type(error), error, error.__traceback__)  # which may end the process with a code of its own
        return 1
    return 0


def _own_random_numbers() -> None:
    """Seed what is seeded from the system when it is imported, which the forks would share. Python's own is."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    sys.exit(main())

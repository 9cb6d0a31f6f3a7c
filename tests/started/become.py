"""What a forked process does to be the process that its command would have started.

Modules that only torch brings are put aside until they are imported: what asks whether torch is there sees what it
would see. Once the command is over the interpreter ends as it would by itself, with what is registered for its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import io
import os
import runpy
import signal
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from started import ENVIRON
from started.command import COERCED, Command
from started.pristine import Pristine

ROOMS: list[Aside] = []  # the one that is put aside, once it is imported
PRISTINE: list[Pristine] = []
KEPT: list[object] = []  # what a process that was forked from this one must neither flush nor close


class Aside:
    """Modules that are imported already, and that `sys.modules` does not show before one of them is imported."""

    def __init__(self, room: str) -> None:
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == room}
        self._room = room

    def hide(self) -> None:
        """Put them aside until one of them is imported."""
        for name in self._modules:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def show(self) -> None:
        """Have `sys.modules` show them, if it does not."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            sys.modules.update(self._modules)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return how the room is imported: by showing it again."""
        return importlib.machinery.ModuleSpec(name, self) if name == self._room else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module of the room."""
        self._spec = self._modules[self._room].__spec__
        return self._modules[self._room]

    def exec_module(self, module: types.ModuleType) -> None:
        """Show all modules of the room."""
        module.__spec__, module.__loader__ = self._spec, self._spec.loader if self._spec else None
        self.show()


def fork(command: Command, environ: Mapping[str, str], folder: str, descriptors: Sequence[int], group: int,
         kept: Sequence[int] = (), session: bool = False, is_nested: bool = False,
         given: Sequence[int] = ()) -> int:  # fmt: skip
    """Return the number of a new process that is the command's; `kept` are descriptors that it has besides.

    Those are this process's own, or are made of the ones that are `given` for them.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would write what waits there
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # its own handlers are not there yet
    lent = {} if given else {each: os.dup(each) for each in kept}  # which a fork may close: a run's lock is let go
    open_there, open_here = os.pipe()
    pid = os.fork()
    if pid == 0:
        if is_nested:
            _forget(lent)
        become(command, environ, folder, descriptors, group, kept, given, session, mask)
    for copy in (*lent.values(), open_here):
        os.close(copy)
    os.read(open_there, 1)  # ends when the process has closed what is not its own, a lock that this one may free next
    os.close(open_there)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if group >= 0:
        with contextlib.suppress(OSError):  # both sides make the group: neither may use it before it is there
            os.setpgid(pid, group or pid)
    return pid


def become(
    command: Command, environ: Mapping[str, str], folder: str, descriptors: Sequence[int], group: int,
    kept: Sequence[int], given: Sequence[int], session: bool, mask: set[Any],
) -> NoReturn:  # fmt: skip
    """Be the process of the command, with three descriptors as its standard streams and `kept` as they are."""
    error: BaseException | None = None
    try:
        _place(environ, folder, descriptors, group, kept, given, session)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _prepare(command, environ)
        _run(command)
    except BaseException as raised:  # whatever it is: nothing below this frame is this process's
        error = raised
    _end(error)


def _place(
    environ: Mapping[str, str], folder: str, descriptors: Sequence[int], group: int, kept: Sequence[int],
    given: Sequence[int], session: bool,
) -> None:  # fmt: skip
    if session:
        os.setsid()
    elif group >= 0:
        os.setpgid(0, group)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    moved = [os.dup(each) for each in descriptors]  # none of them is 0, 1 or 2 then
    free = max((*kept, *moved)) + 1  # from here on no number is anybody's place
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, free) for each in given]
    for number, each in (*enumerate(moved), *zip(kept, high, strict=False)):
        os.dup2(each, number)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # that of the listing
                os.close(number)
    for each in kept:
        os.set_inheritable(each, True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update({name: value for name, value in (COERCED,) if ENVIRON.get(name) == value} | dict(environ))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("python")


def _prepare(command: Command, environ: Mapping[str, str]) -> None:
    """Make the interpreter's state that of a new one."""
    room = ROOMS[0]
    room.show()
    threads = int(environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    _set_openmp_threads(threads)
    sys.modules["numpy"].random.seed()  # from the system, as when it is imported
    tempfile.tempdir = None  # found out anew, from this environment
    room.hide()
    is_unbuffered = command.is_unbuffered or bool(environ.get("PYTHONUNBUFFERED"))
    KEPT.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = sys.__stdin__ = _stream(0, "r", False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", is_unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", is_unbuffered)  # type: ignore[misc]
    first = str(Path.cwd()) if command.is_module else str(Path(command.words[0]).resolve().parent)
    own = [place for place in environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:] = [first, *(str(Path(place).absolute()) for place in own), *LIBRARIES]
    sys.path_importer_cache.clear()
    sys.argv = ["-m", *command.words[1:]] if command.is_module else list(command.words)
    sys.orig_argv = [sys.executable, *(["-m"] if command.is_module else []), *command.words]
    sys.excepthook = sys.__excepthook__
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    sys.modules["__main__"] = main


def _set_openmp_threads(threads: int) -> None:
    """Have torch compute with so many threads unless it is told otherwise, as where it is imported with that."""
    for library in Path(sys.modules["torch"].__file__ or "").parent.joinpath("lib").glob("libgomp*"):
        ctypes.CDLL(str(library)).omp_set_num_threads(threads)


def _stream(descriptor: int, mode: str, is_unbuffered: bool) -> Any:
    errors = "backslashreplace" if descriptor == 2 else (sys.__stdout__ or sys.stdout).errors
    encoding = (sys.__stdout__ or sys.stdout).encoding
    raw: Any = io.FileIO(descriptor, mode, closefd=False)
    if mode == "r" or not is_unbuffered:
        raw = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    stream = io.TextIOWrapper(
        raw, encoding, errors, line_buffering=descriptor == 2 or os.isatty(descriptor), write_through=is_unbuffered
    )
    stream.mode = mode
    return stream


def _run(command: Command) -> None:
    if command.is_module:
        sys.modules.pop(command.words[0], None)  # which runs as `__main__`
        runpy._run_module_as_main(command.words[0])  # type: ignore[attr-defined]
        return
    path = command.words[0]
    main = sys.modules["__main__"]
    main.__dict__.update(__file__=path)
    exec(compile(Path(path).read_bytes(), path, "exec"), main.__dict__)


def _end(error: BaseException | None) -> NoReturn:
    """End this process as the interpreter does after the last line, an exit or an error that nobody caught."""
    code = _told(error)
    if isinstance(error, KeyboardInterrupt):
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    if ROOMS[0] in sys.meta_path:  # torch was not used: nothing of its own ends badly
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush(sys.stdout, sys.stderr)
        os._exit(code)
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError("the interpreter has ended")


def _told(error: BaseException | None) -> int:
    """Show an error as the interpreter does and return the exit code that the process has by it."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.last_exc = error  # type: ignore[attr-defined,unused-ignore]
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as leaving:
        return _told(leaving)
    return 1


def _flush(*streams: Any) -> None:
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()


def _forget(lent: Mapping[int, int]) -> None:
    """Have this process keep nothing of the state of the one that it was forked from, but what it is lent."""
    for each, copy in lent.items():
        os.dup2(copy, each)
    _forget_imports()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    gc.freeze()  # nothing of that process is collected here, and closes a descriptor that has another owner
    ROOMS[0].show()
    PRISTINE[0].restore()
    PRISTINE[0].restore_torch()


def _forget_imports() -> None:
    """Have modules that another thread was importing be imported anew: nobody ends what it has begun."""
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]
    importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]
    importlib._bootstrap._blocking_on.clear()  # type: ignore[attr-defined]


_OWN = {str(Path(place).absolute()) for place in ENVIRON.get("PYTHONPATH", "").split(os.pathsep) if place}
LIBRARIES = [place for place in sys.path[1:] if str(Path(place).absolute()) not in _OWN]

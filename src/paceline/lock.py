"""One run directory, one run: a lock for as long as a run lives, and a fence for a run that lost the lock unnoticed.

`RUN/lock` is locked (flock) by the process that begins a run, and by its ranks, which inherit the lock from it: the
system takes it away when all are gone, however they died, on whichever machine. The file's content only names them.

A run may lose its lock all the same: the file is deleted, a file server forgets a machine that was silent, the same
process begins the run anew, or the file system has no locks at all. So whoever takes the directory writes a token of
its own into the file, and a run looks for its token before every record and every checkpoint that it publishes: the
older one's writes fail, and nothing is interleaved. A run that starts its processes again counts its generations there,
which fences off those of an older generation. Without locks the processes named in the file decide instead; those
of another machine count as alive. Torch-free.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import secrets
import signal
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from paceline.errors import RunInUse, StorageError
from paceline.lock_file import (
    NAME,
    identity_of,
    in_use,
    is_orphaned,
    living_here,
    may_live,
    moved_to,
    read_holder,
    state_of,
    this_process,
    who_holds,
    write_holder,
)
from paceline.patience import Patience
from paceline.said import say_line
from paceline.system.lock_holders import holders_of

# "DESCRIPTOR:TOKEN:GENERATION", for ranks of a supervisor that holds the lock; no descriptor on another machine.
LOCK_VARIABLE = "PACELINE_LOCK"
ORPHANS_SECONDS = 120.0  # for ranks whose supervisor was killed to save and end
LOOK_SECONDS = 0.05
WAKE_SECONDS = 1.0  # between two looks for ranks that a signal has stopped
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)

# Which directories this process holds is a fact about the process: the system's lock cannot tell two of its runs apart.
_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()
_INHERITED: list[RunLock] = []  # held until the process ends, as by its supervisor


class RunLock:
    """A run directory that this process holds until the `with` block or the process ends, or `release` is called."""

    def __init__(self, run_dir: Path, descriptor: int, token: str, made: bool = False, generation: int = 1) -> None:
        """`made` says that the directory was made for the run: it is removed with the lock if it is empty by then."""
        self.run_dir, self.descriptor, self.token, self.generation = run_dir, descriptor, token, generation
        self.was_made_again = False  # whether somebody has deleted the file, and maybe more than that
        self._path = os.path.join(run_dir, NAME)  # noqa: PTH118 - looked at with every record
        self._taken_at = Path(os.path.realpath(run_dir))
        self._seen: tuple[int, ...] | None = None  # the generation and the state of the file that were right
        _HELD.add(self)
        self._let_go = weakref.finalize(self, _release, run_dir / NAME, descriptor, token, os.getpid(), made)
        # A worker that is forked from this process must not hold the directory for longer than this process does.
        os.register_at_fork(after_in_child=self._let_go)

    def check(self) -> None:
        """Raise RunInUse where another start has taken the directory: this one must write nothing more.

        A file that has not changed since is not read again. It is opened all the same: file servers then look anew.
        """
        state = state_of(self._path)
        if state is not None and self._seen == (self.generation, *state):
            return
        holder = read_holder(self.run_dir / NAME)
        if holder and holder.token != self.token:
            raise RunInUse(
                f"another start has taken over {self.run_dir}",
                f"{who_holds(holder)}; this one writes nothing more",
                "let one run at a time use a directory, and leave its file `lock` alone",
            )
        if holder and holder.generation > self.generation:
            raise RunInUse(
                f"generation {self.generation} of the run in {self.run_dir} is over",
                f"its supervisor has begun generation {holder.generation}; this one writes nothing more",
                "nothing: the run goes on in the newer generation",
            )
        self._seen = None if state is None else (self.generation, *state)

    def check_saving(self) -> None:
        """Do what `check` does, and raise StorageError where the directory is elsewhere: a save would make it anew."""
        self.check()
        if not os.path.lexists(self._path):
            self._refuse_moved()

    def continue_from(self, generation: int) -> None:
        """Count on from a generation of a holder before: numbers of generations only grow, whoever counts them."""
        self.generation = max(self.generation, generation)

    def next_generation(self) -> int:
        """Begin a new generation of the run's processes and return its number: no older one can write any more.

        Raises RunInUse, and StorageError where the disk does not take the number: older ranks would not be fenced off.
        Where the directory was moved they are not either, and what the run has saved is elsewhere.
        """
        self.check()
        try:
            if not os.path.lexists(self._path):
                self._make_again()
            holder = read_holder(self.run_dir / NAME) or this_process(self.token)
            write_holder(
                self.descriptor, replace(holder, generation=self.generation + 1, processes=holder.processes[:1])
            )
        except OSError as error:
            raise StorageError(
                f"cannot begin generation {self.generation + 1} of the run in {self.run_dir}",
                str(error),
                "mend the storage and start again: it goes on from the last checkpoint",
            ) from error
        self.generation += 1
        return self.generation

    def _make_again(self) -> None:
        """Make the file anew that somebody has deleted: a rank that is new would take the directory for itself.

        Raises RunInUse where another start has it by now, OSError, and StorageError where the file was moved.
        """
        self._refuse_moved()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if try_lock(descriptor) is False:
                raise in_use(self.run_dir, read_holder(self.run_dir / NAME), False)
            write_holder(descriptor, this_process(self.token))
            os.dup2(descriptor, self.descriptor, inheritable=False)
            self.was_made_again = True
        finally:
            os.close(descriptor)

    def _refuse_moved(self) -> None:
        there = moved_to(self.descriptor)
        if there and Path(there).parent == self._taken_at:
            raise StorageError(
                f"the run's directory {self.run_dir} is not there",
                f"the run has begun in {self._taken_at}, and the working directory is {Path.cwd()} now",
                "an absolute run.dir, or a program that does not change its working directory",
            )
        if there:
            raise StorageError(
                f"the run's directory {self.run_dir} was moved while the run went on",
                f"its lock, and what it has saved, is in {Path(there).parent} now",
                "move it back, or start again with that run.dir: it goes on from the newest checkpoint there",
            )

    @property
    def is_lost(self) -> bool:
        """Whether another start has taken the directory."""
        try:
            self.check()
        except RunInUse:
            return True
        return False

    def for_first_rank(self) -> dict[str, str]:
        """Return what the environment of a rank says that inherits the descriptor. Rank 0 takes the lock by it."""
        return {LOCK_VARIABLE: f"{self.descriptor}:{self.token}:{self.generation}"}

    def for_far_ranks(self) -> dict[str, str]:
        """Return what the environment of a rank says that cannot inherit the descriptor: it looks for the token."""
        return {LOCK_VARIABLE: f":{self.token}:{self.generation}"}

    def release(self) -> None:
        """Free the directory. A lock that was inherited stays with the supervisor."""
        if self not in _INHERITED:
            self._let_go()

    @property
    def is_held(self) -> bool:
        """Whether this process has not freed the directory since."""
        return self._let_go.alive

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(run_dir: Path) -> RunLock:
    """Return the run directory's lock, which this process then holds; take it over from an older run of this process.

    Ranks whose supervisor was killed save and end, which is waited for; those that a signal has stopped are woken for
    that. Raises RunInUse where another process holds it, naming it, and StorageError where its file cannot be written.
    """
    inherited = _inherited(run_dir)
    if inherited is not None:
        return inherited
    try:
        made = not run_dir.exists()
        descriptor = _locked(run_dir, Patience(ORPHANS_SECONDS))
        lock = RunLock(run_dir, descriptor, secrets.token_hex(8), made)
        write_holder(descriptor, this_process(lock.token))
    except OSError as error:
        raise StorageError(
            f"cannot lock the run's directory {run_dir}", str(error), "free space or choose another run.dir"
        ) from error
    return lock


def holder_here(run_dir: Path) -> tuple[str, RunInUse] | None:
    """Return the token of a living process of this machine that holds the directory, and the error that names it.

    Takes nothing, and says nothing of other machines' processes, of which nobody here knows whether they live.
    """
    holder = living_here(run_dir)
    if holder is None:
        return None
    return holder.token, in_use(run_dir, holder, False)


def is_live(run_dir: Path) -> bool:
    """Return whether a process holds the directory; one of another machine is taken at its word. Takes nothing."""
    holder = read_holder(run_dir / NAME)
    return holder is not None and may_live(holder)


def live_since(run_dir: Path) -> float | None:
    """Return since when a living process of this machine holds the directory, in seconds since the epoch, else None."""
    holder = living_here(run_dir)
    if holder is None:
        return None
    try:
        return datetime.datetime.fromisoformat(holder.started).timestamp()
    except ValueError:
        return None


@contextlib.contextmanager
def while_free(run_dir: Path) -> Iterator[bool]:
    """Yield whether nobody holds the directory; where it is so, nobody takes it before the block has ended.

    False where that cannot be known: there is no lock file, or the file system has no locks. Nothing is written.
    """
    try:
        descriptor = os.open(run_dir / NAME, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield try_lock(descriptor) is True
    finally:
        os.close(descriptor)


def adopt_generation(number: int) -> None:
    """Go over to a new generation of this process's run, in the process: what it inherits of the lock stays good."""
    descriptor, _, rest = os.environ.get(LOCK_VARIABLE, "").partition(":")
    token = rest.partition(":")[0]
    for lock in _INHERITED:
        lock.generation, lock.token = number, token or lock.token  # a new coordinator has a token of its own
    if rest:
        os.environ[LOCK_VARIABLE] = f"{descriptor}:{token}:{number}"


def try_lock(descriptor: int) -> bool | None:
    """Return whether the lock was free and is now ours; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise
    return True


def _locked(run_dir: Path, patience: Patience) -> int:
    """Return a descriptor of the lock file that holds the lock. Raises RunInUse, OSError."""
    path, is_told, woken = run_dir / NAME, False, -float("inf")
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # an older run that kept nothing has just taken the directory away
            continue
        try:
            free, own = try_lock(descriptor), _held_here(identity_of(descriptor))
            holder = read_holder(path)
            if own is not None:
                own_descriptor = os.dup(own.descriptor)
                os.close(descriptor)
                return own_descriptor
            is_held = free is False or (free is None and holder is not None and may_live(holder))
            if is_held and (not is_orphaned(holder) or patience.is_over):
                raise in_use(run_dir, holder, free is None)
            if not is_held and os.fstat(descriptor).st_nlink:  # else the file was deleted: the lock is of no file
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if is_held:
            if not is_told:
                say_line(f"lock     {who_holds(holder)} and is gone; its ranks save and end")
            is_told = True
            if time.monotonic() - woken >= WAKE_SECONDS:
                woken = time.monotonic()
                _wake_stopped(path)
            time.sleep(LOOK_SECONDS)  # a lock cannot be waited for and be given up


def _wake_stopped(path: Path) -> None:
    """Have ranks go on that a signal has stopped, and whose supervisor is gone: then they hear that they are to end.

    Nobody else will: they would hold the directory for ever, and their peers wait for them in a collective.
    """
    for each in holders_of(path):
        if each.is_stopped:
            say_line(f"lock     process {each.process} of it is stopped by a signal, and is woken: it saves and ends")
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(each.process, signal.SIGCONT)


def _held_here(identity: tuple[int, int]) -> RunLock | None:
    """Return a lock of this process on a file, the first of several where runs of this process followed one another."""
    return next((lock for lock in _HELD if lock.is_held and identity_of(lock.descriptor) == identity), None)


def _inherited(run_dir: Path) -> RunLock | None:
    """Return the lock that this process's supervisor has handed on, where it is this directory's."""
    descriptor, _, rest = os.environ.pop(LOCK_VARIABLE, "").partition(":")
    token, _, generation = rest.partition(":")
    try:
        status = (run_dir / NAME).stat()
        there = (status.st_dev, status.st_ino)
        for lock in _INHERITED:  # a further run of a script on the same directory
            if identity_of(lock.descriptor) == there:
                return lock
        if not token:
            return None
        if descriptor and there != identity_of(int(descriptor)):
            made_again = read_holder(run_dir / NAME)  # the file was deleted since this process's parent was started
            if made_again is None or made_again.token != token:
                return None
            descriptor = ""
        # On another machine than the holder's the file is looked into, and the lock is the holder's alone.
        opened = int(descriptor) if descriptor else os.open(run_dir / NAME, os.O_RDWR | os.O_CLOEXEC)
        os.set_inheritable(opened, False)
    except (OSError, ValueError):
        return None
    lock = RunLock(run_dir, opened, token, generation=int(generation or 1))
    _INHERITED.append(lock)
    holder = read_holder(run_dir / NAME)
    if descriptor and holder and holder.token == token:
        write_holder(lock.descriptor, replace(holder, processes=(*holder.processes, *this_process(token).processes)))
    return lock


def _release(path: Path, descriptor: int, token: str, process: int, made: bool) -> None:
    """Free a lock: what the file says first, for file systems without locks, unless it belongs to another by now."""
    with contextlib.suppress(OSError):  # the directory may be gone
        holder = read_holder(path)
        if os.getpid() == process and holder and holder.token == token:
            os.ftruncate(descriptor, 0)
            if made and [each.name for each in path.parent.iterdir()] == [path.name]:  # the run kept nothing
                path.unlink()
                path.parent.rmdir()
    os.close(descriptor)

"""Rest: whether a process does nothing at all, by what the system says of it. Torch-free.

A rank that is slow computes, wants a core, waits for a disk, or waits for the answer of somebody: a service, a child, a
program at the other end of a pipe. One that hangs on a lock or in a collective does none of that: its main thread
sleeps and is given no core. That is seen in a moment, whatever a step takes and however loaded the machine is, and says
far more than silence. Who polls for what never comes is given cores: it is not at rest by this. Nor is one that pauses,
as before it asks a service again, and goes on by itself; nor one that waits in a lock for a thread of its own, where
that one waits for somebody or pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.supervise.pulses.system import (
    ProcessTree,
    ThreadSeen,
    cpu_seconds,
    state_of,
    threads_of,
    waits_in_kernel,
)

ASLEEP, STOPPED, WANTS_A_CORE, WAITS_FOR_A_DISK = "S", "T", "R", "D"  # states of /proc
# Of a core, that a process uses which does nothing: threads of gloo look for messages a hundred times a second, for
# each group one.
IDLE_SHARE = 0.2
TICK_SECONDS = 0.05  # of computing that may be of before the look: the system counts in hundredths of a second
# Where a thread sleeps in Linux that waits for no answer, as parts of the names of functions: a lock or an event, or a
# signal. Elsewhere (poll, recv, pipe_read, do_wait, a driver, or no name) somebody else may be at work for it, and in
# a nanosleep it knows when it goes on.
FOR_NOBODY = ("futex", "pause", "signal")
FOR_A_WRITER = ("wait_for_partner", "fifo_open")  # where a thread waits until somebody opens a named pipe, as ours do
# Threads that wait for messages all the time, by the beginnings of their names: of gloo, of torch's store, of NCCL and
# of CUDA. Those of torch that compute are none of them: one of autograd may wait for a device.
LISTENERS = ("gloo_", "pt_tcpstore", "pt_nccl", "NCCL", "cuda-")
USUAL_SECONDS = 10.0  # in which a thread has not been given a core that waits for nothing of the step at hand


@dataclass(frozen=True)
class SystemView:
    """What the system knows of processes, each by its number."""

    threads: Callable[[int], Sequence[ThreadSeen]] = threads_of
    cpu_seconds: Callable[[int], float] = cpu_seconds
    sleeps_in: Callable[[int], str] = waits_in_kernel
    state: Callable[[int], str] = state_of
    below: Callable[[int], Collection[int]] = field(default_factory=lambda: ProcessTree().below)


class UsualThreads:
    """How often threads of processes had been given a core a while ago, while all was well.

    Who has been given none since waits for nothing that was begun meanwhile, as the thread of a pool of compilers does.
    A look at all threads costs, so a process has one in `USUAL_SECONDS`.
    """

    def __init__(self, threads: Callable[[int], Sequence[ThreadSeen]] = threads_of) -> None:
        self._threads = threads
        self._looks: dict[int, tuple[float, Mapping[int, int], Mapping[int, int]]] = {}  # when; before that, and then

    def note(self, process: int, now: float) -> None:
        """Look at a process that goes on, where the last look is old."""
        looked, _, newest = self._looks.get(process, (-float("inf"), {}, {}))
        if now - looked >= USUAL_SECONDS:
            self._looks[process] = now, newest, {each.number: each.switches for each in self._threads(process)}

    def of(self, process: int) -> Mapping[int, int]:
        """Return by thread what was so `USUAL_SECONDS` or more before the newest look; nothing where not known."""
        return self._looks.get(process, (0.0, {}, {}))[1]


@dataclass
class Rest:
    """Looks at one process from look to look, from now on.

    `usual` is by thread how often it had been given a core a while ago (`UsualThreads`).
    """

    process: int
    now: float  # seconds of the monotonic clock
    view: SystemView = field(default_factory=SystemView)
    usual: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began, self._cpu = self.now, self.view.cpu_seconds(self.process)
        self._switches, self._wanted = -1, set[int]()

    def goes_on(self, now: float, has_settled: bool = False) -> bool:
        """Return whether the process has done nothing since the look before; False at the first one.

        After one that is False the rest begins anew. Of one that `has_settled` stacks may have been asked since, and to
        be woken for that is no work: it has to do no more than its threads do anyway.
        """
        threads = self.view.threads(self.process)
        main = next((each for each in threads if each.number == self.process), None)
        wanted = {each.number for each in threads if each.state == WANTS_A_CORE}
        is_at_rest = (
            main is not None
            and main.state in (ASLEEP, STOPPED)
            and (main.switches == self._switches or (has_settled and self._switches >= 0))
            and not wanted & self._wanted  # a thread that looks for messages is met so once, and not twice
            and all(each.state != WAITS_FOR_A_DISK for each in threads)
            and any(part in self.view.sleeps_in(self.process) for part in FOR_NOBODY)
        )
        spent = self.view.cpu_seconds(self.process)
        is_at_rest &= spent - self._cpu <= IDLE_SHARE * (now - self._began) + TICK_SECONDS
        if is_at_rest:  # what costs most to know is asked last: what others do for it, as a compiler
            below = map(self.view.state, self.view.below(self.process))
            is_at_rest = all(state not in (WANTS_A_CORE, WAITS_FOR_A_DISK) for state in below)
            is_at_rest = is_at_rest and not any(self._asks_somebody(each) for each in threads)
        self._wanted, self._switches = wanted, main.switches if main is not None else -1
        if not is_at_rest:
            self._began, self._cpu = now, spent
        return is_at_rest

    def _asks_somebody(self, thread: ThreadSeen) -> bool:
        """Return whether a thread beside the main one waits for an answer, or to ask again, since not long ago."""
        if thread.number == self.process or thread.state != ASLEEP or thread.name.startswith(LISTENERS):
            return False
        if self.usual.get(thread.number) == thread.switches:
            return False
        sleeps_in = self.view.sleeps_in(thread.number)
        return not any(part in sleeps_in for part in (*FOR_NOBODY, *FOR_A_WRITER))

"""The roll call: ranks meet in the store of their world before a call that all of them must make, as an evaluation.

A rank that makes such a call alone (`if rank == 0: run.evaluate()`) would send its peers, who have gone on to the next
step, numbers that they take for those of the step: gloo ends the process, and where sizes happen to be equal the
numbers are wrong. So the first rank that comes leaves word of its call, and waits. A thread of each peer looks for the
word, and answers where its own rank has begun a later step, or has left: it will never come.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from paceline.errors import ConfigError, PacelineError
from paceline.foreign_errors import is_of_no_descriptor
from paceline.patience import Patience
from paceline.run.process.gathering import (
    LONGEST_SECONDS,
    MOST_LOOKS,
    SHORTEST_SECONDS,
    is_served,
    word_of_supervisor,
)

LOOK_SECONDS = 1.0  # between two looks for a word
MOST_ANSWERS = 2_000  # looks a second, of all ranks: in a larger world each looks more rarely
ANSWER_SECONDS = 10.0  # at least, of an idle machine; then who waits goes on as if all had come: peers may be slow
DESCRIPTORS_SECONDS = 60.0  # that a process has none left, after which its store counts as gone
STOP_SECONDS = 2.0  # for a look that is under way
STEP = "run.step"
OF_A_CALL = ("word", "come", "all")  # what a call leaves in the store
KEPT_CALLS = 64  # whose words stay: all have left the call before, and a thread that is slow may look for it still
ROLLS = "paceline/roll"  # how many roll calls a rank has begun in a store, which several runs of a script may share
T = TypeVar("T")


def _nobody() -> None:
    """Tell nobody."""


class RollCall:
    """What a rank knows of the calls that its world makes together. Each world has its own; one rank alone needs none.

    The calls of a world are counted from 1, on all ranks alike. A store that has gone with its process ends all looks:
    then calls are made as they come.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None = None, is_reformed: bool = False) -> None:
        """`store` is that of the process group, if none is given.

        In a world that is formed anew ranks that have come later make calls that others have made before: there a
        difference is a failure that may be tried again.
        """
        self.rank, self.size, self._is_reformed = rank, size, is_reformed
        self._has_completed = False  # whether the run was trained to its end
        in_group = size > 1 and dist.is_initialized()
        self._store = store or (dist.distributed_c10d._get_default_store() if in_group else None)
        self._prefix = f"{ROLLS}/{self._try(lambda store: store.add(f'{ROLLS}/of/{rank}', 1))}"
        self._left, self._come = f"{self._prefix}/left", 0  # how often this rank has come to a step
        self._met, self._begun = 0, -1  # the calls so far, and the newest step that this rank has begun
        self._word, self._over = word_of_supervisor(), threading.Event()
        self._every, self._longest = max(LOOK_SECONDS, size / MOST_ANSWERS), max(LONGEST_SECONDS, size / MOST_LOOKS)
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._listen, name="paceline-roll", daemon=True)
            self._thread.start()

    def begins(self, step: int) -> None:
        """Note that this rank begins a step, or goes back behind it; it costs nothing."""
        self._begun = step

    def meet(self, call: str, step: int) -> None:
        """Return once all ranks have come to the same call after the same step.

        Raises ConfigError where another rank makes another call, or has gone on. A peer that does not come for long is
        not waited for here: the call itself waits, and hears of one that was lost.
        """
        if self._store is None:
            return
        self._met += 1
        number, mine = self._met, [call, step, self.rank]
        come = self._try(lambda store: self._leave_word(store, number, mine))
        self._try(lambda store: self._meet(store, number, mine, come == self.size))

    def come_to_step(
        self, step: int, joins: Mapping[str, Callable[[], object]], tell_wait: Callable[[], None] = _nobody
    ) -> None:
        """Return once all ranks have come to a step or an end, and join what some of them call before, by its name.

        Some have stayed between two steps of their loops, others begin theirs: neither knows what the others do there.
        `step` is the last one that is made. A call that cannot be joined raises on all ranks, as in `meet`. `tell_wait`
        is called where a wait begins, also after a call that was joined.
        """
        tell_wait()
        self._come += 1
        key, seconds = f"{self._prefix}/begins/{self._come}", SHORTEST_SECONDS
        if self._try(lambda store: store.add(f"{key}/come", 1)) == self.size:
            self._try(lambda store: store.set(f"{key}/all", "yes"))
        while (open_call := self._try(lambda store: self._open_call(store, f"{key}/all"))) is not None:
            if open_call:
                joins.get(open_call, lambda: self.meet(STEP, step))()
                tell_wait()
                continue
            time.sleep(seconds)
            seconds = min(1.5 * seconds, self._longest)

    def ends(self, has_completed: bool) -> None:
        """Note that the run has ended, as complete or otherwise: no step follows, so nobody is to be answered."""
        self._has_completed = has_completed
        self._over.set()

    def stop(self) -> None:
        """Answer nobody any more: this process is to be in another world, or ends."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
        self._store = None

    def leave(self) -> None:
        """Stop; peers that wait for this rank, now or later, are told that it comes no more."""
        told = json.dumps([self.rank, "has ended", self._has_completed])
        self._try(lambda store: store.set(self._left, told) if is_served(store) else None)
        self.stop()

    def _try(self, work: Callable[[dist.Store], T]) -> T | None:
        """Do something with the store; None where that has gone, now or before.

        A store that is a file cannot be opened by a process without descriptors. Who took that for a store that has
        gone went on alone, and peers waited for its word. So `work` is done again then: all that it adds it adds last.
        """
        patience = Patience(DESCRIPTORS_SECONDS)
        while self._store is not None:
            try:
                return work(self._store)
            except RuntimeError as error:  # torch's errors of a store
                if not is_of_no_descriptor(error) or patience.is_over:
                    self._store = None
                    return None
            time.sleep(SHORTEST_SECONDS)
        return None

    # ---- who waits -------------------------------------------------------------------------------------------------

    def _open_call(self, store: dist.Store, all_come: str) -> str | None:
        """Return the call that a peer waits in, "" where none does; None once all have come, or one has left."""
        word = f"{self._key(self._met + 1)}/word"
        is_called = store.check([word])  # asked first: once all have come, a word is of a later step
        if self._is_told() or store.check([all_come]) or store.check([self._left]):
            return None
        return str(json.loads(store.get(word))[0]) if is_called else ""

    def _leave_word(self, store: dist.Store, number: int, mine: list[object]) -> int:
        """Leave word of this rank's call, where it is the first, and return how many have come to it by now."""
        key, said = self._key(number), json.dumps(mine)
        first = json.loads(store.compare_set(f"{key}/word", "", said))  # ours, where none is there
        if first[:2] != mine[:2]:
            store.set(f"{key}/apart", json.dumps([self.rank, _told(str(mine[0]), int(str(mine[1]))), True]))
            raise self._apart(first, self.rank, _told(str(mine[0]), int(str(mine[1]))))
        return store.add(f"{key}/come", 1)

    def _meet(self, store: dist.Store, number: int, mine: list[object], is_last: bool) -> None:
        """Wait until all have come to a call; the last of them says so."""
        key = self._key(number)
        if is_last:
            store.set(f"{key}/all", "yes")
            for name in OF_A_CALL if number > KEPT_CALLS else ():
                store.delete_key(f"{self._key(number - KEPT_CALLS)}/{name}")
        patience, seconds = Patience(max(ANSWER_SECONDS, 4 * self._every)), SHORTEST_SECONDS
        while not (store.check([f"{key}/all"]) or patience.is_over or self._is_told()):
            for found in (f"{key}/apart", self._left):
                if store.check([found]):
                    rank, told, is_certain = json.loads(store.get(found))
                    # Who has failed meanwhile tells more; and all may have come since, and made the call, and left.
                    if is_certain and not store.check([f"{key}/all"]):
                        raise self._apart(mine, int(rank), str(told))
            time.sleep(seconds)
            seconds = min(1.5 * seconds, self._longest)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"

    def _apart(self, called: list[object], other: int, told: str) -> PacelineError:
        call, step, rank = called
        kind = PacelineError if self._is_reformed else ConfigError
        after = f"after step {step}" if step else "before the first step"
        return kind(
            f"rank {rank} called {call}() {after}, and rank {other} did not",
            f"rank {other} {told}; {call}() computes on all ranks together, so each of them must come to it",
            f"{call}() on every rank; ask for the rank only where its result is used: "
            f"found = {call}(); if run.world.is_first: print(found)",
        ).naming_ranks()

    def _is_told(self) -> bool:
        """Return whether the supervisor has said that a peer has gone, which the call itself is to find."""
        return self._word is not None and self._word.exists()

    # ---- who is waited for -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Answer where this rank stands in one step from look to look; who makes steps leaves the store alone.

        torch prints a page where a store has gone, as at the end of the process that serves it.
        """
        before = -1
        while not self._over.wait(self._every):
            store, begun = self._store, self._begun
            is_new, before = begun != before, begun
            if is_new or store is None or self._is_told():
                continue
            try:
                self._answer(store)
            except RuntimeError as error:
                if not is_of_no_descriptor(error):
                    return

    def _answer(self, store: dist.Store) -> None:
        """Tell a peer that waits in a call, where this rank has gone on without it."""
        number = self._met + 1
        key = self._key(number)
        if not store.check([f"{key}/word"]):
            return
        _, step, _ = json.loads(store.get(f"{key}/word"))
        begun = self._begun
        if self._met + 1 == number and begun > step:  # asked in this order: it may come to the call just now
            store.set(f"{key}/apart", json.dumps([self.rank, f"has begun step {begun}", True]))


def _told(call: str, step: int) -> str:
    return f"called {call}() after step {step}"

"""Calls that all ranks must make: one that a rank makes alone is told with both ranks; who is slow is waited for."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from runs import run_patiently

from paceline.errors import ConfigError, PacelineError
from paceline.run.process import roll_call
from paceline.run.process.roll_call import RollCall

EVALUATE, SAVE = "run.evaluate", "run.save"
Make = Callable[..., RollCall]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return what makes the roll call of one of two ranks that share a store, and looks a hundred times a second."""
    monkeypatch.setattr(roll_call, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 1e9)
    store, made = dist.HashStore(), list[RollCall]()

    def call(rank: int, **more: bool) -> RollCall:
        made.append(RollCall(rank, 2, store, **more))
        return made[-1]

    yield call
    for each in made:
        each.stop()


class Beside(threading.Thread):
    """A rank's call on a thread of its own."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.error: PacelineError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except PacelineError as error:
            self.error = error


def test_ranks_that_come_to_the_same_calls_go_on(make: Make) -> None:
    first, second = make(0), make(1)
    for step in range(5):
        for each in (first, second):
            each.begins(step)
        peer = Beside(lambda step=step: second.meet(EVALUATE, step))  # type: ignore[misc]
        first.meet(EVALUATE, step)
        peer.join()
        assert peer.error is None


@pytest.mark.parametrize("alone", [0, 1])
def test_a_call_that_one_rank_makes_alone_is_told_with_both(make: Make, alone: int) -> None:
    calls = make(0), make(1)
    for each in calls:
        each.begins(3)
    calls[1 - alone].begins(4)
    with pytest.raises(ConfigError, match=rf"rank {alone} called run\.evaluate\(\) after step 3, and rank") as caught:
        calls[alone].meet(EVALUATE, 3)
    assert caught.value.because.startswith(f"rank {1 - alone} has begun step 4;") and caught.value.names_ranks


def test_a_rank_that_is_slow_is_waited_for(make: Make) -> None:
    """It has looked for words many times and has said nothing: it may come yet, and does."""
    first, second = make(0), make(1)
    looks, enough = [0], threading.Event()
    answer = second._answer

    def counted(store: dist.Store) -> None:
        answer(store)
        looks[0] += 1
        if looks[0] >= 5:
            enough.set()

    second._answer = counted  # type: ignore[method-assign]
    second.begins(3)
    peer = Beside(lambda: first.meet(SAVE, 3))
    assert enough.wait(60) and peer.is_alive()
    second.meet(SAVE, 3)
    peer.join()
    assert peer.error is None


def test_different_calls_are_told_on_both_ranks(make: Make) -> None:
    first, second = make(0), make(1)
    peer = Beside(lambda: first.meet(SAVE, 2))
    with pytest.raises(ConfigError):
        second.meet(EVALUATE, 2)
    peer.join()
    assert isinstance(peer.error, ConfigError)


def test_a_rank_that_goes_back_behind_a_step_has_not_gone_on(make: Make) -> None:
    first, second = make(0), make(1)
    second.begins(7)
    second.begins(-1)
    peer = Beside(lambda: first.meet(EVALUATE, 4))
    second.meet(EVALUATE, 4)
    peer.join()
    assert peer.error is None


def test_who_has_trained_to_the_end_and_left_does_not_come(make: Make) -> None:
    first, second = make(0), make(1)
    second.ends(has_completed=True)
    second.leave()
    with pytest.raises(ConfigError, match="rank 0 called") as caught:
        first.meet(EVALUATE, 6)
    assert caught.value.because.startswith("rank 1 has ended;")


def test_nobody_is_waited_for_without_end(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself is then made: it waits for peers that are slow, and hears of one that has died."""
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 0.0)
    alone = make(0)
    waits = Beside(lambda: alone.meet(EVALUATE, 6))
    waits.join(60)
    assert not waits.is_alive() and waits.error is None


def test_a_store_that_has_gone_stops_no_call(make: Make) -> None:
    class Gone:
        def add(self, key: str, number: int) -> int:
            if "/of/" in key:
                return 1
            raise dist.DistError("the store has gone")

        def check(self, keys: list[str]) -> bool:
            raise dist.DistError("the store has gone")

        def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
            raise dist.DistError("the store has gone")

    alone = RollCall(0, 2, Gone())  # type: ignore[arg-type]
    calls = Beside(lambda: (alone.come_to_step(5, {}), alone.meet(EVALUATE, 6)))
    calls.join(60)
    alone.stop()
    assert not calls.is_alive() and calls.error is None


WITHOUT_DESCRIPTORS = """
import os, resource, sys, threading, time
import torch.distributed as dist
from paceline.run.process.roll_call import RollCall

first, second = (RollCall(rank, 2, dist.FileStore(sys.argv[1], -1)) for rank in (0, 1))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
freed = []

def free():
    time.sleep(0.5)
    freed.append(True)
    for each in held:
        os.close(each)

threading.Thread(target=free).start()
calls = [lambda each: each.come_to_step(5, {}), lambda each: each.meet("run.evaluate", 6)]
for call in calls:
    peer = threading.Thread(target=call, args=(second,))
    peer.start()
    call(first)
    assert freed, "nobody goes on alone"
    peer.join()
print("met", flush=True)
os._exit(0)
"""


def test_a_rank_without_descriptors_comes_when_it_has_some_again(tmp_path: Path) -> None:
    """Its store is a file, which it could not open: it went on without a word, and its peers waited for it."""
    done = run_patiently([sys.executable, "-c", WITHOUT_DESCRIPTORS, tmp_path / "store"])
    assert (done.returncode, done.stdout) == (0, "met\n"), done.stderr


@pytest.mark.parametrize(("begun", "answers"), [([1, 2, 3], 0), ([1, 1, 1, 2], 2)])
def test_a_rank_that_makes_steps_leaves_the_store_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, begun: list[int], answers: int
) -> None:
    """The process that serves the store may have left, at the end of a run, and torch prints a page for each look."""
    monkeypatch.setattr(roll_call, "LOOK_SECONDS", 1e6)
    rank, asked, left = make(0), list[dist.Store](), list(begun)

    def step_before_a_look(seconds: float) -> bool:
        if left:
            rank.begins(left.pop(0))
            return False
        return True

    over = rank._over
    rank._answer = asked.append  # type: ignore[method-assign]
    rank._over = SimpleNamespace(wait=step_before_a_look)  # type: ignore[assignment]
    rank._listen()
    rank._over = over
    assert len(asked) == answers


def test_nobody_is_answered_any_more_when_the_run_has_ended(make: Make) -> None:
    rank = make(0)
    thread = rank._thread
    assert thread is not None and thread.is_alive()
    rank.ends(has_completed=True)
    thread.join(60)
    assert not thread.is_alive()


def test_a_second_run_of_a_script_knows_nothing_of_the_calls_of_the_first(make: Make) -> None:
    for call in (EVALUATE, SAVE):
        first, second = make(0), make(1)
        peer = Beside(lambda call=call, first=first: first.meet(call, 9))  # type: ignore[misc]
        second.meet(call, 9)
        peer.join()
        assert peer.error is None
        for each in (first, second):
            each.ends(has_completed=True)
            each.leave()


@pytest.mark.parametrize("calls", [{0: [EVALUATE]}, {1: [SAVE, EVALUATE]}, {0: [SAVE], 1: [SAVE, EVALUATE]}, {}])
def test_in_a_world_that_is_formed_anew_all_join_what_one_does_before_its_step(
    make: Make, calls: dict[int, list[str]]
) -> None:
    """Those that stayed are between two steps of their loops, and one that has come later is before its loop."""
    made: dict[int, list[str]] = {0: [], 1: []}

    def ranks_part(rank: int) -> None:
        roll = make(rank, is_reformed=True)

        def call(name: str) -> None:
            roll.meet(name, 4)
            made[rank].append(name)

        for name in calls.get(rank, ()):
            call(name)
        roll.come_to_step(4, {name: functools.partial(call, name) for name in (EVALUATE, SAVE)})

    peer = Beside(lambda: ranks_part(1))
    ranks_part(0)
    peer.join()
    assert peer.error is None
    assert made[0] == made[1] == max(calls.values(), key=len, default=[])


@pytest.mark.parametrize("is_there", [True, False])
def test_who_leaves_after_the_process_that_serves_the_store_says_nothing_to_it(is_there: bool) -> None:
    """As at the end of a run on several nodes, whose first rank has ended: torch would print a page of its own."""
    said: list[str] = []

    class Told(dist.PrefixStore):
        def set(self, key: str, value: str) -> None:
            said.append(key)

    server: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assert server is not None
    last = RollCall(1, 2, Told("world", dist.TCPStore("127.0.0.1", server.port, None, False)))
    if not is_there:
        server = None
    last.ends(has_completed=True)
    last.leave()
    assert len(said) == is_there


def test_a_call_that_cannot_be_joined_is_told_on_all_ranks_of_a_world_that_is_formed_anew(make: Make) -> None:
    """Survivors replan between two steps, as the new rank's loop does not: it came later, and begins the next step."""
    stayed, came = make(0, is_reformed=True), make(1, is_reformed=True)
    peer = Beside(lambda: stayed.meet("run.replan", 4))
    begins = Beside(lambda: came.come_to_step(4, {EVALUATE: lambda: None}))
    for each in (peer, begins):
        each.join(30)
        assert not each.is_alive() and each.error is not None
        assert each.error.what == "rank 0 called run.replan() after step 4, and rank 1 did not"
        assert each.error.because.startswith("rank 1 called run.step() after step 4;")


def test_a_peer_that_ends_as_it_begins_a_call_keeps_nobody_in_the_store(make: Make) -> None:
    """No wait in the store hears that a peer has gone."""

    class WaitsForEver(dist.HashStore):
        def get(self, key: str) -> bytes:
            assert self.check([key]), f"nobody may ever set {key}"
            return super().get(key)

        def add(self, key: str, number: int) -> int:
            count = super().add(key, number)
            if "/1/" in key and key not in ended:  # where the first rank's process ends
                ended.add(key)
                raise dist.DistError("this process has ended")
            return count

    ended, store = set[str](), WaitsForEver()
    first, second = RollCall(0, 2, store), RollCall(1, 2, store)
    first.meet(EVALUATE, 2)
    second.meet(EVALUATE, 2)
    for each in (first, second):
        each.stop()


def test_calls_that_are_over_leave_the_store(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "KEPT_CALLS", 3)
    first, second = make(0), make(1)
    store, numbers = first._store, list[int]()
    assert store is not None
    for step in range(8):
        peer = Beside(lambda step=step: second.meet(SAVE, step))  # type: ignore[misc]
        first.meet(SAVE, step)
        peer.join()
        assert peer.error is None
        numbers.append(store.num_keys())
    assert numbers[2] == numbers[3] == numbers[7] and numbers[1] < numbers[2]


def test_what_a_new_rank_does_between_steps_that_survivors_make_again_is_joined_too(make: Make) -> None:
    """The state was older: survivors make the steps since then in one call of theirs, the new rank one by one."""
    stayed, came = make(0, is_reformed=True), make(1, is_reformed=True)
    joined = list[str]()

    def join() -> None:
        stayed.meet(EVALUATE, 5)
        joined.append(EVALUATE)

    def again() -> None:
        for step in (4, 5):
            stayed.come_to_step(step, {EVALUATE: join}, lambda: joined.append(""))

    peer = Beside(again)
    came.come_to_step(4, {})
    came.meet(EVALUATE, 5)
    came.come_to_step(5, {})
    peer.join(60)
    assert not peer.is_alive() and peer.error is None
    assert joined == ["", "", EVALUATE, ""], "it says that it waits, and again after what it has joined"


def test_a_call_after_the_step_is_not_joined_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer comes to the step and makes its next call between two looks of who waits for it."""
    monkeypatch.setattr(roll_call, "LOOK_SECONDS", 1e6)  # the looks are those of who waits
    looks = list[str]()

    class ComesBetweenLooks(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            looks.extend(keys)
            found = super().check(keys)
            if looks == keys:  # after the first look, whichever it is
                came.come_to_step(4, {})
                came._try(lambda store: came._leave_word(store, 1, [EVALUATE, 5, 1]))
            return found

    store = ComesBetweenLooks()
    stayed, came = RollCall(0, 2, store, is_reformed=True), RollCall(1, 2, store, is_reformed=True)
    joined = list[str]()
    stayed.come_to_step(4, {EVALUATE: lambda: joined.append(EVALUATE)})
    assert joined == [] and len(looks) > 3
    for each in (stayed, came):
        each.stop()


def test_a_peer_that_comes_and_ends_between_two_looks_has_not_stayed_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody had come at the look for all, and then the peer came, made the call, and trained to its end."""
    monkeypatch.setattr(roll_call, "LOOK_SECONDS", 1e6)

    class EndsBetweenLooks(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            found = super().check(keys)
            if not found and keys[0].endswith("/1/all") and peer._met == 0:
                peer.meet(EVALUATE, 6)
                peer.ends(has_completed=True)
                peer.leave()
            return found

    store = EndsBetweenLooks()
    slow, peer = RollCall(0, 2, store), RollCall(1, 2, store)
    slow.meet(EVALUATE, 6)
    slow.stop()


@pytest.mark.parametrize("has_completed", [True, False])
def test_who_waits_for_a_step_is_told_of_a_rank_that_has_left(make: Make, has_completed: bool) -> None:
    """A loop that the others have left by themselves: the collectives of the step hear of that, and say it."""
    stayed, came = make(0, is_reformed=True), make(1, is_reformed=True)
    peer = Beside(lambda: came.come_to_step(5, {}))
    stayed.ends(has_completed)
    stayed.leave()
    peer.join(60)
    assert not peer.is_alive() and peer.error is None


def test_a_peer_that_has_failed_tells_more_than_who_waits_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself hears that it has gone, as an echo of its error."""
    monkeypatch.setattr(roll_call, "ANSWER_SECONDS", 0.0)
    first, second = make(0), make(1)
    second.ends(has_completed=False)
    second.leave()
    waits = Beside(lambda: first.meet(EVALUATE, 6))
    waits.join(60)
    assert not waits.is_alive() and waits.error is None


def test_in_a_world_that_is_formed_anew_a_difference_may_be_tried_again(make: Make) -> None:
    """A rank that has come later makes calls in steps that the others have made before."""
    stayed, came = make(0, is_reformed=True), make(1, is_reformed=True)
    stayed.begins(5)
    with pytest.raises(PacelineError) as caught:
        came.meet(EVALUATE, 4)
    assert not isinstance(caught.value, ConfigError) and caught.value.exit_code == 1

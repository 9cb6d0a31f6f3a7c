"""Plans made ahead: used at once where they are there, waited for where they are wanted, and in nobody's way."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import wait_until
from tests_shared import decoder_task, plan_of

from paceline.errors import DoesNotFit
from paceline.patience import Patience
from paceline.scratch import Scratch
from paceline.session import replanner
from paceline.session.ready.prove import Proven
from paceline.session.replanner import GivesWay, ProofsAtHand, Replanner
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again import elastic as elastic_module
from paceline.supervise.again import plans_ahead
from paceline.supervise.again.elastic import Elastic, Replanned
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.machines import OneMachine
from paceline.supervise.crew import Crew, attend
from paceline.supervise.starting import Starter
from paceline.supervise.told.brief import Brief

NINE = plan_of(Layout(dp_replicate=9), batch=18)
BRIEF = Brief(NINE, 100, 1, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())


def test_the_plan_for_the_next_loss_is_made_ahead_and_used() -> None:
    """Nine devices, of which a node of two is lost: there is no plan for seven, and that for six is made beside."""
    asked, there = list[int](), [9]

    def replan(devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        asked.append(devices)
        if devices == 7:
            raise DoesNotFit("no plan", "seven", "")
        smaller = dataclasses.replace(NINE, layout=Layout(dp_replicate=devices))
        return Replanned(
            dataclasses.replace(now, plan=smaller), DecisionRecord("replan", "9", "6", "b", {"devices": 6})
        )

    elastic = Elastic(RecoverySpec(), BRIEF, replan, lambda: there[0])
    elastic.prepare(2, lambda: False)
    assert not asked, "before the first step the ranks want the cores"
    elastic._asked = -math.inf
    elastic.prepare(2, lambda: True)
    there[0] = 7
    assert elastic.next_plan()
    assert asked[:2] == [7, 6]
    found, (decision,) = elastic.take(lambda text: None)
    assert found.layout.devices == 6 and decision.evidence == {"devices": 6, "made_ahead": True}
    off = Elastic(RecoverySpec(prepare=False), BRIEF, replan, lambda: there[0])
    off.prepare(2, lambda: True)
    assert off.next_plan() and off.take(lambda text: None)[1][0].evidence == {"devices": 6}


def test_a_recovery_waits_for_the_plan_it_wants_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a proof got no core beside a busy one, and the recovery waited 16 s for it."""
    monkeypatch.setattr(plans_ahead, "WAIT_SECONDS", 0.05)
    is_proven = threading.Event()
    ahead = plans_ahead.Ahead(lambda devices: is_proven.wait(60))
    ahead.begin([2, 1])
    assert not ahead.wait_for(2), "who recovers makes it then"
    is_proven.set()
    wait_until(lambda: ahead.wait_for(2))


def test_a_recovery_waits_for_no_plan_that_it_does_not_want() -> None:
    """Two nodes are lost at once, while a plan for the loss of one is made: it would be of no use."""
    began, ends = threading.Event(), threading.Event()

    def make(devices: int) -> None:
        began.set()
        ends.wait(60)

    ahead, seconds = plans_ahead.Ahead(make), list[float]()
    ahead.begin([3, 2, 1])
    assert began.wait(60)

    def ask() -> None:
        before = time.monotonic()
        assert not ahead.wait_for(2)
        seconds.append(time.monotonic() - before)

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    asks.join(60)
    ends.set()
    assert seconds and seconds[0] < plans_ahead.WAIT_SECONDS / 2


def test_a_plan_asked_for_while_a_larger_one_fails_is_waited_for() -> None:
    """There is no moment at which neither is known to be made, in which who asks would make it once more."""
    fails, ends, done = threading.Event(), threading.Event(), list[bool]()

    def make(devices: int) -> None:
        if devices == 3:
            assert fails.wait(60)
            raise DoesNotFit("no plan", "three", "")
        assert ends.wait(60)

    ahead = plans_ahead.Ahead(make)
    ahead.begin([3, 2])

    def ask() -> None:
        assert not ahead.wait_for(3)
        done.append(ahead.wait_for(2))

    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    fails.set()
    wait_until(lambda: 2 in ahead._at_work)
    ends.set()
    asks.join(60)
    assert done == [True]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no priority of its own")
def test_no_thread_of_a_supervisor_is_of_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was held the interpreter while it got no core: recoveries waited 4 to 12 s beside one busy process."""
    found = list[int]()

    def prove(*given: Any) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise DoesNotFit("no plan", "what is asked here is known", "")

    monkeypatch.setattr(replanner, "prove", prove)
    monkeypatch.setattr(Replanner, "planned", lambda self, devices, precision: (None, False))
    elastic = Elastic(RecoverySpec(), BRIEF, Replanner(make_spec(decoder_task()), lambda text: None), lambda: 9)
    elastic.prepare(8, lambda: True)
    wait_until(lambda: found)
    assert found == [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]


def test_the_process_of_a_proof_made_ahead_is_of_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[Any]()

    def prove(planned: Any, say: Any, starts: Any) -> None:
        given.append(starts)
        raise DoesNotFit("no plan", "what is asked here is known", "")

    monkeypatch.setattr(replanner, "prove", prove)
    monkeypatch.setattr(Replanner, "planned", lambda self, devices, precision: (None, False))
    for gives_way in (False, True):
        with pytest.raises(DoesNotFit):
            Replanner(make_spec(decoder_task()), lambda text: None)(2, BRIEF, gives_way)
    assert isinstance(given[0], ProofsAtHand) and isinstance(given[1], GivesWay)
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    process = ProofsAtHand().lowest.start_apart(["proof", "no such request", "no such result"], dict(os.environ))
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == replanner.LOWEST > own
    assert process.wait() != 0


def test_where_the_system_allows_no_other_priority_the_proof_is_made_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*given: object) -> None:
        raise PermissionError

    process: Any = SimpleNamespace(pid=0)
    monkeypatch.setattr(replanner, "starter", lambda words, environ: lambda own: process)
    monkeypatch.setattr(os, "setpriority", refuses)
    assert ProofsAtHand().lowest.start_apart(["proof", "request.json", "result.json"], {}) is process


@pytest.mark.parametrize("gives_way", [False, True])
def test_a_plan_in_the_making_ends_with_the_run_it_is_for(monkeypatch: pytest.MonkeyPatch, gives_way: bool) -> None:
    """In a notebook it went on for as long as its proof took, beside whatever came next."""
    started, tried = list[subprocess.Popen[bytes]](), list[int]()

    def sleeps(words: Any, environ: Any) -> Any:
        started.append(subprocess.Popen(["sleep", "600"], process_group=0))
        return lambda place: started[-1]

    def prove(planned: Any, say: Any, starts: Any) -> None:
        tried.append(starts.start_apart(["proof"], {}).wait())
        starts.start_apart(["proof"], {})  # as a proof does of what is left after an end

    monkeypatch.setattr(replanner, "starter", sleeps)
    monkeypatch.setattr(replanner, "prove", prove)
    monkeypatch.setattr(Replanner, "planned", lambda self, devices, precision: (None, False))
    replan = Replanner(make_spec(decoder_task()), lambda text: None)
    ahead = plans_ahead.Ahead(lambda devices: replan(devices, BRIEF, gives_way))
    ahead.begin([2, 1])
    wait_until(lambda: bool(started))
    replan.close()
    wait_until(lambda: ahead.is_made(2) is not None and ahead.is_made(1) is not None)
    assert tried == [-9] and len(started) == 1 and not ahead.wait_for(2) and not ahead.wait_for(1)
    with pytest.raises(replanner.RunIsOver):
        replan(3, BRIEF)


# ---- plans of larger worlds -----------------------------------------------------------------------------------------

ANY = RecoverySpec(worth=None, max_devices=12, prepare=False)


def larger(devices: int, now: Brief) -> Replanned:
    plan = dataclasses.replace(NINE, layout=Layout(dp_replicate=devices))
    return Replanned(dataclasses.replace(now, plan=plan), DecisionRecord("replan", "9", str(devices), "b", {}))


def asked_again(elastic: Elastic, done: int = 0) -> bool:
    elastic._looked = -math.inf
    return elastic.pays(lambda: done)


def test_a_rank_that_dies_while_a_larger_world_is_planned_is_noticed_meanwhile() -> None:
    """The plan, and its proof of many seconds, were made by who looks after the ranks."""
    noticed, seen = threading.Event(), list[bool]()
    process = subprocess.Popen(["sleep", "600"])

    def replan(devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        process.kill()
        seen.append(noticed.wait(30))
        raise DoesNotFit("no plan", "ten", "")

    one = object.__new__(Generations)
    one._crew = Crew([process], lambda lost: noticed.set())
    one._policy, one._machines = ANY, OneMachine(Starter(lambda place: process, None, print), {})
    one._elastic = Elastic(ANY, BRIEF, replan, lambda: 10)
    with Scratch("world") as folder:
        attend(one._crew, Patience(120), 1.0, one._settled(Path(folder), lambda: (), lambda: False))
        wait_until(lambda: seen)
    assert seen == [True]


def test_a_larger_world_is_entered_when_its_plan_is_there() -> None:
    made = threading.Event()
    elastic = Elastic(ANY, BRIEF, lambda n, now, gives_way=False: made.wait(60) and larger(n, now), lambda: 10)
    assert not asked_again(elastic) and not asked_again(elastic)
    made.set()
    wait_until(lambda: asked_again(elastic))
    assert elastic.next_plan() and elastic.take(lambda text: None)[0].layout.devices == 10


def test_a_recovery_waits_for_no_plan_of_a_larger_world() -> None:
    """It goes on with the devices that it has a plan for, and grows when the plan is there."""
    made, asked = threading.Event(), list[int]()

    def replan(devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        asked.append(devices)
        assert made.wait(60)
        return larger(devices, now)

    elastic = Elastic(ANY, BRIEF, replan, lambda: 10)
    assert not asked_again(elastic)
    wait_until(lambda: asked)
    assert elastic.next_plan() and elastic.take(lambda text: None) == (NINE, ())
    made.set()
    wait_until(lambda: asked_again(elastic))


def test_a_world_that_shrinks_is_no_larger_than_what_is_there_though_that_number_is_planned_still() -> None:
    """Ten devices came, and then twelve, whose plan was made first; two are lost while that for ten is made."""
    slow, there = threading.Event(), [10]

    def replan(devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        if threading.current_thread().name == "paceline-ahead" and devices == 10:
            assert slow.wait(60)
        return larger(devices, now)

    elastic = Elastic(ANY, BRIEF, replan, lambda: there[0])
    try:
        assert not asked_again(elastic)
        there[0] = 12
        wait_until(lambda: asked_again(elastic))
        assert elastic.next_plan() and elastic.take(lambda text: None)[0].layout.devices == 12
        there[0] = 10
        assert elastic._growing.is_at_work(10)
        assert elastic.next_plan() and elastic.take(lambda text: None)[0].layout.devices == 10
    finally:
        slow.set()


def test_a_plan_that_takes_too_long_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made, there = threading.Event(), [10]
    elastic = Elastic(ANY, BRIEF, lambda n, now, gives_way=False: made.wait(60) and larger(n, now), lambda: there[0])
    monkeypatch.setattr(elastic_module, "GROWTH_SECONDS", 0.0)
    assert not asked_again(elastic)
    assert elastic._refused == 10 and not elastic._growing.is_at_work(10)
    monkeypatch.setattr(elastic_module, "GROWTH_SECONDS", 60.0)
    there[0] = 11
    assert not asked_again(elastic) and elastic._growing.is_at_work(11)
    made.set()
    wait_until(lambda: asked_again(elastic))


def test_a_larger_world_whose_plan_saves_too_little_is_not_asked_for_again() -> None:
    asked = list[int]()
    policy = RecoverySpec(worth=10.0, max_devices=12)
    elastic = Elastic(policy, BRIEF, lambda n, now, gives_way=False: asked.append(n) or larger(n, now), lambda: 10)
    wait_until(lambda: not asked_again(elastic) and elastic._refused == 10)
    count = len(asked)
    assert not asked_again(elastic) and len(asked) == count


def test_the_decision_for_another_world_is_no_part_of_what_its_first_rank_says_of_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stood in the journal twice where the first rank came anew: as of the supervisor, and of the start."""
    unproven = DecisionRecord("verify", "prove the layout", "no proof", "a test", None)
    monkeypatch.setattr(replanner, "prove", lambda planned, say, starts: Proven(None, (unproven,)))
    spec = make_spec(decoder_task(), cluster=ClusterSpec(device="cpu", devices=2, probe=False))
    found = Replanner(spec, lambda text: None)(2, dataclasses.replace(BRIEF, plan=plan_of(Layout())))
    told = [decision.what for decision in found.brief.record.decisions]
    assert found.decision.what == "replan" and "replan" not in told and unproven in found.brief.record.decisions
    assert (found.decision.evidence or {})["plan"] == {"from": str(plan_of(Layout())), "to": str(found.brief.plan)}


def test_a_disk_that_hangs_holds_up_nobody_who_asks_how_many_devices_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks after the ranks read the file: they were not looked after for as long as its disk did not answer."""
    path, answers, read = tmp_path / "devices", threading.Event(), Path.read_text
    answers.set()
    monkeypatch.setattr(
        Path, "read_text", lambda self, *given: (self != path or answers.wait(60)) and read(self, *given)
    )
    path.write_text("8")
    policy = dataclasses.replace(ANY, devices_file=str(path))
    elastic = Elastic(policy, BRIEF, lambda n, now, gives_way=False: larger(n, now))
    assert elastic.next_plan() and elastic.take(lambda text: None)[0].layout.devices == 8
    answers.clear()
    path.write_text("11")
    assert not asked_again(elastic) and elastic._wanted() == 8, "what it said last counts"
    answers.set()
    wait_until(lambda: elastic._wanted() == 11)
    path.write_text("")  # a file that is written again is empty for a moment
    assert [elastic._file.read(60) for _ in range(3)] == [11] * 3
    path.unlink()
    wait_until(lambda: elastic._wanted() == 8)
    wait_until(lambda: elastic._file.read(60) is None)

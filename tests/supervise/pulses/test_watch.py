"""Who hangs, and who is merely slow: a watch over pulses, with real processes where the system is asked of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import environment, wait_until
from supervise.pulses.watched_ranks import HEALTH, LATE, MakeRanks, Ranks, comes_to_step

from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.phases import PHASES
from paceline.supervise import supervisor
from paceline.supervise.blame import Outcome
from paceline.supervise.nodes import far, lookout
from paceline.supervise.nodes.lookout import Scrutiny
from paceline.supervise.pulses import pulse as pulses
from paceline.supervise.pulses import sight
from paceline.supervise.pulses.pulse import Heart, read_pulse, stack_path
from paceline.supervise.pulses.sight import nobody_knows
from paceline.supervise.pulses.silences import COMPUTING_FACTOR
from paceline.supervise.pulses.stacks import collective_in, main_thread
from paceline.supervise.pulses.standstill import Standstill
from paceline.supervise.pulses.system import ThreadSeen, state_of
from paceline.supervise.pulses.watch import PulseWatch, Suspect
from paceline.supervise.supervisor import supervise_started


def test_the_rank_that_is_behind_is_named_and_not_those_that_wait_for_it(make: MakeRanks) -> None:
    ranks = make()
    ranks.steps()
    for rank, phase in enumerate(["reduce", "forward", "reduce"]):
        ranks.beat(rank, phase, 5)
    assert ranks.pass_by(HEALTH.hang_minimum * 0.9) is None
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (1,)
    assert suspect.what == "rank 1 of 3 hung in the forward and backward passes of step 5"
    assert 2.0 < suspect.evidence["silent_seconds"] < 4.0  # found within two limits
    assert {each["phase"] for each in suspect.evidence["ranks"]} == {"forward", "reduce"}


def test_survivors_that_wait_for_a_new_rank_before_a_step_are_not_to_blame(make: MakeRanks) -> None:
    """Their last word was that they load their state, which is before anything that the new rank has told."""
    ranks = make()
    for rank in range(3):
        ranks.beat(rank, "load", 0)
    ranks.beat(2, "evaluate", 4)  # in its own loop, before it comes to step 5
    for rank in (0, 1):
        comes_to_step(ranks, rank)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9) is None
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (2,)
    assert suspect.what == "rank 2 of 3 hung evaluating of step 4"


def test_one_that_is_stopped_is_named_wherever_it_is(make: MakeRanks) -> None:
    """In a save, in which nothing says how long it may take: the system says that the process is stopped."""
    ranks = make()
    for rank in range(3):
        ranks.beat(rank, "save", 1)
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(stopped.pid) == "T")
        ranks.process = stopped.pid
        ranks.beat(2, "save", 1)
        suspect = ranks.pass_by(LATE)
        stopped.kill()
    assert suspect is not None and suspect.ranks == (2,)
    assert f"process {stopped.pid} is stopped by a signal" in suspect.because


@pytest.mark.parametrize("met", [(0, 1), (0,), ()])
def test_one_that_is_stopped_before_it_has_a_pulse_is_named_too(make: MakeRanks, met: tuple[int, ...]) -> None:
    """Its peers wait to meet it, ten minutes if nobody ends that; one that imports for long is no such rank.

    Ranks that have left a world for the next one have no pulse there before they have met.
    """
    ranks = make()
    for rank in met:
        ranks.beat(rank, PHASES[1], 0)
    with subprocess.Popen(["sleep", "1000"]) as early:
        ranks.early[2] = early.pid
        assert ranks.pass_by(LATE) is None
        early.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(early.pid) == "T")
        suspect = ranks.pass_by(LATE)
        early.kill()
    assert suspect is not None and suspect.ranks == (2,)
    assert f"process {early.pid} is stopped by a signal" in suspect.because


@contextlib.contextmanager
def standing_still(process: int) -> Iterator[None]:
    """Have a process stand still in the block."""
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: state_of(process) == "T")
    yield
    os.kill(process, signal.SIGCONT)
    wait_until(lambda: state_of(process) != "T")


def test_one_that_a_debugger_looks_at_in_a_long_phase_is_let_be(make: MakeRanks, sleeper: int) -> None:
    """How long it has told nothing of its loading is not how long it stands still."""
    ranks = make()
    for rank in range(ranks.ranks):
        ranks.beat(rank, "load", 0)
    assert ranks.pass_by(LATE) is None
    with standing_still(sleeper):
        assert ranks.pass_by(HEALTH.hang_minimum - 0.25) is None
    assert ranks.pass_by(HEALTH.hang_minimum) is None
    with standing_still(sleeper):
        assert ranks.pass_by(HEALTH.hang_minimum + 3.0) is not None


def test_one_that_is_stopped_for_moments_before_it_has_a_pulse_is_let_be(make: MakeRanks, sleeper: int) -> None:
    ranks = make()
    ranks.early[2] = sleeper
    for _ in range(4):
        with standing_still(sleeper):
            assert ranks.pass_by(HEALTH.hang_minimum - 0.5) is None
        assert ranks.pass_by(1.0) is None


def test_where_no_rank_is_behind_all_are_named(make: MakeRanks) -> None:
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "reduce", 5)
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (0, 1, 2) and "suspect what is between them" in suspect.because


# ---- negative controls: what is slow is not hung --------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["save", "evaluate", "loop", "load", "check"])
def test_what_is_no_part_of_a_step_may_take_long(make: MakeRanks, phase: str) -> None:
    ranks = make()
    ranks.steps()
    ranks.beat(1, phase, 5)
    for rank in (0, 2):
        ranks.beat(rank, "reduce", 6)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9) is None
    assert ranks.pass_by(LATE) is not None  # but not for ever


def test_the_first_steps_may_take_long(make: MakeRanks) -> None:
    ranks = make()
    for rank in range(3):
        ranks.beat(rank, "forward", 1)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9) is None


def test_a_loaded_machine_is_no_hang(make: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks want cores, and are given none."""
    monkeypatch.setattr(sight, "threads_of", lambda process: [ThreadSeen(process, "R", 1)])
    ranks = make(10.0)
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "reduce", 5)
    assert ranks.pass_by(9 * HEALTH.hang_minimum) is None


def test_a_slow_run_that_goes_on_is_no_hang(make: MakeRanks) -> None:
    """Steps that take 19 times the median, each phase just within the limit."""
    ranks = make()
    ranks.steps()
    for step in range(5, 20):
        for phase in ("data", "forward", "reduce", "update"):
            for rank in range(3):
                ranks.beat(rank, phase, step)
            assert ranks.pass_by(HEALTH.hang_minimum * 0.9) is None


def test_a_rank_that_computes_may_say_nothing_for_longer(make: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler, or a collection of garbage: the processor's time goes on. An endless loop is found too, later."""
    ranks = make()
    monkeypatch.setattr(sight, "cpu_seconds", lambda process: ranks.now)
    ranks.steps()
    ranks.beat(1, "forward", 5)
    for rank in (0, 2):
        ranks.beat(rank, "reduce", 5)
    assert ranks.pass_by(COMPUTING_FACTOR * HEALTH.hang_minimum * 0.9) is None
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (1,)


def test_what_a_failure_brings_about_is_no_hang(make: MakeRanks) -> None:
    ranks = make()
    ranks.steps()
    for step in range(100):
        ranks.now += 1
        assert ranks.look(ended={step % 3}, has_failed=True) is None


def test_a_world_that_does_well_is_told_of_by_nobody(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 ranks on 32 nodes make steps: what the coordinator hears has the size of the nodes, once. Then one hangs."""
    for module in (lookout, far):
        monkeypatch.setattr(module, "programs_per_core", lambda: 1.0)
    ranks = Ranks(tmp_path, sleeper, ranks=256, nodes=32)
    ranks.steps(4)
    assert 32 <= len(ranks.told) <= 3 * 32 and max(map(len, ranks.told)) < 200
    before = len(ranks.told)
    ranks.steps(8)
    assert len(ranks.told) == before, "steps are told by nobody"
    for rank in range(256):
        ranks.beat(rank, "forward" if rank == 77 else "reduce", 13)
    assert ranks.pass_by(HEALTH.hang_minimum * 0.9) is None and len(ranks.told) == before
    began = ranks.now
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (77,) and len(suspect.evidence["ranks"]) == 256
    assert ranks.now - began < 2.5, "as soon as one machine finds it"


def test_a_rank_that_waits_on_a_slow_one_is_not_told_of_again_and_again(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks are late and wait for one that saves, which may take long: it is furthest behind, and not late."""
    for module in (lookout, far):
        monkeypatch.setattr(module, "programs_per_core", lambda: 1.0)
    ranks = Ranks(tmp_path, sleeper, ranks=4, nodes=2)
    ranks.steps()
    ranks.beat(1, "loop", 5)
    for rank in (0, 2, 3):
        ranks.beat(rank, "reduce", 5)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9) is None
    assert len(ranks.told) < 16 and not any("seen" in told for told in ranks.told)
    ranks.steps()
    assert ranks.nodes[0]._scrutiny is Scrutiny.OVERVIEW, "when all go on nobody tells more than before"


# ---- pulses and stacks ----------------------------------------------------------------------------------------------


def test_a_pulse_tells_where_a_process_is(tmp_path: Path) -> None:
    heart = Heart(tmp_path, 3)
    heart.beat("data", 7)
    heart.beat("forward", 7)
    heart.beat("data", 8)
    found = read_pulse(tmp_path, 3)
    assert found is not None and found.answers and found.process == os.getpid()
    assert (found.step, found.phase, found.beats) == (8, "data", 4)
    assert found.steps_made == 1 and found.step_seconds > 0
    assert read_pulse(tmp_path, 4) is None


STACKS = """Thread 0x00007f00 (most recent call first):
  File "/lib/threading.py", line 1 in wait
  File "/lib/threading.py", line 2 in run

Current thread 0x00007f01 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 9 in <module>
"""


def test_a_stack_tells_the_collective() -> None:
    assert collective_in(STACKS) == "all_reduce"
    assert main_thread(STACKS)[-1] == "<module> (/home/me/train.py:9)"
    assert collective_in(STACKS.replace("torch/distributed/", "mine/")) == ""
    assert collective_in("") == "" and main_thread("") == []


RANK = """
import ctypes, os, signal, sys, threading
from paceline.supervise.pulses.pulse import heart_here

rank, heart = int(os.environ["RANK"]), heart_here()
assert (heart is None) == (sys.argv[1] == "unheard")

def waits_for_a_peer():
    threading.Event().wait()

if heart is not None:
    for step in range(1, 6):
        heart.beat("data", step)
        heart.beat("forward", step)
    if rank == 1 and sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and sys.argv[1] == "holds":  # the interpreter, so that no other thread of it can answer
        while True:
            ctypes.PyDLL(None).sleep(1000)
    if sys.argv[1] != "ends" and not (sys.argv[1] == "leaves" and rank == 0):
        heart.beat("reduce", 5) if rank == 0 else None
        waits_for_a_peer()
"""


def run(folder: Path, what: str, health: HealthSpec) -> Outcome:
    script = folder / "rank.py"
    script.write_text(textwrap.dedent(RANK))

    def start(place: dict[str, str]) -> subprocess.Popen[bytes]:
        environ = {**environment(), **place}
        return subprocess.Popen([sys.executable, str(script), what], env=environ, process_group=0)

    return supervise_started(start, 2, environment(), health=health, run_dir=folder / "run")


@pytest.mark.parametrize("what", ["stops", "hangs", "holds"])
def test_a_supervisor_ends_a_run_that_hangs(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)  # rank 0 hears nothing of its peer's end
    outcome = run(tmp_path, what, HealthSpec(hang_minimum="0.5 s", hang_factor=2.0))
    assert outcome.exit_code == 137 and outcome.error is not None and outcome.error["rank"] == 1
    assert "rank 1 of 2 hung in the forward and backward passes of step 5" in str(outcome.error["what"])
    (folder,) = (tmp_path / "run" / "hangs").iterdir()
    stacks = [(folder / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    flights = [json.loads((folder / f"rank-{rank}.flight.json").read_text()) for rank in (0, 1)]
    assert "this torch has none" in flights[0]["missing"], "these ranks have not imported torch"
    assert ("did not answer" in flights[1]["missing"]) == (what == "stops") or what == "holds"
    assert "in waits_for_a_peer" in stacks[0]
    if what == "stops":
        assert "state T" in stacks[1] and "no stack" in stacks[1] and "stopped by a signal" in str(outcome.error)
    elif what == "holds":
        assert "no stack" not in stacks[1] and "rank.py" in stacks[1], "a signal reached it"
    else:
        assert "in waits_for_a_peer" in stacks[1] and "it is at wait (" in str(outcome.error["because"])
    assert json.dumps(outcome.error["evidence"])


def test_one_that_hangs_when_its_peer_has_ended_as_it_should_is_ended_too(tmp_path: Path) -> None:
    """It was waited for, and nobody looked: a world of which a process had ended was not watched."""
    outcome = run(tmp_path, "leaves", HealthSpec(hang_minimum="0.5 s", hang_factor=2.0))
    assert outcome.exit_code == 137 and outcome.error is not None and outcome.error["rank"] == 1
    assert "rank 1 of 2 hung in the forward and backward passes of step 5" in str(outcome.error["what"])
    (folder,) = (tmp_path / "run" / "hangs").iterdir()
    assert "in waits_for_a_peer" in (folder / "rank-1.txt").read_text()


@pytest.mark.parametrize("kind", [PulseWatch, Standstill])
def test_who_hangs_is_said_where_it_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[PulseWatch] | type[Standstill]
) -> None:
    """A full disk may be why it hangs, and ended the supervisor, and with it the run, where that wrote of it."""
    watch = PulseWatch(tmp_path, 2, HealthSpec()) if kind is PulseWatch else Standstill(tmp_path, 2, nobody_knows)
    tmp_path.rmdir()
    watch.tell(Suspect((1,), "rank 1 hangs", "nothing was heard", 0.0))
    assert "rank 1 hangs: nothing was heard (not on record" in capsys.readouterr().out
    tmp_path.mkdir()


def test_a_run_that_ends_is_no_hang(tmp_path: Path) -> None:
    assert run(tmp_path, "ends", HealthSpec(hang_minimum="0.01 s", hang_factor=1.1)) == Outcome(0)
    assert run(tmp_path, "unheard", HealthSpec(hangs=False)) == Outcome(0)
    assert not (tmp_path / "run").exists()


def test_stacks_are_asked_for_by_a_signal_that_only_those_get_who_expect_it(tmp_path: Path) -> None:
    assert pulses.STACK_SIGNAL is not None and pulses.STACK_SIGNAL not in (signal.SIGUSR1, signal.SIGUSR2)
    Heart(tmp_path, 0)
    os.kill(os.getpid(), pulses.STACK_SIGNAL)  # kills a process that has not registered for it
    wait_until(lambda: "test_stacks_are_asked" in stack_path(tmp_path, 0).read_text())

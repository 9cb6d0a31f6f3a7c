"""Whom a supervisor blames, and what it leaves behind: ranks are small scripts without torch."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from runs import environment, is_running, wait_until

from paceline.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    OutOfMemory,
    PacelineError,
    Requeue,
    VerificationFailed,
    of_rank,
)
from paceline.patience import Patience
from paceline.session.together import as_error
from paceline.spec.journal.kinds import FaultRecord
from paceline.spec.journal.record import plain, read
from paceline.supervise import supervisor
from paceline.supervise.blame import (
    Ending,
    Outcome,
    cause_is_known,
    errors_told,
    leave_error,
    leave_if_there_is_room,
    outcome_of,
)
from paceline.supervise.crew import Crew, attend
from paceline.supervise.groups import Process
from paceline.supervise.memory_kills import USUAL, memory_kills, why_killed
from paceline.supervise.ranks_lost import RanksLost
from paceline.supervise.supervisor import report_error, supervise, supervise_started

RANK = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.supervise.supervisor import report_error

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])

def tell(what, cause=True, code=1):
    report_error({"what": what, "because": "b", "try": "t", "exit_code": code}, cause)
    os._exit(code)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"hangs-{rank}").touch()
    while True:
        signal.pause()
"""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)


def run(folder: Path, work: str, ranks: int = 2) -> Outcome:
    script = folder / "rank.py"
    script.write_text(RANK + textwrap.dedent(work))
    return supervise([sys.executable, str(script), str(folder)], ranks, environment())


def blamed(outcome: Outcome) -> object:
    assert outcome.error is not None
    return outcome.error["rank"]


def test_the_rank_that_failed_is_blamed_and_not_one_killed_for_it(tmp_path: Path) -> None:
    """Rank 2 is ended from outside; ranks 0 and 1 hang in what they wait for and are killed by the supervisor."""
    outcome = run(
        tmp_path,
        """
        if rank < 2:
            hang()
        wait_for("hangs-0"), wait_for("hangs-1")
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        ranks=3,
    )
    assert outcome.exit_code == 137 and blamed(outcome) == 2
    assert outcome.error is not None and "rank 2 of 3 was ended by SIGKILL" in str(outcome.error["what"])
    assert USUAL in str(outcome.error["because"])


def test_a_rank_that_exits_without_a_word_is_blamed(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        if rank == 0:
            hang()
        wait_for("hangs-0")
        os._exit(3)
        """,
    )
    assert outcome.exit_code == 3 and blamed(outcome) == 1
    assert outcome.error is not None and "ended with code 3" in str(outcome.error["what"])
    assert "memory" not in str(outcome.error)


def test_a_scripts_own_exit_code_is_nobodys_fault(tmp_path: Path) -> None:
    assert run(tmp_path, "os._exit(9)") == Outcome(9)


def test_the_first_of_two_errors_is_told(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        if rank == 0:
            while not (Path(os.environ["PACELINE_ERRORS"]) / "error-1.json").exists():
                time.sleep(0.01)
            tell("second", code=7)
        tell("first", code=6)
        """,
    )
    assert outcome.exit_code == 6 and blamed(outcome) == 1


def test_an_echo_is_not_told_before_a_kill(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        if rank == 0:
            wait_for("dies")
            tell("a peer has gone", cause=False)
        (folder / "dies").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert outcome.exit_code == 137 and blamed(outcome) == 1


@pytest.mark.parametrize(
    ("code", "error_at", "expected"),
    [
        (-signal.SIGKILL, 10.02, 1),  # the error came between the looks that saw rank 1 alive and dead: its echo
        (-signal.SIGKILL, 9.9, 0),  # rank 1 was still seen alive when the error came
        (-signal.SIGABRT, 10.02, 0),  # it aborts because a peer has gone
        (-signal.SIGSEGV, 10.2, 1),
        (3, 10.02, 1),
    ],
)
def test_what_came_first_decides(tmp_path: Path, code: int, error_at: float, expected: int) -> None:
    told = {"what": "w", "because": "b", "try": "t", "exit_code": 1, "cause": True, "rank": 0, "time": error_at}
    (tmp_path / "error-0.json").write_text(json.dumps(told))
    endings = [Ending(1, code, 10.0, 10.05), Ending(0, 1, 10.3, 10.35)]
    assert blamed(outcome_of(endings, set(), tmp_path, None)) == expected


def test_a_lost_node_is_the_cause_and_not_the_kill_of_its_rank(tmp_path: Path) -> None:
    """On a loaded machine the looks at a rank lie seconds apart, and what is told of it falls between two of them."""
    told = {"what": "w", "because": "b", "try": "t", "exit_code": 137, "cause": True, "rank": 1, "time": 11.0}
    (tmp_path / "error-1.json").write_text(json.dumps(told))
    endings = [Ending(1, -signal.SIGKILL, 10.0, 12.0), Ending(0, 1, 12.5, 12.6)]
    outcome = outcome_of(endings, {0}, tmp_path, None)
    assert outcome.error is not None and (outcome.error["what"], outcome.error["rank"]) == ("w", 1)


def test_a_cut_error_is_told_as_such(tmp_path: Path) -> None:
    outcome = run(
        tmp_path,
        """
        if rank == 1:
            (Path(os.environ["PACELINE_ERRORS"]) / "error-1.json").write_text('{"what": "the loss is no num')
            os._exit(6)
        """,
    )
    assert blamed(outcome) == 1 and outcome.exit_code == 1
    assert outcome.error is not None and "cut short" in str(outcome.error["what"])
    assert "the loss is no num" in str(outcome.error["because"])


@pytest.mark.parametrize(("field", "value"), [("exit_code", "many"), ("time", None), ("rank", [1])])
def test_an_error_whose_numbers_are_none_is_told_as_one_that_is_cut(tmp_path: Path, field: str, value: object) -> None:
    """A file that a damaged disk has changed ends no supervisor: others would not be looked at any more."""
    told = {"what": "w", "because": "b", "try": "t", "exit_code": 6, "cause": True, "rank": 1, "time": 10.2}
    (tmp_path / "error-1.json").write_text(json.dumps(told | {field: value}))
    outcome = outcome_of([Ending(1, 6, 10.0, 10.3)], set(), tmp_path, None, ranks=2)
    assert blamed(outcome) == 1 and outcome.exit_code == 1
    assert outcome.error is not None and "cut short" in str(outcome.error["what"])


def test_what_a_living_rank_has_begun_to_tell_is_no_error_yet(tmp_path: Path) -> None:
    """It may be an echo: to take its half for the cause would blame it, and end the peers that could go on."""
    (tmp_path / "error-1.json.part").write_text('{"what": "a peer has gone", "cause": fal')
    died = [Ending(0, 3, 10.0, 10.1)]
    assert not cause_is_known(died, tmp_path)
    assert blamed(outcome_of(died, set(), tmp_path, None, ranks=2)) == 0
    told = {"what": "w", "because": "b", "try": "t", "exit_code": 1, "cause": False, "rank": 1, "time": 10.2}
    (tmp_path / "error-1.json.part").write_text(json.dumps(told))
    (tmp_path / "error-1.json.part").rename(tmp_path / "error-1.json")
    assert [error.words["what"] for error in errors_told(tmp_path, [0])] == ["w"]


def test_what_an_ended_rank_had_begun_to_tell_counts(tmp_path: Path) -> None:
    (tmp_path / "error-1.json.part").write_text('{"what": "the loss is no num')
    died = [Ending(1, 6, 10.0, 10.1)]
    assert cause_is_known(died, tmp_path)
    assert "cut short" in str((outcome_of(died, set(), tmp_path, None, ranks=2).error or {})["what"])


def test_an_error_has_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a process while it tells its error, the supervisor sees no half of it."""
    monkeypatch.setenv("PACELINE_ERRORS", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    seen: list[list[str]] = []
    write = Path.write_text

    def noted(path: Path, text: str, *options: object) -> int:
        write(path, text[:20])
        seen.append([each.name for each in tmp_path.glob("error-*.json")])
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", noted)
    report_error({"what": "w"}, cause=True)
    assert seen == [[]], "half of an error already had the name of a whole one"
    assert json.loads((tmp_path / "error-3.json").read_text())["rank"] == 3


SLEEPER = "[sys.executable, '-c', 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()']"


@pytest.mark.parametrize("ending", ["hung", *(pytest.param(how, marks=pytest.mark.deep) for how in ("well", "failed"))])
def test_no_grandchild_survives(tmp_path: Path, ending: str) -> None:
    """What a rank has started, and what that has started, is ended with it: here processes that ignore SIGTERM."""
    outcome = run(
        tmp_path,
        f"""
        child = subprocess.Popen({SLEEPER})
        (folder / f"child-{{rank}}-{{child.pid}}").touch()
        for other in (0, 1):
            while not list(folder.glob(f"child-{{other}}-*")):
                time.sleep(0.01)
        if "{ending}" == "hung" and rank == 0:
            hang()
        os._exit(int("{ending}" != "well"))
        """,
    )
    children = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("child-*")]
    assert len(children) == 2 and not any(map(is_running, children))
    assert outcome.exit_code == int(ending != "well")


def test_grandchildren_end_with_a_rank_whose_supervisor_was_killed(tmp_path: Path) -> None:
    """Nobody is left to kill the rank's group, so the rank does, once it has ended its own work."""
    (tmp_path / "rank.py").write_text(
        RANK
        + textwrap.dedent(f"""
        from paceline.supervise.groups import end_own_group
        from paceline.supervise.parent import end_with_parent

        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
        supervisor = os.getppid()
        end_with_parent()
        child = subprocess.Popen({SLEEPER})
        (folder / f"ready-{{os.getpid()}}-{{child.pid}}").touch()
        while not stopped:
            time.sleep(0.01)
        end_own_group(supervisor)
        """)
    )
    command = f"supervise([sys.executable, {str(tmp_path / 'rank.py')!r}, {str(tmp_path)!r}], 1, dict(os.environ))"
    code = f"import os, sys; from paceline.supervise.supervisor import supervise; {command}"
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment())
    try:
        wait_until(lambda: bool(list(tmp_path.glob("ready-*"))) or parent.poll() is not None)
        _, rank, child = next(tmp_path.glob("ready-*")).name.split("-")
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(int(rank)) and not is_running(int(child)))
    assert not is_running(int(rank)) and not is_running(int(child))


def test_memory_is_named_as_far_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.supervise import memory_kills as module

    monkeypatch.setattr(module, "memory_kills", lambda: 5)
    assert "out of memory: the kernel has killed 2" in why_killed(3)
    assert USUAL in why_killed(5) and "counted no such kill" in why_killed(5)
    assert why_killed(None) == USUAL
    monkeypatch.setattr(module, "memory_kills", lambda: None)
    assert why_killed(3) == USUAL


def test_the_kernels_count_is_read_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.supervise import memory_kills as module

    own = Path("/proc/self/cgroup").read_text().partition("0::")[2].split("\n")[0].lstrip("/")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert memory_kills() is None
    (tmp_path / own).mkdir(parents=True, exist_ok=True)
    (tmp_path / own / "memory.events").write_text("low 0\nhigh 2\noom 4\noom_kill 3\n")
    assert memory_kills() == 3


def test_a_rank_that_a_stop_signal_meets_as_it_leaves_has_stopped_like_the_others() -> None:
    crew = Crew()
    crew.endings = {0: Ending(0, Requeue.exit_code, 0.0, 1.0), 1: Ending(1, -signal.SIGTERM, 0.0, 1.0)}
    assert outcome_of(crew.ended(), (), Path("/nowhere"), None).exit_code == 128 + signal.SIGTERM, "sent by somebody"
    crew.send(signal.SIGTERM)
    assert outcome_of(crew.ended(), (), Path("/nowhere"), None) == Outcome(Requeue.exit_code)
    crew.endings[0] = Ending(0, 1, 0.0, 1.0)
    assert outcome_of(crew.ended(), (), Path("/nowhere"), None).exit_code == 1, "it has failed, whatever the others did"


def test_ranks_that_a_stop_signal_meets_before_they_hear_of_one_have_stopped_as_asked() -> None:
    crew = Crew()
    crew.endings = {rank: Ending(rank, -signal.SIGTERM, 0.0, 1.0) for rank in range(2)}
    crew.send(signal.SIGTERM)
    assert outcome_of(crew.ended(), (), Path("/nowhere"), None) == Outcome(Requeue.exit_code)
    asked: list[bool] = []
    there = Crew(is_stopped=lambda: bool(asked))  # by another machine's supervisor
    there.endings = dict(crew.endings)
    assert outcome_of(there.ended(), (), Path("/nowhere"), None).exit_code == 128 + signal.SIGTERM
    asked.append(True)
    assert outcome_of(there.ended(), (), Path("/nowhere"), None) == Outcome(Requeue.exit_code)
    there.endings[1] = Ending(1, -signal.SIGKILL, 0.0, 1.0)
    assert outcome_of(there.ended(), (), Path("/nowhere"), None).exit_code == 128 + signal.SIGKILL, "nobody asked so"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_is_started_after_the_signal_is_told_of_it_too(tmp_path: Path, number: int) -> None:
    """The signal comes while the first rank is started: the list of those that it is passed on to is empty."""
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    started: list[dict[str, str]] = []
    begin = supervisor.starter(command, environment())

    def start(place: dict[str, str]) -> Process:
        if not started:
            os.kill(os.getpid(), number)
        started.append(place)
        return begin(place)

    assert supervise_started(start, 2, environment()) == Outcome(Requeue.exit_code)
    assert len(started) == 2


def test_a_process_that_somebody_kills_is_told_at_once_and_one_that_is_ended_here_is_not() -> None:
    told: list[RanksLost] = []
    processes = [subprocess.Popen(["sleep", "1000"], process_group=0) for _ in range(2)]
    crew = Crew(processes, tell=told.append)
    crew.look()
    processes[1].kill()
    attend(crew, Patience(60.0), 0.1)
    assert [(lost.ranks, lost.what) for lost in told] == [((1,), "rank 1 of 2 was ended by SIGKILL")]
    assert crew.killed == {0}


def test_the_name_of_a_process_has_no_space() -> None:
    """Python 3.12 cuts /proc/PID/stat at spaces to count threads: each fork of "rank 0 paceline" warned of twenty."""
    code = """
import os, warnings
from paceline.supervise.parent import name_process
warnings.simplefilter("error")
name_process("rank-0-paceline")
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
fields = open("/proc/self/stat").read().split()
print(fields[1], fields[19])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.split() == ["(rank-0-paceline)", "1"], done.stderr


def test_an_error_that_names_ranks_is_told_without_the_one_that_reports_it(tmp_path: Path) -> None:
    """What the error knows of itself decides, on its way through files and the journal, and no word of its sentence."""
    assert of_rank("the loss is not finite", 1, False) == "the loss is not finite (rank 1)"
    assert of_rank("step 9: ranks 0 and 1 no longer agree", 1, True) == "step 9: ranks 0 and 1 no longer agree"
    of_a_users = ConfigError("my model wants rank 8 of its adapter")  # a number that is no process
    assert of_rank(of_a_users.what, 1, of_a_users.names_ranks) == "my model wants rank 8 of its adapter (rank 1)"
    assert "names_ranks" not in of_a_users.as_dict()
    leave_error(tmp_path, 1, VerificationFailed("ranks 0 and 1 no longer agree").naming_ranks().as_dict(), cause=True)
    (told,) = errors_told(tmp_path)
    assert told.words["names_ranks"] is True and as_error(told.words).names_ranks
    assert pickle.loads(pickle.dumps(PacelineError("rank 1 is gone").naming_ranks())).names_ranks
    for error in (OutOfMemory("full", evidence={"rank": 1}), ConfigErrors([ConfigError("one"), ConfigError("two")])):
        assert as_error(error.as_dict()).as_dict() == error.as_dict()
    fault = FaultRecord("ranks 0 and 1 no longer agree", "", 1, names_ranks=True)
    assert read(FaultRecord, plain(fault)) == fault and "names_ranks" not in plain(FaultRecord("a disk is full", "", 1))


def test_what_a_full_disk_took_half_of_is_not_told_for_another_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name had room and the words had none: damaged data had "failed" with code 1, and were tried again."""
    write, said = Path.write_text, list[str]()

    def full(path: Path, text: str) -> int:
        write(path, text[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    error = DataError("row 7 is damaged", "it has no label")
    leave_if_there_is_room(tmp_path, 1, error.as_dict(), 1.0, say=said.append)
    assert "row 7 is damaged: it has no label (not on record" in said[0]
    assert outcome_of([Ending(1, error.exit_code, 0.0, 2.0)], (), tmp_path, None, 2).exit_code == error.exit_code


def test_a_signal_that_comes_when_all_have_ended_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it found was a handler that passed it on to nobody: a proof went on with its next ranks."""
    collect = supervisor.collect

    def asked_meanwhile(processes: list[Process]) -> None:
        signal.raise_signal(signal.SIGTERM)
        collect(processes)

    monkeypatch.setattr(supervisor, "collect", asked_meanwhile)
    start = supervisor.starter([sys.executable, "-c", ""], environment())
    assert supervise_started(start, 1, environment()) == Outcome(Requeue.exit_code)

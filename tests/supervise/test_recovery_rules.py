"""Which failures are tried again, what survivors hold, and which notices end a run: the rules by themselves."""

from __future__ import annotations

import dataclasses
import errno
import http.server
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from observe.alerts.alert_journals import started, step
from runs import wait_until

from paceline.errors import RunInUse
from paceline.lock import RunLock, take
from paceline.run.survive.notice import Notices
from paceline.spec.journal import reading
from paceline.spec.journal.line import line_of
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.spec.sync import Sync
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.held_state import AGREED, DUE, OPEN, HeldState
from paceline.supervise.again.judge import FRUITLESS, Judge, Reached, is_lost, reached_by
from paceline.supervise.again.machines import OneMachine, seats_of
from paceline.supervise.again.spent_by_worlds import SpentSoFar
from paceline.supervise.again.survivors import state_left, state_of_worlds
from paceline.supervise.blame import Outcome
from paceline.supervise.control import CALL_NAME
from paceline.supervise.crew import Crew
from paceline.supervise.forked import Forked
from paceline.supervise.starting import Starter


def failure(line: int = 1, code: int = 1) -> Outcome:
    trace = f'Traceback\n  File "loop.py", line 9\n  File "model.py", line {line}\nKeyError'
    return Outcome(code, {"error": "KeyError", "what": "w", "because": "b", "try": "t", "traceback": trace})


def death(code: int) -> Outcome:
    return Outcome(code, {"error": "WorkerDied", "what": "rank 1 was ended", "because": "b", "try": "t"})


def at(step: int, starts: int = 1) -> Reached:
    return Reached(starts, step, made=True)


def judge(**changes: int) -> Judge:
    return Judge(dataclasses.replace(RecoverySpec(), **changes), Reached())


def test_how_far_a_long_run_has_come_is_read_from_the_end_of_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for while everybody waits: thousands of lines would be a second of a recovery."""
    journal = tmp_path / "journal" / "0002.jsonl"
    journal.parent.mkdir()
    assert reached_by(tmp_path) == Reached()
    journal.write_bytes(line_of(dataclasses.replace(started(), step=40)))
    assert reached_by(tmp_path) == Reached(2, 40, made=False)
    steps = [line_of(step(number, 1.0)) for number in range(41, 1041)]
    journal.write_bytes(journal.read_bytes() + b"".join(steps) + b'{"kind": "step", "st')
    parsed, parse = [0], reading.parsed_line

    def counted(line: bytes) -> dict[str, object] | None:
        parsed[0] += 1
        return parse(line)

    monkeypatch.setattr(reading, "parsed_line", counted)
    assert reached_by(tmp_path) == Reached(2, 1040, made=True)
    assert parsed[0] <= 10, "of a thousand lines"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 6, 74, 75, 130])
def test_what_would_fail_again_for_certain_is_not_tried_again(code: int) -> None:
    assert not judge().judge(failure(code=code), at(5)).goes_on


def test_an_error_at_another_place_or_step_is_another_error() -> None:
    for second, reached in ((failure(2), at(5)), (failure(1), at(6))):
        one = judge()
        assert one.judge(failure(1), at(5)).goes_on and one.judge(second, reached).goes_on
    one = judge()
    assert one.judge(failure(), at(5)).goes_on and not one.judge(failure(), at(5)).goes_on


def test_budgets_are_apart() -> None:
    one = judge(retries=1, preemption_retries=2)
    assert one.judge(failure(1), at(1)).goes_on and not one.judge(failure(2), at(2)).goes_on
    assert [one.judge(death(137), at(step)).goes_on for step in (3, 4, 5)] == [True, True, False]


def test_a_crash_of_its_own_is_a_failure_of_the_program_and_so_is_memory_that_is_out() -> None:
    assert not judge(retries=0).judge(death(139), at(5)).goes_on
    assert not judge(retries=0).judge(death(137), at(5), out_of_memory=True).goes_on
    assert judge(retries=0).judge(death(137), at(5)).goes_on


def test_a_failure_before_the_first_step_is_final_and_kills_without_progress_end() -> None:
    assert not judge().judge(failure(), Reached(1, 0, made=False)).goes_on
    one = judge()
    assert one.judge(death(137), at(5)).goes_on
    tries = [one.judge(death(137), at(5)).goes_on for _ in range(FRUITLESS)]
    assert tries == [True] * (FRUITLESS - 1) + [False]


def test_a_coordinator_that_takes_over_knows_that_this_call_has_made_steps() -> None:
    """The first rank goes on with its journal, so no start is newer: an error ended a run of thousands of steps."""
    began, now = Reached(3, 40, made=True), Reached(4, 5040, made=True)
    taken = Judge(RecoverySpec(), began).so_far
    assert Judge(RecoverySpec(), now, taken).judge(failure(), Reached(4, 5050, made=True)).goes_on
    none_yet = Judge(RecoverySpec(), began, taken).judge(failure(), Reached(4, 40, made=False))
    assert not none_yet.goes_on and "no step was made before it" in none_yet.because


def hang(state: str, step: int = 5) -> Outcome:
    """Return the outcome of a rank that hung, whose process was in this state."""
    ranks = [{"rank": 0, "state": "S"}, {"rank": 1, "state": state}]
    what = f"rank 1 of 2 hung in the forward and backward passes of step {step}"
    told = {"what": what, "because": "b", "try": "t", "rank": 1, "cause": True, "evidence": {"ranks": ranks}}
    return Outcome(137, {"error": "RankHung", **told})


def told(kind: str, what: str = "w", cause: bool = True) -> Outcome:
    return Outcome(1, {"error": kind, "what": what, "because": "", "try": "", "rank": 1, "cause": cause})


RESUMED = Reached(1, 40, made=True)  # what a call finds that goes on with a run of forty steps
NO_STEP_YET = Reached(2, 40, made=False)
PASSES = [
    hang("T"), hang("S"), told("ConnectionResetError"), told("TimeoutError"),
    told("OSError", "OSError: [Errno 5] Input/output error"), told("DistBackendError", cause=False),
]  # fmt: skip


@pytest.mark.parametrize("outcome", PASSES, ids=lambda outcome: str(outcome.error["error"]))
def test_what_may_come_from_outside_is_tried_again_before_the_first_step_of_a_call_too(outcome: Outcome) -> None:
    """A run of forty steps was ended by what a machine did in the first step after it had been started again."""
    one = Judge(RecoverySpec(), RESUMED)
    assert one.judge(outcome, NO_STEP_YET).goes_on
    if not is_lost(outcome):
        again = one.judge(outcome, NO_STEP_YET)
        assert not again.goes_on and "failed twice in the step after 40" in again.because


@pytest.mark.parametrize(
    "outcome",
    [failure(), told("RuntimeError", "RuntimeError: shapes"), told("FileNotFoundError", "FileNotFoundError: [Errno 2]"),
     told("OSError", "OSError: [Errno 36] File name too long"), death(139)],
    ids=lambda outcome: str(outcome.error["error"]),
)  # fmt: skip
def test_an_error_of_the_program_before_the_first_step_of_a_call_ends_it(outcome: Outcome) -> None:
    ruling = Judge(RecoverySpec(), RESUMED).judge(outcome, NO_STEP_YET)
    assert not ruling.goes_on and "no step was made before it" in ruling.because


def test_a_rank_that_a_signal_has_stopped_is_lost_and_one_that_hangs_in_the_first_step_of_all_is_the_programs() -> None:
    fresh = Reached(1, 0, made=False)
    assert judge().judge(hang("T"), fresh).goes_on and not judge().judge(hang("S"), fresh).goes_on
    one = judge(retries=1, preemption_retries=3)
    assert [one.judge(hang("T", step), at(step)).goes_on for step in (5, 6, 7, 8)] == [True] * 3 + [False]
    assert not judge(retries=0).judge(hang("S"), at(5)).goes_on


COPIES = Plan(Layout(dp_replicate=3))
MIXED = Plan(Layout(dp_replicate=2, dp_shard=2))  # ranks 0 and 2 hold the same, and 1 and 3


@pytest.mark.parametrize(
    ("plan", "steps", "held"),
    [
        (COPIES, {0: 7, 2: 7}, 7),
        (COPIES, {0: 6, 2: 7}, 7),
        (COPIES, {0: -1, 2: 6}, 6),
        (COPIES, {0: -1, 2: -1}, None),
        (MIXED, {0: 7, 1: 7, 3: 7}, 7),
        (MIXED, {0: 7, 2: 7}, None),
        (MIXED, {0: 7, 1: 6, 2: 6}, 6),
        (Plan(Layout(dp_shard=2)), {0: 7}, None),
        (dataclasses.replace(COPIES, sync=Sync(kind="outer", every=2)), {0: 7, 2: 7}, None),
    ],
)
def test_survivors_hold_a_step_where_every_part_of_it_is_left(plan: Plan, steps: dict[int, int], held: int) -> None:
    assert state_left(plan, {rank: HeldState(step) for rank, step in steps.items()}, True).step == held


def test_a_state_that_outlived_a_world_which_never_formed_is_judged_by_the_plan_it_was_made_under() -> None:
    """A world of 2 grows to 3 and one dies as it forms: both survivors hold all; two of four shards are not two."""
    two, three, four = (Plan(Layout(dp_shard=number)) for number in (2, 3, 4))
    plans = {1: two, 2: three}
    kept = {0: HeldState(7, generation=1, rank=0), 2: HeldState(7, generation=1, rank=1)}
    assert state_of_worlds(plans, 2, kept, True).step == 7
    lost = {0: HeldState(7, generation=1, rank=0), 1: HeldState(7, generation=1, rank=1)}
    assert state_of_worlds({1: four, 2: two}, 2, lost, True).step is None
    mixed = {0: HeldState(7, generation=1, rank=0), 1: HeldState(7, generation=2, rank=1)}
    apart = state_of_worlds({1: two, 2: two}, 2, mixed, True)
    assert apart.step is None and "different worlds: 1, 2" in apart.because
    assert "world 1" in state_of_worlds({2: three}, 2, lost, True).because
    assert state_of_worlds({2: two}, 2, {0: HeldState(7), 1: HeldState(7)}, True).step == 7


SOUND, OTHER = HeldState(7, "a", AGREED, 7), HeldState(7, "b", AGREED, 7)
TO_BE, UNCOMPARED = HeldState(7, "a", DUE, 6), HeldState(7, "a", OPEN, 5)


@pytest.mark.parametrize(
    ("held", "has_checkpoint", "step", "says"),
    [
        ({0: SOUND, 1: OTHER, 2: SOUND}, True, 7, ""),
        ({0: SOUND, 1: OTHER}, True, 7, ""),
        ({0: SOUND, 1: OTHER, 2: OTHER}, True, None, "ranks 0 and 2 hold the same part"),
        ({0: TO_BE, 1: OTHER, 2: SOUND}, True, 7, ""),
        ({0: TO_BE, 1: OTHER, 2: TO_BE}, True, None, "was to be compared"),
        ({0: TO_BE, 1: OTHER}, True, None, "was to be compared"),
        ({0: TO_BE, 1: OTHER}, False, 7, "rank 0 alone has its part of the state after step 7, which was compared last "
                                         "after step 6"),
        ({0: UNCOMPARED, 1: OTHER}, True, 7, "compared last after step 5"),
        ({0: HeldState(agreed_step=7, changed="'w' after step 7"), 1: OTHER, 2: SOUND}, True, 7, "'w' after step 7 of"),
        ({0: HeldState(agreed_step=7, changed="'w' after step 7"), 1: OTHER, 3: OTHER}, True, None, "'w' after step 7"),
    ],
)  # fmt: skip
def test_what_survivors_hold_is_used_where_it_can_be_compared(
    held: dict[int, HeldState], has_checkpoint: bool, step: int | None, says: str
) -> None:
    found = state_left(MIXED, held, has_checkpoint)
    assert found.step == step and says in found.because and bool(says) == bool(found.because)


def test_survivors_keep_their_seats_where_there_are_any() -> None:
    assert seats_of([0, 2], range(3)) == {0: 0, 2: 2}
    assert seats_of([0, 2], range(2)) == {0: 0, 1: 2}
    assert seats_of([1, 2, 3], range(2)) == {1: 1, 0: 2}


def test_where_fewer_go_on_than_are_left_those_do_that_hold_the_whole_state() -> None:
    """Of two copies of three shards the third shard was left with the rank that was told to end."""
    plan = Plan(Layout(dp_replicate=2, dp_shard=3))
    held = {rank: HeldState(7, generation=1, rank=rank) for rank in (0, 1, 3, 4, 5)}
    left = state_of_worlds({1: plan}, 1, held, True)
    assert left.holders == ((0, 3), (1, 4), (5,)) and left.one_of_each == {0, 1, 5}
    assert not left.brought_by(seats_of(held, range(4)).values()).step, "ranks 0, 1, 3 and 4 as they stand"
    seats = seats_of(held, range(4), left.one_of_each)
    assert seats == {0: 0, 1: 1, 3: 3, 2: 5} and left.brought_by(seats.values()) == left
    fewer = left.brought_by(seats_of(held, range(2), left.one_of_each).values())
    assert fewer.step is None and "1 of the 3 parts of the state after step 7" in fewer.because
    assert seats_of([0, 2, 3], range(2), [2, 3]) == {0: 0, 1: 2}, "who has the records stays"
    assert set(OneMachine(Starter(_nobody, None, print), {}).seated(held, 4, [5])) == {0, 1, 3, 5}


def test_a_survivor_is_known_by_its_rank_of_now_and_not_by_that_in_which_it_made_its_state() -> None:
    """A world of two shards came to nothing after its ranks had changed places."""
    held = {0: HeldState(7, generation=1, rank=1), 3: HeldState(7, generation=1, rank=2)}
    assert state_of_worlds({1: MIXED}, 2, held, True).holders == ((0,), (3,))


def test_where_some_have_entered_a_world_that_fell_as_it_was_formed_the_state_of_one_world_is_used() -> None:
    """What both held was thrown away, though either was the whole state, and the run went back to a checkpoint."""
    plans = {1: MIXED, 2: COPIES}
    before = {1: HeldState(7, generation=1, rank=1), 2: HeldState(7, generation=1, rank=2)}
    entered = {0: HeldState(7, generation=2, rank=0)}
    left = state_of_worlds(plans, 2, {**before, **entered}, True)
    assert left.step == 7, left.because
    assert (left.world, left.holders) == (2, ((0,),)) and "that of world 2 is used" in left.because
    with_hole = {1: HeldState(7, generation=1, rank=1)}
    assert state_of_worlds(plans, 2, {**with_hole, **entered}, True).world == 2
    newer = {0: HeldState(-1, generation=2, rank=0), 3: HeldState(6, generation=2, rank=1)}
    left = state_of_worlds(plans, 2, {**before, **newer}, True)
    assert (left.step, left.world, left.one_of_each) == (7, 1, {1, 2})


def _nobody(place: dict[str, str]) -> Forked:
    raise AssertionError("nobody is started")


def test_an_older_generation_may_write_nothing(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        lock.check()
        older = lock.generation
        assert lock.next_generation() == older + 1
        lock.check()
        lock.generation = older
        with pytest.raises(RunInUse, match=r"generation 1 of the run in .* is over"):
            lock.check()


def test_whether_more_devices_pay_is_asked_until_the_ranks_are_called(tmp_path: Path) -> None:
    asked: list[int] = []
    one = object.__new__(Generations)
    one._crew, one._policy, one._machines = Crew(), RecoverySpec(), OneMachine(Starter(_nobody, None, print), {})
    one._elastic = SimpleNamespace(
        pays=lambda done: asked.append(1) or len(asked) == 2, prepare=lambda unit, has_begun: None
    )
    settled = one._settled(tmp_path, lambda: (), lambda: False)
    for _ in range(5):
        settled()
    assert len(asked) == 2 and (tmp_path / CALL_NAME).exists()


@pytest.mark.parametrize("full", [(), ("tmp",), ("tmp", "run")])
def test_a_world_has_its_folder_below_the_run_where_temporary_files_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: tuple[str, ...]
) -> None:
    """The first world is there by then: a rank that dies later would end the run for want of a few KB."""
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if path.relative_to(tmp_path).parts[0] in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    one, said = object.__new__(Generations), list[str]()
    one._machines = OneMachine(Starter(lambda place: pytest.fail("nobody is started"), None, print), {})
    one._folder, one._say = tmp_path / "tmp", said.append
    one._lock = cast(RunLock, SimpleNamespace(run_dir=tmp_path / "run"))
    folder, decisions = one._folder_of(2)
    spare = full == ("tmp",)
    assert folder == (tmp_path / "run" / "worlds" if spare else tmp_path / "tmp") / "generation-2"
    assert len(decisions) == len(said) == spare and folder.is_dir() and not list(folder.iterdir())


def notices_of(run: RunSpec, usd_per_second: float) -> Notices:
    notices = Notices(run)
    notices.enter(usd_per_second, True, None)
    return notices


def test_money_and_a_file_end_a_run_and_nothing_does_where_there_is_none(tmp_path: Path) -> None:
    spec = dataclasses.replace(RunSpec(), usd_limit=1e-9)
    assert "money limit" in notices_of(spec, 1.0).look()
    assert notices_of(spec, float("nan")).look() == ""
    recovery = dataclasses.replace(RecoverySpec(), notice_file=str(tmp_path / "notice"))
    notices = notices_of(dataclasses.replace(RunSpec(), recovery=recovery), 1.0)
    assert notices.look() == ""
    (tmp_path / "notice").touch()
    wait_until(lambda: "has appeared" in notices.look())


def test_a_file_server_that_stumbles_once_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle, or an error of the device: the thread ended with it, and no notice was ever seen."""
    monkeypatch.setattr("paceline.run.survive.notice.LOOK_SECONDS", 0.01)
    notice, errors = tmp_path / "notice", [errno.ESTALE, errno.EIO]
    exists = Path.exists

    def stumbles(path: Path) -> bool:
        if path == notice and errors:
            raise OSError(errors.pop(), "as a test wants")
        return exists(path)

    monkeypatch.setattr(Path, "exists", stumbles)
    recovery = dataclasses.replace(RecoverySpec(), notice_file=str(notice))
    notices = notices_of(dataclasses.replace(RunSpec(), recovery=recovery), 1.0)
    wait_until(lambda: not errors)
    assert notices.look() == ""
    notice.touch()
    wait_until(lambda: "has appeared" in notices.look())


def test_limits_count_from_the_call_and_not_from_the_process_that_goes_on() -> None:
    """A rank that a recovery has started anew would train on beyond the job's end, and be killed without a save."""
    limited = dataclasses.replace(RunSpec(), time_limit="1 h", usd_limit=50.0)
    for begun_after, usd_before, usd_per_second, said in (
        (0.0, 0.0, 0.01, ""), (3000.0, 30.0, 0.01, ""), (3601.0, 36.0, 0.01, "time limit"),
        (3000.0, 60.0, 0.02, "money limit"), (3000.0, float("nan"), float("nan"), ""),
    ):  # fmt: skip
        notices = Notices(limited, begun_after, usd_before)
        notices.enter(usd_per_second, True, None)
        assert (said in notices.look()) if said else (notices.look() == ""), (begun_after, usd_per_second)
        notices.enter(usd_per_second, True, None)  # another world
        assert bool(notices.look()) == bool(said)


def test_each_world_counts_at_its_own_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on with one device of four had its money counted as if it had had one all the time."""
    now = [100.0]
    monkeypatch.setattr("paceline.supervise.again.spent_by_worlds.passed_seconds", lambda: now[0])
    spent, told = SpentSoFar(), []
    for seconds, usd_per_second in ((0.0, 4.0), (10.0, 1.0), (5.0, 2.0), (1.0, float("nan"))):
        now[0] += seconds
        told.append(spent.begin(usd_per_second))
    assert told == [(0.0, 0.0), (10.0, 40.0), (15.0, 45.0), (16.0, 47.0)]
    assert math.isnan(spent.begin(1.0)[1])


def test_a_url_announces_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.survive.notice.URL_SECONDS", 0.05)
    says, asked = [b"NONE"], threading.Event()

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if says[0]:
                self.send_response(200)
                self.end_headers()
            self.wfile.write(says[0] or b"no HTTP at all\r\n\r\n")  # which ended the watch
            asked.set()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/notice"
        recovery = dataclasses.replace(RecoverySpec(), notice_url=url)
        notices = notices_of(dataclasses.replace(RunSpec(), recovery=recovery), 1.0)
        assert notices.look() == ""
        for said in (b"", b"TERMINATE at noon"):
            says[0] = said
            asked.clear()
            assert asked.wait(60)
        wait_until(lambda: "TERMINATE at noon" in notices.look())
        server.shutdown()

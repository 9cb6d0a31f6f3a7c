"""Generations: a run's worlds one after the other, each made of what the last world left, until a world ends for good.

Each has a number that only grows, a rendezvous and a folder of its own, and the fence of the run's directory: whatever
is left of an older one can neither meet the newer one's ranks nor publish anything. The next world is formed in the
cheapest way that works: by the ranks that are left, in their processes; by ranks forked from the standby; or anew.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from paceline.errors import Requeue, RunInUse, StorageError
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.said import say_line
from paceline.scratch import Scratch
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.redact import Redactor
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise import supervisor
from paceline.supervise.again.elastic import Elastic, Replan
from paceline.supervise.again.fallen import Fallen, TakenOver, lost_with, moments_of, told_in_a_line, with_reason
from paceline.supervise.again.judge import Judge, reached_by
from paceline.supervise.again.machines import OneMachine, RankHosts, Stander
from paceline.supervise.again.mark_journal import HandedFaults, mark_fault
from paceline.supervise.again.rescue import clear_rescues
from paceline.supervise.again.spent_by_worlds import SpentSoFar
from paceline.supervise.again.survivors import state_of_worlds
from paceline.supervise.again.told_before import is_told, told_before
from paceline.supervise.again.unfinished import set_aside_unfinished
from paceline.supervise.blame import Outcome, cause_is_known, outcome_of, ranks_text
from paceline.supervise.control import ABORT_NAME, CALL_NAME
from paceline.supervise.crew import Crew, attend
from paceline.supervise.groups import collect
from paceline.supervise.memory_kills import memory_kills
from paceline.supervise.nodes.held_in_memory import HeldPieces
from paceline.supervise.pulses.watch import PulseWatch
from paceline.supervise.ranks_lost import TellLost, told_to_nobody
from paceline.supervise.signals import STOP_SIGNALS, forward_signals
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.generation import FIRST, REFORMED, Generation

SPARE = "worlds"  # below a run's directory: folders of its worlds, where temporary files have no room
ROOM_BYTES = 2**18  # of a world's folder: what its ranks leave there is a few files of some KB
KILL_SECONDS = 0.005  # that a killed process takes to end
AGAIN = "start the same command again when they are there: it goes on from the newest checkpoint"
PEERS_SECONDS = 1.0  # that the peers of a rank have whose failure is known: what they would tell is an echo of it
# Given what was recorded of the plan at hand, and how many devices are held: yields what says why the run is to end.
LooksForNotices = Callable[[PlannedRecord, int], contextlib.AbstractContextManager[Callable[[], str]]]


@contextlib.contextmanager
def nobody_looks(planned: PlannedRecord, devices: int) -> Iterator[Callable[[], str]]:
    """Look for no notices while a block runs."""
    yield lambda: ""


class Generations:
    """The worlds of one run."""

    def __init__(
        self,
        machines: RankHosts,
        brief: Brief,
        lock: RunLock,
        policy: RecoverySpec,
        say: Callable[[str], None] = say_line,
        redactor: Redactor | None = None,
        replan: Replan | None = None,
        health: HealthSpec | None = None,
        tell: TellLost = told_to_nobody,
        limits: RunSpec | None = None,
        notices: LooksForNotices = nobody_looks,
    ) -> None:
        """`replan` makes a plan for another number of devices, where a run may go on with one.

        `tell` is told at once of ranks that are lost. `limits` are those of time and money, and `notices` looks for
        what else ends a run: both count while devices are waited for, and no rank is there that looks.
        """
        self._machines, self._plan, self._lock = machines, brief.plan, lock
        self._policy, self._say, self._redactor = policy, say, redactor
        self._elastic = Elastic(policy, brief, replan, machines.devices)
        self._health, self._tell, self._crew = health, tell, Crew()
        self._spent, self._limits, self._notices = SpentSoFar(), limits or RunSpec(), notices
        self._handed = HandedFaults(lock.run_dir, redactor)
        self._judge = Judge(self._policy, reached_by(lock.run_dir))
        self._plans: dict[int, Plan] = {}  # of the worlds so far, by their numbers
        self._needed: Collection[int] = ()  # survivors that hold what the next world is made of
        self._is_stopped = machines.is_stopped

    def run(self, taken: TakenOver | None = None) -> Outcome:
        """Run one generation after the other and return how the last one ended. No process is left.

        With `taken` the first of them follows that world, and is made of its ranks as far as they are left.
        """
        flag = forward_signals(lambda number: self._crew.send(number))

        def is_stopped(leaving: Collection[int] = ()) -> bool:
            return bool(flag.because) or self._machines.is_stopped(leaving)

        self._is_stopped = is_stopped
        try:
            with Scratch("world") as name:
                self._folder = Path(name)
                set_aside_unfinished(self._lock.run_dir)  # of an earlier start
                self._machines.open(self._folder)
                return self._run(taken)
        finally:
            collect(self._crew.processes)
            self._machines.close()
            clear_rescues(self._lock)
            shutil.rmtree(self._lock.run_dir / SPARE, ignore_errors=True)
            flag.release()

    def _run(self, taken: TakenOver | None) -> Outcome:
        generation: Generation | None = Generation(to_world=self._plan.layout.devices, rung=FIRST)
        standing: Mapping[int, Stander] = {}
        if taken is not None:
            self._spent = SpentSoFar(*taken.spent)
            self._judge = Judge(self._policy, reached_by(self._lock.run_dir), taken.judged)
            standing, generation = taken.standing, self._take_over(taken)
        while generation is not None:
            self._machines.rung()  # waits until the standby is ready
            if self._is_stopped() and not standing:  # while no rank was there that could be told
                return Outcome(Requeue.exit_code)
            fallen = self._one(generation, standing)
            outcome, why = fallen.outcome, "as many devices as there are now"
            if fallen.called:
                self._judge.note_steps(reached_by(self._lock.run_dir))
            else:
                if outcome.error is None or self._lock.is_lost:
                    return self._end(outcome)
                verdict = self._judge.judge(outcome, reached_by(self._lock.run_dir), fallen.out_of_memory)
                self._machines.note_judged(self._judge.so_far)
                if self._is_stopped():
                    return self._end(_cut_short(outcome) if verdict.goes_on else outcome)
                why = verdict.because
                if not verdict.goes_on:
                    return self._end(with_reason(outcome, why))
                self._say(f"recover  {told_in_a_line(outcome.error)}")
            while not self._elastic.next_plan():
                self._say(f"recover  {self._elastic.because}")
                if because := self._waited():
                    return self._end(self._given_up(fallen, because))
            following = self._after(generation, fallen)
            if following is None:
                return self._end(outcome)
            self._say(f"recover  generation {following.number} by {following.rung} ({why})")
            generation, standing = following, fallen.standing
        return self._end(Outcome(Requeue.exit_code))

    def _take_over(self, taken: TakenOver) -> Generation | None:
        """Return the generation that follows the one whose coordinator was lost."""
        processes = [taken.processes[rank] for rank in sorted(taken.processes)]
        assert list(range(len(processes))) == sorted(taken.processes), "a process for each rank, ended or not"
        self._crew, self._plan = Crew(processes), taken.plan
        self._plans[taken.number] = taken.plan
        moments = {"fault": taken.since, "noticed": taken.since, "ended": passed_seconds()}
        what = lost = "the coordinator was lost"
        missing = sorted(taken.processes.keys() - taken.standing.keys())
        error: dict[str, object] | None = None
        if missing and not taken.left:  # which has nobody else on record
            what = f"{lost} with {ranks_text(missing)}"
            error = {"what": what, "because": "", "rank": missing[0], "names_ranks": True}
        what = taken.left or what
        fallen = Fallen(Outcome(0, error), moments, False, taken.standing, "" if error else what)
        if not taken.left:
            self._tell(lost_with(taken, lost))
        following = self._after(Generation(taken.number, to_world=taken.plan.layout.devices), fallen)
        if following is not None:
            self._say(f"recover  generation {following.number} by {following.rung} ({what})")
        return following

    def _waited(self) -> str:
        """Wait for more devices, and return why nobody does any longer; "" when they are there."""
        stopped = "it was asked to stop"
        if self._is_stopped():
            return stopped
        with self._notices(self._elastic.record, self._elastic.devices_there) as notice:

            def is_over() -> str:
                return self._spent.limit_reached(self._limits) or notice()

            if self._machines.wait_for(self._policy.min_devices, is_over):
                return ""
            return is_over() or (stopped if self._is_stopped() else "no more have come")

    def _given_up(self, fallen: Fallen, because: str) -> Outcome:
        """Return the outcome where too few devices are left, and nobody waits for more: it says why."""
        called = {"error": "WorkerDied", "what": fallen.called, "because": ""}
        error = {**(fallen.outcome.error or called), "try": AGAIN, "exit_code": Requeue.exit_code}
        return with_reason(Outcome(Requeue.exit_code, error), f"{self._elastic.because}, and {because}")

    def _end(self, outcome: Outcome) -> Outcome:
        """Have those that stand by end too, and return the outcome."""
        self._machines.dismiss()
        if not self._lock.is_lost:  # else the newest journal is of another start
            with contextlib.suppress(OSError):
                self._handed.settle(is_lost=True)
        return outcome

    # ---- one generation --------------------------------------------------------------------------------------------

    def _one(self, generation: Generation, standing: Mapping[int, Stander]) -> Fallen:
        """Run one world, made of the ranks that stand by and of new ones, and return how it ended.

        None of its processes runs afterwards but those that stand by again.
        """
        folder, decisions = self._folder_of(generation.number)
        self._plans[generation.number] = self._plan
        kills = memory_kills()
        before, self._crew = self._crew, Crew((), self._tell, self._is_stopped, self._machines.changes)
        decisions, lasting = (*generation.decisions, *decisions), self._machines.decisions()
        seconds, usd = self._spent.begin(self._elastic.usd_per_second)
        generation = replace(
            generation, decisions=decisions, lasting=lasting, begun_after=seconds, usd_before=usd,
            judged=self._judge.so_far,
        )  # fmt: skip
        told = self._left_for_ranks(generation, folder)
        # Where the run may not go on nobody waits for those that stand by, so nobody does.
        told |= self._machines.for_survivors() if self._policy.reform and self._policy.may_go_on else {}
        answers: dict[int, dict[str, object]] = {}
        ranks = self._plan.layout.devices
        pulses = self._machines.watch(self._health, folder, ranks, self._lock.run_dir, self._crew.process_of)
        told |= pulses.for_ranks() if pulses else {}
        seats = self._machines.seats(standing, ranks, self._needed)
        for rank, place in enumerate(self._machines.places(folder, ranks)):
            if rank in seats:
                answers[seats[rank]] = {"place": {**place, **told}, "generation": generation.number}
                self._crew.processes.append(before.processes[seats[rank]])
            else:
                self._crew.processes.append(self._machines.start({**place, **told}))
        if self._is_stopped():  # while they were started: some were not there to be told
            self._crew.send(signal.SIGTERM)
        self._machines.dismiss(answers)
        collect([before.processes[rank] for rank in standing if rank not in answers])
        return self._attended(generation.number, folder, kills, pulses, not seats)

    def _folder_of(self, number: int) -> tuple[Path, tuple[DecisionRecord, ...]]:
        """Return the folder of a generation: among temporary files, or below the run's directory where these are full.

        The second case comes with a decision for the journal. With several nodes there is no second case, since the
        nodes' supervisors look for the folder in one place.
        """
        folder = self._folder / f"generation-{number}"
        try:
            make_room(folder)
        except OSError as error:
            spare = self._lock.run_dir / SPARE / folder.name
            if isinstance(self._machines, OneMachine):
                with contextlib.suppress(OSError):  # no better: what is wrong with the first one is told
                    make_room(spare)
                    because = f"the folder of temporary files takes no more: {error}"
                    self._say(f"recover  {because}; {spare} is used")
                    return spare, (DecisionRecord("folder of a world", str(folder), str(spare), because, None),)
        return folder, ()

    def _left_for_ranks(self, generation: Generation, folder: Path) -> dict[str, str]:
        """Leave in a generation's folder what its ranks read, and return what their environment says of it."""
        try:
            folder.mkdir(exist_ok=True)
            return {**generation.write(folder), **self._elastic.environ(folder)}
        except OSError as error:
            raise StorageError(
                f"cannot begin generation {generation.number} of the run",
                f"the folder of what its ranks are told was not written: {error}",
                "free space there, or set TMPDIR, and start again: it goes on from the newest checkpoint",
            ) from error

    def _attended(
        self, number: int, folder: Path, kills: int | None, pulses: PulseWatch | None, is_new: bool
    ) -> Fallen:
        """Return how the world of this number ended, when it has. All ranks of a world that `is_new` began with it."""
        crew = self._crew

        def standing() -> Mapping[int, Stander]:
            return {rank: each for rank, each in self._machines.standing(number).items() if rank not in crew.endings}

        def is_empty() -> bool:
            return is_new and pulses is not None and not pulses.have_met

        is_settled = self._settled(folder, standing, is_empty)
        attend(crew, Patience(float("inf")), supervisor.GRACE_SECONDS, is_settled, standing, pulses)
        left = standing()
        crew.look()  # a node may be lost in that look: its ranks have ended, and the others stand by all the same
        left = {rank: each for rank, each in left.items() if rank not in crew.endings}
        if not (left and len(left) + len(crew.endings) == len(crew.processes)):
            left = {}
            self._machines.dismiss()
            while not crew.is_over:
                crew.kill()
                time.sleep(KILL_SECONDS)
                crew.look()
        self._machines.rest()
        outcome = outcome_of(crew.ended(), crew.killed, folder, kills, len(crew.processes))
        collect([process for rank, process in enumerate(crew.processes) if rank not in left])
        moments = {**moments_of(crew.ended(), outcome), "ended": passed_seconds()}
        called = "the number of devices has changed" if left and not crew.endings else ""
        # Where nobody is left to tell that a node leaves, a limit may as well have ended the whole run, and a rank
        # of it came too late: that ends the run with what is saved, which is never wrong.
        if left and crew.endings and outcome == Outcome(Requeue.exit_code):
            # Who came too late to stand by was ended, or has failed for want of its peers, and its node stays.
            leaving = sorted(each.rank for each in crew.endings.values() if each.code == Requeue.exit_code)
            # A machine that leaves may be asked to stop as its ranks end, and that is no stop of the run.
            have_saved = not any(-each.code in STOP_SIGNALS for each in crew.endings.values())  # not ended by it
            is_stopped = self._is_stopped(leaving if have_saved else ())
            called = self._machines.part_with(leaving, crew.endings) if leaving and not is_stopped else ""
        return Fallen(outcome, moments, kills is not None and (memory_kills() or 0) > kills, left, called)

    def _settled(
        self, folder: Path, standing: Callable[[], Collection[int]], is_empty: Callable[[], bool]
    ) -> Callable[[], bool]:
        """Return what says whether nothing more is to be waited for.

        That is when all that run stand by; or, where none may, or `is_empty` says that no rank has come to hold
        anything, when it is known which rank failed first, and its peers have had a moment. It also calls the ranks
        where the run is to go on with more devices.
        """
        crew, peers, call, is_left = self._crew, Patience(float("inf")), folder / CALL_NAME, False
        if not self._policy.may_go_on:
            return lambda: False

        def settled() -> bool:
            nonlocal peers, is_left
            if not crew.has_failed and crew.endings and standing():
                if is_left:  # since the look before: who has died is known by now
                    crew.left_early()
                is_left = True
            if not crew.has_failed:
                self._elastic.prepare(self._machines.unit, lambda: reached_by(self._lock.run_dir).made)
                may_grow = self._policy.reform and not call.exists()
                if may_grow and self._elastic.pays(lambda: reached_by(self._lock.run_dir).step):
                    self._machines.word(folder, CALL_NAME)
                return len(standing()) == len(crew.processes)
            self._machines.word(folder, ABORT_NAME)
            if self._policy.reform and not is_empty():  # else who waits to meet the dead one would be waited for
                return len(standing()) + len(crew.endings) == len(crew.processes)
            if peers.left_seconds() == float("inf") and cause_is_known(crew.ended(), folder):
                peers = Patience(PEERS_SECONDS)
            return peers.is_over

        return settled

    # ---- from one to the next --------------------------------------------------------------------------------------

    def _after(self, before: Generation, fallen: Fallen) -> Generation | None:
        """Return the generation that follows a fallen one, its fault on record; None where the run is another's."""
        error: dict[str, object] = dict(fallen.outcome.error or {})
        is_lost = 0 not in fallen.standing  # whose journal it is
        with contextlib.suppress(OSError):  # a full disk is told by whoever writes next
            self._handed.settle(is_lost)
            if error and is_lost:
                mark_fault(self._lock.run_dir, error, self._redactor)
            elif error:
                self._handed.hand(error)
        reached = reached_by(self._lock.run_dir).step
        try:
            number = self._lock.next_generation()
        except RunInUse:
            return None
        set_aside_unfinished(self._lock.run_dir)
        on_disk = self._newest_on_disk()
        holders = {rank: each.held for rank, each in fallen.standing.items()}
        self._plan, decisions = self._elastic.take(self._say)
        left = state_of_worlds(self._plans, before.number, holders, on_disk > 0)
        self._needed = left.one_of_each
        left = left.brought_by(self._machines.seated(holders, self._plan.layout.devices, self._needed))
        held = left.step
        decisions = (*self._untold(before), *decisions)
        kept = None if held is not None else self._held_in_memory(on_disk)
        if left.because:
            used = f"the state of step {held} that ranks are left with" if held is not None else "an older state"
            decisions += (DecisionRecord("restore", "what the ranks that are left hold", used, left.because, None),)
            self._say(f"recover  {left.because}: {used}")
        if self._lock.was_made_again and held is None and kept is None and not on_disk and not reached:
            because = "the run's directory was deleted while the run went on, and its journal and checkpoints with it"
            decisions += (DecisionRecord("restore", "the newest checkpoint", "the first step", because, None),)
            self._say(f"recover  {because}: it begins at the first step")
        if kept is not None:
            because = "the ranks that are left do not hold the whole state, and the memory of their nodes does"
            decisions += (DecisionRecord("restore", "the newest checkpoint", f"step {kept.step}", because, None),)
        if fallen.called:
            error = {"what": fallen.called, "because": "the run goes on with the devices that are there"}
        return Generation(
            number=number,
            rung=REFORMED if fallen.standing else self._machines.rung(),
            from_world=before.to_world,
            to_world=self._plan.layout.devices,
            reached=reached,
            fault={name: error.get(name) for name in ("what", "because", "rank", "names_ranks", "evidence")},
            moments=fallen.moments,
            clock=fallen.clock,
            decisions=decisions,
            is_called=bool(fallen.called),
            rescue="" if held is None and kept is None else self._machines.rescue(self._lock, number),
            rescue_step=kept.step if kept is not None else held or 0,
            rescue_world=left.world if held is not None else 0,
            pieces={str(rank): tuple(files) for rank, files in kept.files.items()} if kept is not None else {},
        )

    def _untold(self, before: Generation) -> tuple[DecisionRecord, ...]:
        """Return what was decided for a world that fell before its first rank could record it."""
        told = told_before(self._lock.run_dir) if before.decisions else set[str]()
        redactor = self._redactor or Redactor()
        return tuple(each for each in before.decisions if not is_told(redactor.record(each), told))

    def _newest_on_disk(self) -> int:
        """Return the step of the newest checkpoint in the run's directory, 0 where there is none."""
        names = checkpoints_folder(self._lock.run_dir).glob("step-*")
        steps = [int(name) for path in names if (name := path.name.partition("-")[2].partition(".")[0]).isdigit()]
        return max(steps, default=0)

    def _held_in_memory(self, on_disk: int) -> HeldPieces | None:
        """Return what the machines' memory holds of the state, where that is not older than what is on disk."""
        found = self._machines.held(self._plan.layout.devices)
        return found if found is not None and found.step >= on_disk else None


def _cut_short(outcome: Outcome) -> Outcome:
    """Return the outcome of a run that was asked to stop, and lost a rank before it had saved: it is to go on later.

    Without the signal it would have gone on at once.
    """
    error = {**(outcome.error or {}), "try": "start the same command again", "exit_code": Requeue.exit_code}
    return with_reason(
        Outcome(Requeue.exit_code, error),
        "the run was asked to stop, and has not saved since: the next start goes on from the newest checkpoint",
    )


def make_room(folder: Path) -> None:
    """Make a folder in which so much can be written as ranks leave there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    tried = folder / "room"
    try:
        tried.write_bytes(bytes(ROOM_BYTES))
    finally:
        tried.unlink(missing_ok=True)

"""What a step has decided is on record, though a rank is lost before that and the step's duties are made up."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from runs import records_of
from storm import SURVIVES, Story, told
from survive_runs import training
from tasks_of_storms import TASKS
from test_soak import RUN

from paceline.run.loop import next_world
from paceline.run.process.world import World
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.survivor import Brought
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.reading import TAIL_BYTES
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.fallen import Fallen
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.again.machines import OneMachine
from paceline.supervise.again.told_before import is_told, told_before
from paceline.supervise.blame import Outcome
from paceline.supervise.starting import Starter
from paceline.supervise.told.generation import REFORMED, Generation, read_generation
from paceline.supervise.told.place import Place

STEPS, STEP = 9, 6
# No comparison is due after the step. An update is left out, among candidates that were chosen from, and one of two
# copies is lost before that is recorded.
NAN: dict[str, Any] = {"kind": "nan", "step": STEP, "rank": 1}
LOST: dict[str, Any] = {"kind": "kill", "step": STEP, "rank": 1, "phase": "update"}
SKIPS: dict[str, Any] = {**RUN, "check_every": "5 steps", "health": {**RUN["health"], "on_nonfinite": "skip"}}


def test_what_a_step_has_decided_is_on_record_though_its_duties_are_made_up(tmp_path: Path) -> None:
    """The choice among its candidates, and the update that was left out: both were forgotten with the world."""
    two = {"dp_replicate": 2}
    calm = Story("calm", two, [NAN], SKIPS, STEPS, task="selects")
    met = Story("met", two, [NAN, LOST], SKIPS, STEPS, how=SURVIVES, task="selects")
    ended = told(tmp_path, [calm, met], timeout=180)
    assert ended["calm"][-1].code == ended["met"][-1].code == 0, ended
    (recovery,) = records_of(tmp_path / "met", "recovery")
    assert (recovery["rung"], recovery["step"]) == ("reform", STEP), "the step itself is not made again"
    chosen = []
    for name in ("calm", "met"):
        left_out = [each for each in records_of(tmp_path / name, "decision") if each["what"] == "skip"]
        assert len(left_out) == 1 and f"step {STEP}:" in left_out[0]["because"]
        chosen.append([(each["step"], each["chosen"]) for each in records_of(tmp_path / name, "selection")])
    assert chosen[0] == chosen[1] and [step for step, _ in chosen[1]] == [*range(1, STEPS + 1)]


def test_samples_that_were_left_out_are_counted_once_though_duties_are_made_up(tmp_path: Path) -> None:
    run: Any = training(tmp_path / "run", 100)
    run.source.damaged = dict.fromkeys(range(run.source.samples), "a bad sector")
    for batch in run:
        run.step(batch)
        run._done_step -= 1  # a peer was lost in the duties of the step
        assert run._make_up()
        assert run._left_out.total() == batch.step * batch.samples
        if batch.step == 3:
            break


def test_what_a_step_decides_stands_once_though_it_is_begun_twice(tmp_path: Path) -> None:
    """A peer is lost in the pass of the step from which on a group is trained, and again in that which freezes one."""
    faults = [{"kind": "kill", "step": step, "rank": 1, "phase": "backward"} for step in (6, 7)]
    story = Story("met", {"dp_replicate": 2}, faults, {**RUN, "check_every": "5 steps"}, STEPS, how=SURVIVES,
                  task="freezes")  # fmt: skip
    assert told(tmp_path, [story], timeout=180)["met"][-1].code == 0
    assert [each["rung"] for each in records_of(tmp_path / "met", "recovery")] == ["reform"] * 2
    found = [
        (each["from"], each["to"]) for each in records_of(tmp_path / "met", "decision") if each["what"] == "freezing"
    ]
    kept, trained = "as they are", "trained"
    assert found == [(None, kept), (kept, trained), (trained, kept)]


def test_a_fault_is_on_record_though_the_next_world_ends_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has the records lives on; another one is lost while the world after the fault is being formed."""

    def another_is_lost(world: World, place: Place) -> World:
        raise dist.DistNetworkError("Connection reset by peer")

    hung = {"what": "rank 1 hung", "because": "it did not come to step 2", "rank": 1, "names_ranks": True}
    answers = iter([(Place(0, 2, 0, 2), Generation(2, REFORMED, 2, 2, fault=hung)), None])
    run = training(tmp_path / "run", 100)
    for name, stands_for in {
        "why_not_reformed": lambda task, plan: "", "next_place": lambda world, waits: next(answers),
        "join_next": another_is_lost,
    }.items():  # fmt: skip
        monkeypatch.setattr(next_world, name, stands_for)
    for batch in run:
        run.step(batch)
        assert not run._reformed(), "the supervisor has no third world"
        break
    (found,) = records_of(tmp_path / "run", "fault")
    assert {name: found[name] for name in hung} == hung


def test_a_fault_is_on_record_though_the_new_first_rank_had_not_begun_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that had them was lost, and the next world ended as the new first rank came to begin records of its own.

    The supervisor tells what ends a world whose first rank is lost; what ends one whose first rank lives on that tells.
    """
    faults = [{"what": f"rank {rank} hung", "because": "why", "rank": rank, "names_ranks": True} for rank in (0, 1)]
    answers = iter(
        (Place(0, 1, 0, 1), Generation(number, REFORMED, 1, 1, fault=fault))
        for number, fault in zip((2, 3), faults, strict=True)
    )
    run = training(tmp_path / "run", 100)
    record, opens, lost = run._record, run._open_keeper, iter((True, False))
    monkeypatch.setattr(run, "_record", SilentRecorder())
    monkeypatch.setattr(run, "_is_on_record", False)
    monkeypatch.setattr(run, "world", replace(run.world, rank=1, size=2))

    def opened(restored: Path | None) -> None:
        if next(lost):
            raise dist.DistNetworkError("Connection reset by peer")
        opens(restored)

    monkeypatch.setattr(run, "_open_keeper", opened)
    monkeypatch.setattr(next_world, "why_not_reformed", lambda task, plan: "")
    monkeypatch.setattr(next_world, "next_place", lambda world, waits: next(answers))
    assert run._reformed() and isinstance(run._record, Recorder) and run._record is not record
    (started,) = [each for each in records_of(tmp_path / "run", "run_started") if each["attempt"] == 2]
    (found,) = records_of(tmp_path / "run", "fault")
    assert (found["what"], started["world_size"]) == ("rank 1 hung", 1)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_fault_is_on_record_once_though_the_first_rank_dies_as_it_hears_of_it(tmp_path: Path, is_told: bool) -> None:
    """The supervisor leaves it to the first rank, which lives on, and is killed before or after it has told."""
    run = training(tmp_path / "run")
    hung = {"what": "rank 1 hung", "because": "it did not come to step 2", "rank": 1, "names_ranks": True}
    killed = {"what": "rank 0 was ended by SIGKILL", "because": "", "rank": 0, "names_ranks": True}
    assert run._lock is not None
    machines = OneMachine(Starter(lambda place: pytest.fail("nobody is started"), None, print), {})
    one = Generations(machines, run.brief, run._lock, RecoverySpec())
    following: Generation | None = Generation(to_world=2)
    for error, standing in ((hung, {0: SimpleNamespace(held=HeldState())}), (killed, {})):
        assert following is not None
        following = one._after(following, Fallen(Outcome(137, {**error, "try": ""}), {}, False, standing))
        if is_told and standing:
            run._record.fault("rank 1 hung", "it did not come to step 2", 1, None, True)
    found = [each["what"] for each in records_of(tmp_path / "run", "fault")]
    assert found == ["rank 1 hung", "rank 0 was ended by SIGKILL"]


@pytest.mark.parametrize("goes_back_to", [4, 6])
def test_a_step_that_is_made_again_from_a_checkpoint_decides_nothing_anew(tmp_path: Path, goes_back_to: int) -> None:
    """Steps stand there again, and their numbers may be others; what followed from the step alone is the same."""
    task = replace(TASKS["freezes"].make(tmp_path), callbacks=(OwnRates(),))
    run = training(tmp_path / "run", 2, task=task)
    gone_back = False
    for batch in run:
        step = run.step(batch).step
        if step == 7 and not gone_back:
            gone_back = True
            run._keeper.finish()
            for newer in sorted((tmp_path / "run" / "checkpoints").glob("step-*")):
                if int(newer.name[5:]) > goes_back_to:
                    shutil.rmtree(newer)
            run.take_down()
            run._enter(Brought(None, None, True))
            run._went_back = True
    steps = [each["step"] for each in records_of(tmp_path / "run", "step")]
    assert steps == [*range(1, 8), *range(goes_back_to + 1, 9)]
    for what, count in (("freezing", 3), ("update", 1), ("learning rate", 3)):
        assert len([each for each in records_of(tmp_path / "run", "decision") if each["what"] == what]) == count, what


class OwnRates:
    """Leaves the update of step 6 out, and sets the rate of the steps from 5 to 7."""

    def before_step(self, moment: Any) -> dict[str, object]:
        if moment.step == 6:
            return {"skip": "it is the sixth", "lr": 2e-3}
        return {"lr": {5: 1e-3, 7: 4e-3}[moment.step]} if moment.step in (5, 7) else {}


def test_what_holds_for_all_worlds_is_recorded_once(tmp_path: Path) -> None:
    """That ranks import torch by themselves stood there for each world."""
    run, decision = training(tmp_path / "run"), DecisionRecord("standby", "forked", "each imports torch", "why", None)
    for because in ("why", "why", "another reason"):
        run._generation = Generation(2, lasting=(replace(decision, because=because),))
        run._generation.write(tmp_path)
        run._take_place(read_generation(tmp_path / "generation.json"))
        run._record.decided_once(run._recovered.lasting)
    found = [each["because"] for each in records_of(tmp_path / "run", "decision") if each["what"] == "standby"]
    assert found == ["why", "another reason"]


def test_a_first_rank_that_is_new_tells_again_nothing_that_stands_on_record(tmp_path: Path) -> None:
    """Each new first rank told what is set in its process, the plan and its proof once more."""
    faults = [{"kind": "kill", "step": step, "rank": 0, "phase": "backward"} for step in (4, 6)]
    story = Story("met", {"dp_replicate": 2}, faults, RUN, STEPS, how=SURVIVES)
    assert told(tmp_path, [story], timeout=180)["met"][-1].code == 0
    assert len(records_of(tmp_path / "met", "run_started")) == 3
    found = [(each["what"], each["from"], each["to"], each["because"], each["evidence"]) for each in
             records_of(tmp_path / "met", "decision")]  # fmt: skip
    assert found and not [each for each in found if found.count(each) > 1]


def test_what_a_new_first_rank_has_to_tell_for_the_first_time_is_told(tmp_path: Path) -> None:
    run, known = training(tmp_path / "run"), DecisionRecord("plan", {"rows": (1, 2)}, "x", "why", {"seconds": math.nan})
    run._record.decided_before([known])
    told = told_before(tmp_path / "run")
    assert is_told(known, told) and not is_told(replace(known, evidence=None), told)
    for batch in run:
        run.step(batch)
    later = replace(known, because="in the end")
    run._record.decided_before([later])
    assert is_told(later, told_before(tmp_path / "run")), "what is decided for a world that was formed anew"
    (journal,) = (tmp_path / "run" / "journal").glob("*.jsonl")
    with journal.open("ab") as file:  # a world that lasts: the decision was told again where the next one fell
        file.write(b'{"kind":"step","step":9,"loss":1.0}\n' * (TAIL_BYTES // 30))
    assert is_told(later, told_before(tmp_path / "run"))


def test_what_a_step_decided_that_fails_is_on_record(tmp_path: Path) -> None:
    """Its update is made no more, and who looks for the reason is to see that a group was trained from there on."""
    run = training(tmp_path / "run", 100, task=TASKS["freezes"].make(tmp_path))
    run._stepper.wrap_objectives(lambda objective: lambda model, batch: _fails_in_step(run, objective, model, batch))
    with pytest.raises(LookupError):
        for batch in run:
            run.step(batch)
    found = [each["because"] for each in records_of(tmp_path / "run", "decision") if each["what"] == "freezing"]
    assert len(found) == 2 and found[1].endswith("from step 6 on")


def test_an_update_that_was_left_out_is_on_record_where_the_next_turn_of_its_step_fails(tmp_path: Path) -> None:
    run = training(tmp_path / "run", 100, health=HealthSpec(on_nonfinite="skip"))
    assert run._stepper.guard is not None
    update = run._stepper._make

    def made(turn: Any, batch: Any, *given: Any) -> Any:
        if batch.step < 2:
            return update(turn, batch, *given)
        assert run._stepper.guard is not None and not run._stepper.guard.may_update(2, "step 2", "one", math.nan, 1.0)
        raise LookupError("in the turn after")

    run._stepper._make = made  # type: ignore[method-assign]
    with pytest.raises(LookupError):
        for batch in run:
            run.step(batch)
    (skipped,) = [each for each in records_of(tmp_path / "run", "decision") if each["what"] == "skip"]
    assert "step 2" in skipped["because"]


def _fails_in_step(run: Any, objective: Any, model: Any, batch: Any) -> Any:
    if run.progress.step == 5:
        raise LookupError("in the sixth step")
    return objective(model, batch)

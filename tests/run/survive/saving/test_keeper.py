"""Checkpoints beside training: they hold the state of their step, and cost a warning where they fail."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from distributed import run_ranks
from survive_runs import STEPS, here, records, through, training, values_of

from paceline import patience
from paceline.checkpoint import save
from paceline.checkpoint.beside.flight import SaveInFlight
from paceline.checkpoint.beside.stage import HostStage
from paceline.errors import Requeue, StorageError
from paceline.run.loop.training import Training
from paceline.run.survive import listener
from paceline.run.survive.saving import keeper, memory_tier, tiers, within_notice
from paceline.run.survive.saving.known_saves import KnownSave, agreed_save
from paceline.run.survive.saving.pace import KnownPace
from paceline.run.survive.survivor import is_lost_peer
from paceline.supervise.control import ABORT_NAME, CONTROL_VARIABLE
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.supervisor import ERROR_FOLDER


class Gate:
    """Has shards of some saves wait, in the thread that writes them, until it is opened; for hooks of a test."""

    def __init__(self, patch: pytest.MonkeyPatch, saves: range = range(99)) -> None:
        self.is_open, self.reached, self._number, self._saves = threading.Event(), threading.Event(), -1, saves
        self._write = save.write_shard
        patch.setattr(save, "write_shard", self.write)

    def write(self, *given: Any) -> Any:
        self._number += 1
        if self._number in self._saves:
            self.reached.set()
            self.is_open.wait()
        return self._write(*given)


def _saved_late(folder: str) -> None:
    """Write each checkpoint when the weights have already changed."""
    with pytest.MonkeyPatch.context() as patch:
        gate, take, wait = Gate(patch), HostStage.take, SaveInFlight.wait
        patch.setattr(HostStage, "take", lambda *given: (gate.is_open.clear(), take(*given))[1])
        patch.setattr(SaveInFlight, "wait", lambda *given: (gate.is_open.set(), wait(*given))[1])
        through(training(Path(folder)), lambda step: gate.is_open.set() if step % 2 else None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_beside_training_is_the_state_of_its_step_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    run_ranks(_saved_late, ranks, str(tmp_path / "beside"))
    run_ranks(_saved_at_once, ranks, str(tmp_path / "at-once"))
    beside, at_once = values_of(tmp_path / "beside"), values_of(tmp_path / "at-once")
    assert sorted(beside) == [2, 4, 6, 8]
    assert beside == at_once
    assert len({str(values) for values in beside.values()}) == 4, "the weights do change"
    told = records(tmp_path / "beside", "checkpoint")
    assert [record["step"] for record in told] == [2, 4, 6, 8]
    assert all(record["stall_seconds"] > 0 and record["seconds"] > 0 for record in told)


def _saved_at_once(folder: str) -> None:
    through(training(Path(folder), asynchronous="off"))


def _under_pressure(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate, wait = Gate(patch), SaveInFlight.wait

        def opened(flight: SaveInFlight, *given: Any) -> bool:
            assert flight.is_running, "it cannot have ended"
            threading.Timer(0.05, gate.is_open.set).start()  # so long does the save that is due wait
            return wait(flight, *given)

        patch.setattr(SaveInFlight, "wait", opened)
        run = training(Path(folder))
        for batch in run:
            if run.step(batch).step == 4:
                break


def test_a_save_that_is_due_waits_for_the_one_before_and_says_so_once(tmp_path: Path) -> None:
    _under_pressure(str(tmp_path))
    (told,) = [record for record in records(tmp_path, "decision") if record["what"] == "checkpoint"]
    assert "the save of step 2 took" in told["because"] and told["evidence"]["waited_seconds"] > 0.01
    assert [record["step"] for record in records(tmp_path, "checkpoint")] == [2, 4]


def _full_disk(folder: str, failing: range, most_failures: int) -> str:
    """Have the last rank fail to write in some saves; return how training ended."""
    number, last = [-1], here().rank == here().size - 1
    with pytest.MonkeyPatch.context() as patch:
        original = save.write_shard

        def write(*given: Any) -> Any:
            number[0] += 1
            if last and number[0] in failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*given)

        patch.setattr(save, "write_shard", write)
        try:
            through(training(Path(folder), most_failures=most_failures))
        except (Requeue, StorageError) as error:
            return type(error).__name__
    return "complete"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_is_a_warning_and_the_next_save_is_tried(tmp_path: Path, ranks: int) -> None:
    assert set(run_ranks(_full_disk, ranks, str(tmp_path), range(1, 3), 5)) == {"complete"}
    assert sorted(values_of(tmp_path)) == [2, 8]
    faults = records(tmp_path, "fault")
    assert [f"step {step} was not saved" in fault["what"] for step, fault in zip((4, 6), faults, strict=True)]
    assert all("No space left on device" in fault["because"] for fault in faults)
    assert all("step-00000002 is kept" in fault["because"] for fault in faults)
    assert not list((tmp_path / "checkpoints").glob(".partial*")), "nothing is left of them"


def _vanished(folder: str) -> None:
    """Take the folder of the checkpoints away after step 3, and give it back after step 7."""
    root, away = Path(folder) / "checkpoints", Path(folder) / "away"

    def after(step: int) -> None:
        if step == 3:
            root.rename(away)
            root.write_text("not a folder")
        elif step == 7:
            root.unlink()
            away.rename(root)

    run = training(Path(folder))
    for batch in run:
        step = run.step(batch).step
        if step in (3, 7):
            run._keeper.finish()
        if here().is_first:
            after(step)
        run.world.wait()


@pytest.mark.parametrize("ranks", [1, 2])
def test_storage_that_is_gone_for_a_while_costs_the_saves_of_that_time(tmp_path: Path, ranks: int) -> None:
    run_ranks(_vanished, ranks, str(tmp_path))
    assert sorted(values_of(tmp_path)) == [2, 8]
    faults = records(tmp_path, "fault")
    assert [f"step {step} was not saved" in fault["what"] for step, fault in zip((4, 6), faults, strict=True)]


@pytest.mark.parametrize(("failing", "ends"), [(range(1, 9), "Requeue"), (range(9), "StorageError")])
def test_too_many_failures_in_a_row_end_the_run(tmp_path: Path, failing: range, ends: str) -> None:
    assert run_ranks(_full_disk, 2, str(tmp_path), failing, 2) == [ends] * 2
    end = records(tmp_path, "run_ended")[-1]
    assert (end["exit_code"], end["step"]) == ((75, 8) if ends == "Requeue" else (74, 6))


def _hanging(folder: str) -> tuple[str, list[int]]:
    """Have the last rank's second save hang for good; return how training ended, and after which step."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        saves = range(1, 2) if here().rank == here().size - 1 else range(0)
        gate = Gate(patch, saves)
        try:
            through(training(Path(folder), hanging_after="0.2 s"), steps.append)
        except StorageError as error:
            return f"{error.what}: {error.because}", steps
        finally:
            gate.is_open.set()
    return "complete", steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_storage_that_hangs_holds_up_neither_training_nor_its_end(tmp_path: Path, ranks: int) -> None:
    for ended, steps in run_ranks(_hanging, ranks, str(tmp_path)):
        assert steps == list(range(1, STEPS)), "the last save fails, nothing else"
        assert "step 8 was not saved" in ended and "hangs" in ended
    assert 2 in values_of(tmp_path)
    faults = records(tmp_path, "fault")
    assert "step 4 is not written after" in faults[0]["what"] and "step 6 is left out" in faults[0]["because"]
    assert records(tmp_path, "run_ended")[-1]["exit_code"] == 74


def _hanging_at_once(folder: str) -> tuple[str, list[int], list[str]]:
    """Have the last rank's second save hang while training waits; let it go on after step 6, and end."""
    steps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within_notice, "ABANDON_SECONDS", 0.05)
        gate = Gate(patch, range(1, 2) if here().rank == here().size - 1 else range(0))
        run = training(Path(folder), asynchronous="off", hanging_after="0.3 s")

        def after(step: int) -> None:
            steps.append(step)
            if step == 6:
                hanging = run._keeper._flight
                assert hanging is not None and hanging.is_given_up
                gate.is_open.set()
                hanging._ended.wait()

        try:
            through(run, after)
        finally:
            gate.is_open.set()
    return "complete", steps, sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_that_hangs_while_training_waits_is_given_up(tmp_path: Path, ranks: int) -> None:
    """Training waited for it for ever. What is given up publishes nothing: the weights have moved on."""
    for ended, steps, names in run_ranks(_hanging_at_once, ranks, str(tmp_path)):
        assert (ended, steps) == ("complete", list(range(1, STEPS + 1)))
        assert [name for name in names if not name.startswith(".")] == ["step-00000002", "step-00000008"]
    faults = [record["what"] for record in records(tmp_path, "fault")]
    assert all("the checkpoint of step 4 is not written after" in what for what in faults) and len(faults) == 2
    at_once = tmp_path / "at-once"
    run_ranks(_saved_at_once, ranks, str(at_once))
    assert values_of(tmp_path)[8] == values_of(at_once)[8]


def test_a_save_that_was_given_up_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had failed when it was given up, and once more when its world was left."""
    monkeypatch.setattr(within_notice, "ABANDON_SECONDS", 0.05)
    gate = Gate(monkeypatch, range(1, 2))
    run = training(tmp_path, asynchronous="off", hanging_after="0.3 s")
    try:
        for batch in run:
            if run.step(batch).step < 4:
                continue
            hanging = run._keeper._flight
            assert hanging is not None and hanging.is_given_up and run._keeper._failures == 1
            gate.is_open.set()
            hanging._ended.wait()
            run._keeper.abandon()
            assert run._keeper._failures == 1
            break
    finally:
        gate.is_open.set()


def _slow(folder: str, slowest: int) -> str:
    """Have the last rank's second save take several times `hanging_after`, on a disk that writes slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within_notice, "SLOWEST", slowest)
        writes, begun = save.write_shard, [0]
        # A limit is longer on a busy machine: of the second save it is what it says, of all others a hundred times.
        patch.setattr(patience, "programs_per_core", lambda: 1.0 if begun[0] == 2 else 100.0)

        def slowly(path: Path, *given: Any) -> Any:
            begun[0] += 1
            if begun[0] == 2 and here().rank == here().size - 1:
                with (Path(folder) / "slow").open("wb", buffering=0) as file:
                    for _ in range(80):
                        file.write(bytes(2**13))
                        threading.Event().wait(0.05)
            return writes(path, *given)

        patch.setattr(save, "write_shard", slowly)
        try:
            through(training(Path(folder), asynchronous="off", hanging_after="1.2 s"))
        except StorageError as error:  # of the last save, which a busy machine may not make in 1.2 s either
            return error.what
    return "complete"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_disk_is_waited_for_where_training_waits_in_any_case(tmp_path: Path, ranks: int) -> None:
    """Saves of 15 minutes were given up after 10, each of them and the last one too: the run came to nothing."""
    assert run_ranks(_slow, ranks, str(tmp_path / "slow"), 2**14) == ["complete"] * ranks
    assert sorted(values_of(tmp_path / "slow")) == [2, 4, 6, 8] and not records(tmp_path / "slow", "fault")
    assert records(tmp_path / "slow", "checkpoint")[1]["seconds"] > 1.0
    run_ranks(_slow, ranks, str(tmp_path / "as_if_it_hung"), 2**40)
    told = [each["what"] for each in records(tmp_path / "as_if_it_hung", "fault")]  # on a loaded machine of step 2 too
    assert any("the checkpoint of step 4 is not written after" in what for what in told), told


def _noticed(folder: str, good: bool) -> tuple[str, float]:
    """Have the last rank's last save hang, of a run that a notice has come to; return how that ended, and when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(within_notice, "ABANDON_SECONDS", 0.05)
        hangs = range(2, 3) if good else range(1)
        gate = Gate(patch, hangs if here().rank == here().size - 1 else range(0))
        limits = {} if good else {"hanging_after": "0.3 s"}
        run = training(Path(folder), every=2 if good else 99, asynchronous="off", **limits)
        policy = replace(run.spec.run.recovery, notice="2 s")
        run._keeper._run = replace(run._run, spec=replace(run.spec, run=replace(run.spec.run, recovery=policy)))
        began = 0.0
        try:
            for batch in run:
                if batch.step == 5:
                    run._keeper._save_seconds = 0.1  # on a busy machine it may have taken longer than the notice
                    run._stop.because, began = "somebody asks for it", time.monotonic()
                run.step(batch)
        except Requeue as stop:
            return stop.because, time.monotonic() - began
        except StorageError as error:
            return error.what, time.monotonic() - began
        finally:
            gate.is_open.set()
    return "complete", 0.0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("good", [True, False])
def test_a_last_save_that_hangs_ends_with_the_notice(tmp_path: Path, ranks: int, good: bool) -> None:
    """The machine went, and nobody had said which checkpoint counts. Without any a save may take longer."""
    for ended, _ in run_ranks(_noticed, ranks, str(tmp_path), good):
        assert ended == "somebody asks for it" if good else "the checkpoint of step 5 is not written after" in ended
    end = records(tmp_path, "run_ended")[-1]
    assert (end["status"], end["exit_code"], end["step"]) == (("requeue", 75, 5) if good else ("failed", 74, 5))
    (fault,) = records(tmp_path, "fault")
    assert "the checkpoint of step 5 is not written after" in fault["what"] and "the storage hangs" in fault["because"]
    if good:
        (stopped,) = [each for each in records(tmp_path, "decision") if each["what"] == "stop"]
        assert stopped["evidence"]["checkpoint"] == str(tmp_path / "checkpoints" / "step-00000004")


@pytest.mark.parametrize("asynchronous", ["on", "off"])
def test_a_save_took_as_long_as_until_it_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: str
) -> None:
    """The journal, the notice and the interval had the seconds until it began to write: next to none."""
    ended, save_to = list[float](), SaveInFlight._save

    def noted(flight: SaveInFlight, *given: Any) -> Any:
        made = save_to(flight, *given)
        ended.append(time.perf_counter() - flight._began)
        return made

    monkeypatch.setattr(SaveInFlight, "_save", noted)
    through(training(tmp_path, asynchronous=asynchronous))
    told = [record["seconds"] for record in records(tmp_path, "checkpoint")]
    assert len(told) == 4 and all(took >= least for took, least in zip(told, ended, strict=True))


def _abandoned(folder: str) -> list[str]:
    """Give a save up while a peer hangs in it; then save again, on a new group."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, range(1) if here().rank else range(0))
        run = training(Path(folder))
        for batch in run:
            run.step(batch)
            if run.progress.step == 2:
                if here().rank:
                    gate.reached.wait()
                    gate.is_open.set()
                run._keeper.abandon()
                run.world.groups.drop_beside()
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_a_save_that_is_given_up_leaves_nothing_and_the_next_one_is_whole(tmp_path: Path) -> None:
    for names in run_ranks(_abandoned, 2, str(tmp_path)):
        assert set(names) >= {"step-00000004", "step-00000006", "step-00000008"}
    assert set(values_of(tmp_path)) >= {4, 6, 8}


def _staged_twice(folder: str) -> bool:
    run = training(Path(folder))
    places = []
    for batch in run:
        run.step(batch)
        places.append({part.key: held.data_ptr() for part, held in run._keeper._stage._held.items()})
    return places[2] == places[4] == places[6] and len(places[2]) > 10


def test_host_memory_is_used_again(tmp_path: Path) -> None:
    assert run_ranks(_staged_twice, 2, str(tmp_path)) == [True, True]


# ---- what the next world knows --------------------------------------------------------------------------------------


def lost(run: Training, ends: bool = True) -> None:
    """Have the keeper of a run's next world take over, as where peers are lost and the state is of those left."""
    if ends:
        assert run._keeper._flight is None or run._keeper._flight.wait()
    run._keeper.abandon()
    run._saved = run._keeper.known
    run._open_keeper(None)


def test_a_save_that_was_published_before_a_peer_was_lost_is_the_newest_known_good(tmp_path: Path) -> None:
    """It was recorded, and forgotten: storage that failed then ended the run as one without any checkpoint."""
    run, number = training(tmp_path, most_failures=2), [0]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Requeue):
        for batch in run:
            if run.step(batch).step == 3:
                lost(run)
                assert run._keeper.good == tmp_path / "checkpoints" / "step-00000002"
                patch.setattr(save, "write_shard", lambda *given: _refuse(number))
    assert number[0] == 2
    (stopped,) = [record for record in records(tmp_path, "decision") if record["what"] == "stop"]
    assert "the last good one is" in stopped["because"] and stopped["because"].endswith("step-00000002")
    assert [record["step"] for record in records(tmp_path, "checkpoint")] == [2]


def _refuse(number: list[int]) -> None:
    number[0] += 1
    raise OSError(errno.ENOSPC, "No space left on device")


def test_saves_that_fail_in_a_row_are_counted_through_the_worlds(tmp_path: Path) -> None:
    """A run that lost a rank between any two of them would never have stopped."""
    run, number = training(tmp_path, most_failures=2), [0]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Requeue):
        for batch in run:
            step = run.step(batch).step
            if step == 3:
                run._keeper.finish()
                patch.setattr(save, "write_shard", lambda *given: _refuse(number))
            if step == 5:
                lost(run)
    assert number[0] == 2, "those of the steps 4 and 6"


def test_a_save_that_ended_while_it_was_given_up_is_on_record_and_known(tmp_path: Path) -> None:
    """Between the last look and the end of the thread, which is waited for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        gate, abandon = Gate(patch, range(1)), SaveInFlight.abandon

        def goes_through(flight: SaveInFlight, seconds: float) -> None:
            gate.is_open.set()
            assert flight.wait()
            abandon(flight, seconds)

        patch.setattr(SaveInFlight, "abandon", goes_through)
        run = training(tmp_path)
        for batch in run:
            if run.step(batch).step == 3:
                run._keeper.abandon()
                break
    assert [record["step"] for record in records(tmp_path, "checkpoint")] == [2]
    assert run._keeper.known.path == tmp_path / "checkpoints" / "step-00000002"


@pytest.mark.skipif(not memory_tier.RAM_DISK.is_dir(), reason="no RAM disk")
def test_training_stood_still_once_for_all_tiers_of_a_save_that_was_given_up(tmp_path: Path) -> None:
    """The stall stood in the journal with each tier, and what a report adds up was twice what it had been."""
    with pytest.MonkeyPatch.context() as patch:
        gate, abandon = Gate(patch, range(1)), SaveInFlight.abandon
        patch.setattr(SaveInFlight, "abandon", lambda *given: (gate.is_open.set(), given[0].wait(), abandon(*given)))
        run = training(tmp_path, memory_every=2)
        for batch in run:
            if run.step(batch).step == 2:
                run._keeper.abandon()
                break
        run._keeper.tiers.close()
    found = [(each.get("tier"), each["stall_seconds"] > 0) for each in records(tmp_path, "checkpoint")]
    assert found == [("memory", True), (None, False)]


def _agreed(folder: str) -> list[KnownSave]:
    """Return what three ranks go by: one has heard of the newest save, one of the save before, and one is new."""
    older = KnownSave(Path(folder, "step-4"), 1.0, 2, pace=KnownPace({"disk": 4}))
    newer = KnownSave(Path(folder, "step-8"), 2.0, 3, pace=KnownPace({"disk": 8}))
    world = here()
    own = [older, newer, KnownSave()][world.rank]
    return [agreed_save(own, None, world), agreed_save(own, Path(folder, "step-2"), world)]


def test_ranks_go_by_the_newest_save_that_any_of_them_has_heard_of(tmp_path: Path) -> None:
    for known, restored in run_ranks(_agreed, 3, str(tmp_path)):
        assert (known.path, known.published, known.pace.last) == (tmp_path / "step-8", 3, {"disk": 8})
        assert (restored.path, restored.published) == (tmp_path / "step-2", 3)


@pytest.mark.skipif(not memory_tier.RAM_DISK.is_dir(), reason="no RAM disk")
def test_what_was_decided_on_saves_is_told_where_another_world_decides_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood in the journal once for each world."""
    full = ["the host has no room"]
    monkeypatch.setattr(keeper, "why_not_beside", lambda tensors, world: full[0])
    monkeypatch.setattr(tiers, "why_no_memory_tier", lambda tensors, world: full[0])
    run = training(tmp_path, every=1, asynchronous="auto", memory_every=1)
    for batch in run:
        step = run.step(batch).step
        if step in (2, 4):
            full[0] = full[0] if step == 2 else ""
            lost(run)
    told = [(each["from"], each["to"]) for each in records(tmp_path, "decision") if each["what"] == "checkpoint"]
    waits, beside, both, disk = "while training waits", "beside training", "memory and disk", "disk alone"
    assert told[:4] == [(beside, waits), (both, disk), (waits, beside), (disk, both)]
    assert all("waits" not in before for before, _ in told[4:])


def test_copies_in_the_memory_of_other_nodes_are_told_of_whenever_a_world_decides_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world that had them again did not say so, and the one after it not that it did without them."""

    def nowhere(*given: object) -> NoReturn:
        raise StorageError("no copy", "there is no other node")

    full = ["the host has no room"]
    monkeypatch.setattr(keeper, "why_not_beside", lambda tensors, world: full[0])
    monkeypatch.setattr(tiers, "meet_peers", lambda *given: "another node")
    monkeypatch.setattr(tiers, "PeerCopies", lambda peers: SimpleNamespace(save=nowhere))
    run = training(tmp_path, every=1, asynchronous="auto", memory_every=1)
    for batch in run:
        step = run.step(batch).step
        if step in (2, 4, 6):
            full[0] = {2: "", 4: "none again", 6: "none again"}[step]
            lost(run)
    told = [(each["from"], each["to"]) for each in records(tmp_path, "decision") if each["what"] == "checkpoint"]
    waits, beside, disk = "while training waits", "beside training", "disk alone"
    off, on = [(beside, waits), (tiers.IN_PEERS, disk)], [(waits, beside), (disk, tiers.IN_PEERS)]
    assert [each for each in told if {*each} & {beside, disk}] == [*off, *on, *off]


def test_a_notice_keeps_the_newest_checkpoint_though_no_save_has_come_since(tmp_path: Path) -> None:
    """What was published beside training counts when it has ended, not when the next one begins."""
    run = training(tmp_path)
    short = replace(run.spec.run, recovery=replace(run.spec.run.recovery, notice="1e-06 s"))
    for batch in run:
        if run.step(batch).step != 5:
            continue
        one = run._keeper
        assert one._flight is not None and one._flight.wait()
        one._run = replace(run._run, spec=replace(run.spec, run=short))
        kept = one.save_or_keep(run._under.built, run.brief.plan, run.world, run.progress)
        assert kept == tmp_path / "checkpoints" / "step-00000004"
        break


def test_a_notice_waits_for_no_save_that_hangs_and_gives_up_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process waited `hanging_after`, ten minutes, for it, and was gone with its machine before it said 75."""
    monkeypatch.setattr(keeper, "ABANDON_SECONDS", 0.05)
    gate = Gate(monkeypatch, range(1, 2))
    run = training(tmp_path)
    noticed = replace(run.spec.run, recovery=replace(run.spec.run.recovery, notice="0.3 s"))
    try:
        for batch in run:
            if run.step(batch).step != 5:
                continue
            one = run._keeper
            assert one.good is not None and one._flight is not None and one._flight.is_running
            one._run, one._save_seconds = replace(run._run, spec=replace(run.spec, run=noticed)), 0.1
            kept = one.save_or_keep(run._under.built, run.brief.plan, run.world, run.progress)
            assert kept == tmp_path / "checkpoints" / "step-00000002" and one._flight is None
            break
    finally:
        gate.is_open.set()
    because = records(tmp_path, "decision")[-1]["because"]
    assert "that of step 4 is still under way, and the machine goes 300 ms after a notice" in because


def test_a_save_that_waits_for_what_nobody_sends_holds_up_no_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waited in the next save for it, until the process was ended by force (15 s of an idle machine)."""
    word = tmp_path / "world" / ABORT_NAME
    word.parent.mkdir()
    wait = SaveInFlight.wait

    def waits(flight: SaveInFlight, is_vain: Callable[[], bool]) -> bool:
        word.touch()  # now, not before: a step that is under way would end at the word by itself
        return wait(flight, is_vain)

    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    monkeypatch.setattr(listener, "ON_ONE_MACHINE_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "ABANDON_SECONDS", 0.05)
    run = training(tmp_path / "run")
    gate = Gate(monkeypatch, range(1))
    try:
        for batch in run:
            if batch.step == 4:
                monkeypatch.setenv(ERROR_FOLDER, str(word.parent))
                monkeypatch.setenv(CONTROL_VARIABLE, "control")
                listener.listen_for_abort(run.world.device)
                monkeypatch.setattr(SaveInFlight, "wait", waits)
                monkeypatch.setattr(run, "_reformed", lambda: bool(run._keeper.abandon()))
                with pytest.raises(RuntimeError, match="the save of step 2 with it") as told:
                    run.step(batch)
                assert is_lost_peer(told.value), "the supervisor knows why"
                break
            run.step(batch)
    finally:
        gate.is_open.set()
        listener.stop_listening()

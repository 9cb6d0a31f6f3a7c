"""What outlives the first rank: a fault that it was to put on record, and that this call of the run has made steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from observe.alerts.alert_journals import started, step
from tests_shared import plan_of

from paceline import lock as lock_file
from paceline.lock import take
from paceline.spec.journal.kinds import FaultRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.fallen import Fallen
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.machines import RankHosts
from paceline.supervise.again.survivors import LeftState
from paceline.supervise.blame import Outcome
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.generation import RESTARTED, Generation

BRIEF = Brief(
    plan_of(Layout(dp_shard=2), batch=6), 100, 1, "tokens", "cpu", 1, 1.0, 3.0, 1.0, math.nan, PlannedRecord()
)
STANDS = {0: SimpleNamespace(held=SimpleNamespace(step=0, changed="", digest="", kind="", agreed_step=0))}


def died(rank: int) -> dict[str, object]:
    what = f"rank {rank} of 2 was ended by SIGKILL"
    return {"error": "WorkerDied", "what": what, "because": "from outside", "try": "look", "rank": rank}


def ended(run_dir: Path, monkeypatch: pytest.MonkeyPatch, world: Callable[[Generation, object], Fallen]) -> Outcome:
    """Return how a run ends whose worlds end so."""
    with take(run_dir) as lock:
        machines = SimpleNamespace(
            devices=lambda: 2, is_stopped=lambda leaving=(): False, rung=lambda: RESTARTED, dismiss=lambda: None,
            open=lambda folder: None, close=lambda: None, held=lambda ranks: None, rescue=lambda *given: "",
            seated=lambda *given: (), note_judged=lambda judged: None,
        )  # fmt: skip
        one = Generations(cast(RankHosts, machines), BRIEF, lock, RecoverySpec(), lambda text: None)
        monkeypatch.setattr(one, "_one", world)
        monkeypatch.setattr("paceline.supervise.again.generations.state_of_worlds", lambda *given: LeftState(None))
        return one.run()


@pytest.mark.parametrize("tells", ["neither", "the first", "both", "in a new start"])
def test_each_fault_is_told_once_whoever_lives_to_tell_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tells: str
) -> None:
    """Rank 1 is killed twice, and rank 0 after that: before it has read the answer, after one, after both."""
    (tmp_path / "journal").mkdir()
    first = tmp_path / "journal" / "0001.jsonl"
    # An equal fault of before is another one.
    first.write_bytes(line_of(started()) + line_of(FaultRecord(died(1)["what"], "from outside", 1)))  # type: ignore[arg-type]
    worlds = 0

    def fallen(generation: Generation, standing: object) -> Fallen:
        nonlocal worlds
        worlds += 1
        if (tells == "both" and worlds in (2, 3)) or (tells == "the first" and worlds == 2):
            with first.open("ab") as file:
                record = FaultRecord(generation.fault["what"], generation.fault["because"], generation.fault["rank"])
                file.write(line_of(record) + line_of(step(worlds, 1.0)))
        if tells == "in a new start" and worlds == 3:
            told = b"".join(line_of(FaultRecord(died(1)["what"], "from outside", 1)) for _ in range(2))  # type: ignore[arg-type]
            (tmp_path / "journal" / "0002.jsonl").write_bytes(line_of(started()) + told)
        if worlds <= 2:
            return Fallen(Outcome(137, died(1)), {}, False, STANDS)  # type: ignore[arg-type]
        return Fallen(Outcome(137, died(0)), {}, False) if worlds == 3 else Fallen(Outcome(0), {}, False)

    assert ended(tmp_path, monkeypatch, fallen) == Outcome(0)
    told = [record["what"] for record in read_journal(tmp_path) if record["kind"] == "fault"]
    assert told == [died(1)["what"]] * 3 + [died(0)["what"]]


@pytest.mark.parametrize("steps", [0, 7])
def test_steps_count_that_were_made_before_the_first_rank_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Who takes its place begins a journal of its own, which has no step yet: an error there ended the run."""
    (tmp_path / "journal").mkdir()
    failed = Outcome(1, {"error": "KeyError", "what": "w", "because": "b", "try": "t", "rank": 1})
    left = Fallen(Outcome(75), {}, False, called="node 0 left at a notice, with rank 0")
    worlds = 0

    def world(generation: Generation, standing: object) -> Fallen:
        nonlocal worlds
        worlds += 1
        made = b"".join(line_of(step(at + 1, 1.0)) for at in range(steps if worlds == 1 else 0))
        (tmp_path / "journal" / f"000{worlds}.jsonl").write_bytes(line_of(started()) + made)
        return (left, Fallen(failed, {}, False), Fallen(Outcome(0), {}, False))[worlds - 1]

    outcome = ended(tmp_path, monkeypatch, world)
    assert (outcome.exit_code, worlds) == ((0, 3) if steps else (1, 2))
    assert steps or "no step was made before it" in str((outcome.error or {})["because"])


def test_nothing_is_told_to_the_journal_of_another_start(tmp_path: Path) -> None:
    """The run was taken over while a fault was handed on that nobody has on record."""
    (tmp_path / "journal").mkdir()
    first = tmp_path / "journal" / "0001.jsonl"
    first.write_bytes(line_of(started()))
    with take(tmp_path) as lock:
        machines = SimpleNamespace(is_stopped=lambda leaving=(): False, dismiss=lambda: None, devices=lambda: 2)
        one = Generations(cast(RankHosts, machines), BRIEF, lock, RecoverySpec(), lambda text: None)
        one._handed.hand(died(1))
        (tmp_path / lock_file.NAME).unlink()
        with take(tmp_path):
            assert one._end(Outcome(1)) == Outcome(1)
    assert first.read_bytes() == line_of(started())

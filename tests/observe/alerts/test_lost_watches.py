"""A coordinator is lost, and the watch with it: who sees it tells it, once, and the next watch goes on from there."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from observe.alerts.alert_journals import started, step
from runs import wait_until

from paceline.lock import while_free
from paceline.lock_file import NAME as LOCK_NAME
from paceline.observe.alerts.process import _is_taken_over
from paceline.observe.alerts.sinks.make import make_sinks
from paceline.observe.alerts.watch import AlertWatch
from paceline.observe.alerts.watch_of_run import tell_of_loss, watch_of
from paceline.session.nodes.loss import LossTeller
from paceline.session.watch import alerting
from paceline.session.watch.alerting import RunAlerts, _BesideProcess, begin_alerts
from paceline.spec.journal.beside import read_beside
from paceline.spec.journal.kinds import RecoveryRecord
from paceline.spec.journal.line import line_of
from paceline.spec.journal.record import Record
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.load import load_spec
from paceline.spec.run import RunSpec
from paceline.spec.watch.alerts import AlertSinkSpec, AlertsSpec
from paceline.supervise.nodes.meeting import announce, find_meeting, leave
from paceline.supervise.ranks_lost import RanksLost

LOSS_TIME = 1_700_000_100.0
LOSS = RanksLost((), "the coordinator on node 0 was lost", "its connection has ended", LOSS_TIME)


def recovery(time: float) -> RecoveryRecord:
    return RecoveryRecord(2, "reform", "", 2, 4, 4, None, 5, 1, {"total": 1.0}, time=time)


def write(run_dir: Path, *records: Record) -> None:
    (run_dir / "journal").mkdir(parents=True, exist_ok=True)
    with (run_dir / "journal" / "0001.jsonl").open("ab") as file:
        file.write(b"".join(map(line_of, records)))


def run_spec(to: Path) -> RunSpec:
    sink = AlertSinkSpec(kind="file", to=str(to), least="info")
    return RunSpec(alerts=AlertsSpec(group="0 s", sinks=(sink,), off=("no_step", "checkpoint_old")))


def next_watch(run: RunSpec, run_dir: Path) -> AlertWatch:
    watch = watch_of(run, run_dir, "asr-2", make_sinks(run.alerts), lambda line: None, goes_on=True)
    watch._take_earlier()
    return watch


def down(run_dir: Path) -> list[tuple[str, bool]]:
    return [(each.state, each.sent) for each in read_beside(run_dir, AlertRecord) if each.rule == "rank_down"]


def test_what_was_told_of_a_loss_fires_on_until_the_run_goes_on(tmp_path: Path) -> None:
    run = run_spec(tmp_path / "told.jsonl")
    write(tmp_path, started(), step(7, LOSS_TIME - 1), recovery(LOSS_TIME - 50))
    tell_of_loss(run, tmp_path, "asr-2", make_sinks(run.alerts), LOSS, lambda line: None).hand_over(30)
    (first,) = read_beside(tmp_path, AlertRecord)
    assert (first.state, first.step, first.title) == ("firing", 7, LOSS.what)
    watch = next_watch(run, tmp_path)
    watch.look(LOSS_TIME + 5)
    watch.tell(dataclasses.replace(LOSS, time=LOSS_TIME - 0.1))  # the coordinator, which knows it from all nodes
    watch.look(LOSS_TIME + 6)
    assert down(tmp_path) == [("firing", True)]
    write(tmp_path, recovery(LOSS_TIME + 7))
    watch.look(LOSS_TIME + 8)
    watch.hand_over(30)
    assert down(tmp_path) == [("firing", True), ("resolved", True)]
    sent = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    assert [each["state"] for each in sent if each["rule"] == "rank_down"] == ["firing", "resolved"]


def test_word_of_a_loss_that_comes_after_the_run_has_gone_on_does_not_fire_for_ever(tmp_path: Path) -> None:
    run = run_spec(tmp_path / "told.jsonl")
    write(tmp_path, started(), step(7, LOSS_TIME - 1), recovery(LOSS_TIME + 7), step(8, LOSS_TIME + 8))
    watch = next_watch(run, tmp_path)  # a slow one: the run has gone on before its first look
    watch.look(LOSS_TIME + 9)
    watch.tell(LOSS)
    watch.look(LOSS_TIME + 9.5)
    watch.hand_over(30)
    assert down(tmp_path) == [("firing", True), ("resolved", True)]


@pytest.mark.parametrize("later", [0.0, 0.5])
def test_word_that_comes_late_of_a_loss_that_was_told_is_not_told_again(tmp_path: Path, later: float) -> None:
    """The next coordinator notes a moment of its own, as far as it knows that from the nodes."""
    run = run_spec(tmp_path / "told.jsonl")
    write(tmp_path, started(), step(7, LOSS_TIME - 1))
    tell_of_loss(run, tmp_path, "asr-2", make_sinks(run.alerts), LOSS, lambda line: None).hand_over(30)
    write(tmp_path, recovery(LOSS_TIME + 7))
    watch = next_watch(run, tmp_path)
    watch.look(LOSS_TIME + 9)
    watch.tell(dataclasses.replace(LOSS, time=LOSS_TIME + later))
    watch.look(LOSS_TIME + 10)
    assert down(tmp_path) == [("firing", True), ("resolved", True)]
    watch.tell(dataclasses.replace(LOSS, time=LOSS_TIME + 11))
    watch.look(LOSS_TIME + 12)
    watch.hand_over(30)
    assert [state for state, _ in down(tmp_path)] == ["firing", "resolved", "firing"], "another loss"


def tellers(folder: Path, run_dir: Path, to: Path, count: int, said: list[str]) -> Sequence[LossTeller]:
    path = folder / "task.toml"
    sink = f'[[run.alerts.sinks]]\nkind = "file"\nto = "{to}"\n'
    path.write_text(f'[task]\ndata = "{folder}/none.txt"\n[run]\ndir = "{run_dir}"\n{sink}')
    spec = load_spec(path)
    return [LossTeller(spec, lambda: False, said.append) for _ in range(count)]


def losers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "paceline-loss"]


def test_of_all_nodes_that_lose_a_coordinator_one_tells_it(tmp_path: Path) -> None:
    run_dir, to, said = tmp_path / "run", tmp_path / "told.jsonl", list[str]()
    write(run_dir, started(), step(7, time.time()))
    (run_dir / LOCK_NAME).touch()
    lost = announce(run_dir, "127.0.0.1", 1, 0)
    for teller in tellers(tmp_path, run_dir, to, 8, said):
        teller.begin(lost, "its connection has ended")
    wait_until(lambda: not losers())
    assert down(run_dir) == [("firing", True)]
    (sent,) = [json.loads(line) for line in to.read_text().splitlines()]
    assert sent["title"] == LOSS.what


def test_a_coordinator_that_lives_or_has_a_successor_is_not_told_lost(tmp_path: Path) -> None:
    run_dir, to, said = tmp_path / "run", tmp_path / "told.jsonl", list[str]()
    write(run_dir, started(), step(7, time.time()))
    (run_dir / LOCK_NAME).touch()
    lost = announce(run_dir, "127.0.0.1", 1, 0)
    (teller,) = tellers(tmp_path, run_dir, to, 1, said)
    with while_free(run_dir) as is_free:  # as its coordinator holds it, whose connection alone has ended
        assert is_free
        teller.begin(lost, "its connection has ended")
        with while_free(run_dir) as is_free_too:
            assert not is_free_too
        assert losers() and not down(run_dir)
        announce(run_dir, "127.0.0.1", 2, 1)
        assert find_meeting(run_dir) != lost
    wait_until(lambda: not losers())
    assert not down(run_dir) and not to.exists()


def test_a_coordinator_that_goes_with_its_node_has_no_successor_yet(tmp_path: Path) -> None:
    """Its watch took its word that it goes for another one's address: nobody told where none came."""
    before = announce(tmp_path, "127.0.0.1", 1, 0)
    assert find_meeting(tmp_path) == before
    leave(tmp_path, before, 5, [1, 0], "node 0 left at a notice")
    assert not _is_taken_over(tmp_path, before, 0.1)
    announce(tmp_path, "127.0.0.1", 2, 1)
    assert _is_taken_over(tmp_path, before, 60.0)


def test_a_watch_on_a_node_where_a_sinks_variable_is_missing_tells_the_others_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK_OF_NO_NODE", raising=False)
    run_dir, to, said = tmp_path / "run", tmp_path / "told.jsonl", list[str]()
    write(run_dir, started(), step(7, time.time()))
    path = tmp_path / "task.toml"
    sinks = '[[run.alerts.sinks]]\nkind = "slack"\nto = "$HOOK_OF_NO_NODE"\n'
    sinks += f'[[run.alerts.sinks]]\nkind = "file"\nto = "{to}"\nleast = "info"\n'
    path.write_text(f'[task]\ndata = "{tmp_path}/none.txt"\n[run]\ndir = "{run_dir}"\n{sinks}')
    watch = begin_alerts(load_spec(path), said.append, supervises=True, goes_on=True)
    watch.tell(dataclasses.replace(LOSS, time=time.time()))
    wait_until(lambda: to.exists() and LOSS.what in to.read_text())
    watch.close()
    (line,) = [each for each in said if "slack 1" in each]
    assert "HOOK_OF_NO_NODE" in line and "told nothing" in line
    assert not [each for each in said if "nobody is told" in each]


def begun_beside(folder: Path, said: list[str]) -> RunAlerts:
    path = folder / "task.toml"
    sink = f'[[run.alerts.sinks]]\nkind = "file"\nto = "{folder}/told"\nleast = "info"\n'
    path.write_text(f'[task]\ndata = "{folder}/none.txt"\n[run]\ndir = "{folder}/run"\n{sink}')
    return begin_alerts(load_spec(path), said.append, supervises=True)


def test_a_watch_that_dies_as_often_as_it_is_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "MODULE", "paceline.of_no_name")
    said = list[str]()
    watch = begun_beside(tmp_path, said)
    wait_until(lambda: any("nobody is told" in each for each in said))
    watch.close()
    what = "alert    the watch has ended with 1 while the run goes on"
    assert said == [*[f"{what}: another one takes its place"] * 2, f"{what}: nobody is told of it"]


def test_a_watch_that_is_killed_is_replaced_and_nothing_is_told_twice_or_lost(tmp_path: Path) -> None:
    """As where the system is out of memory and takes the watch: what happens later is told all the same."""
    run_dir, said = tmp_path / "run", list[str]()

    def told() -> list[tuple[str, str]]:
        lines = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
        alerts = [json.loads(line) for line in lines]
        return [(each["state"], each["title"]) for each in alerts if each["rule"] == "rank_down"]

    watch = begun_beside(tmp_path, said)
    write(run_dir, started(), step(7, time.time()))
    watch.tell(dataclasses.replace(LOSS, time=time.time()))
    wait_until(lambda: told() == [("firing", LOSS.what)])
    assert isinstance(watch, _BesideProcess)
    watch._process.kill()
    wait_until(lambda: any("another one takes its place" in each for each in said))
    write(run_dir, recovery(time.time()))
    wait_until(lambda: len(told()) == 2)
    watch.tell(dataclasses.replace(LOSS, what="rank 1 was lost", time=time.time()))
    wait_until(lambda: len(told()) == 3)
    watch.close()
    assert told() == [("firing", LOSS.what), ("resolved", LOSS.what), ("firing", "rank 1 was lost")]
    assert sum("watch has ended" in each for each in said) == 1

"""The word that a peer has gone ends the groups of a world, and what fails then is no failure of its own."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from runs import wait_until
from survive_runs import training
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here

from paceline.checkpoint import take_snapshot
from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.record.recorder import is_echo
from paceline.run.survive import listener
from paceline.run.survive.last_update import LastUpdate
from paceline.run.survive.listener import (
    holds_update,
    listen_for_abort,
    refuse_ended_groups,
    stop_listening,
    was_aborted,
    watch_updates,
)
from paceline.run.survive.survivor import is_lost_peer
from paceline.spec.layout import Layout
from paceline.supervise.control import ABORT_NAME, CONTROL_VARIABLE
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.supervisor import ERROR_FOLDER

# What torch 2.13 says where a collective begins after its group was ended beside it, whatever was under way.
NO_GROUP = ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


@pytest.mark.parametrize("node", ["1", None], ids=["of a node", "on one machine"])
def test_what_fails_after_the_groups_were_ended_is_an_echo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str | None
) -> None:
    """Also on one machine, where gloo sees each end by itself but for some of those in a save (2 of 300 faults)."""
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    given = ((ERROR_FOLDER, str(tmp_path)), (CONTROL_VARIABLE, "control"), *([(NODE_VARIABLE, node)] if node else []))
    for name, value in given:
        monkeypatch.setenv(name, value)
    listen_for_abort(torch.device("cpu"))
    try:
        assert not is_echo(NO_GROUP) and not is_lost_peer(NO_GROUP), "an error of the run's own"
        (tmp_path / ABORT_NAME).touch()
        wait_until(was_aborted)
        assert is_echo(NO_GROUP) and is_lost_peer(NO_GROUP)
        assert not is_lost_peer(ConfigError("a", "b", "c")) and not is_lost_peer(KeyboardInterrupt())
    finally:
        stop_listening()
    assert not is_lost_peer(NO_GROUP), "the world is left"


def listen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ((ERROR_FOLDER, str(folder)), (CONTROL_VARIABLE, "control"), (NODE_VARIABLE, "1")):
        monkeypatch.setenv(name, value)
    listen_for_abort(torch.device("cpu"))


def test_a_step_whose_sums_were_ended_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's collectives that are aborted raise nothing: the host goes on with what they had come to."""
    task, plan, world = decoder_task(), plan_of(Layout(), precision="fp64"), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    batch = BatchStream(task.data, task.seed, plan, 0, world.device).at(0)
    before = [weight.detach().clone() for weight in built.model.parameters()]
    listen(tmp_path, monkeypatch)
    try:
        refuse_ended_groups()
        (tmp_path / ABORT_NAME).touch()
        wait_until(was_aborted)
        with pytest.raises(RuntimeError, match="a peer has gone") as raised:
            built.stepper.step(batch, 1e-3)
        assert is_echo(raised.value) and built.stepper.is_whole
    finally:
        stop_listening()
    assert all(torch.equal(now, then) for now, then in zip(built.model.parameters(), before, strict=True))
    assert is_echo(raised.value), "of the world that was left, also by its own kind"
    built.stepper.step(batch, 1e-3)


def test_a_save_that_needs_a_rank_that_is_gone_is_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may wait for a peer whose own has given up and which has shut nothing: until groups were ended.

    On one machine that is seconds of an idle one; of 300 faults on a busy machine a few took 13 to 20 s so.
    """
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    run, ends = training(tmp_path / "run"), threading.Event()
    for name, value in ((ERROR_FOLDER, str(tmp_path)), (CONTROL_VARIABLE, "control")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(listener, "ON_ONE_MACHINE_SECONDS", math.inf)
    listen_for_abort(torch.device("cpu"))
    taken = take_snapshot(2, {"weight": torch.zeros(3)}, {})
    staged = SimpleNamespace(step=2, device_seconds=0.0, arrived=lambda: taken)
    to = SaveTo(tmp_path / "to", 1, saver=lambda taken, group: cast(Any, ends.wait()))
    flight = run._keeper._flight = SaveInFlight([to], staged, None, limit_seconds=1.0)
    try:
        (tmp_path / ABORT_NAME).touch()
        with pytest.raises(RuntimeError, match="the save of step 2 with it") as raised:
            run._keeper._settled(run.world, 4)
        assert is_lost_peer(raised.value) and not was_aborted() and flight.is_running
    finally:
        stop_listening()
        ends.set()


class Passed:
    """An event of a device that has passed it, or never does."""

    def __init__(self, has: bool) -> None:
        self.has = has

    def query(self) -> bool:
        return self.has


@pytest.mark.parametrize("made", [True, False])
def test_an_update_that_the_device_had_not_made_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Once groups are ended, a collective within an update ends too: what was so before is what counts."""
    updates, end = LastUpdate(torch.device("cpu")), Passed(made)
    assert holds_update(updates), "on a CPU an update is made when the host has made it"
    monkeypatch.setattr(LastUpdate.is_made, "__defaults__", (0.0,))
    updates._end = end
    assert holds_update(updates) == made
    listen(tmp_path, monkeypatch)
    try:
        watch_updates(updates)
        (tmp_path / ABORT_NAME).touch()
        wait_until(was_aborted)
        end.has = True
        assert holds_update(updates) == made
    finally:
        stop_listening()


def test_an_update_that_is_launched_as_groups_are_ended_is_not_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener had asked for the update before, which was made, and the host went on to the end of this one."""

    class Event(Passed):
        def __init__(self) -> None:
            super().__init__(True)  # one that is not recorded yet counts as passed

        def record(self) -> None:
            assert updates._end is not self, "another thread would take it for an update that is made"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    updates = LastUpdate(torch.device("cuda"))
    updates.launched()
    monkeypatch.setattr(listener, "abort_groups", updates.launched)
    listen(tmp_path, monkeypatch)
    try:
        watch_updates(updates)
        assert holds_update(updates)
        (tmp_path / ABORT_NAME).touch()
        wait_until(lambda: was_aborted() and updates.launches == 2)
        assert not holds_update(updates)
    finally:
        stop_listening()

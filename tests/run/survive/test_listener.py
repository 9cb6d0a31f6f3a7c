"""The word that a peer has gone ends the groups of a world, and what fails then is no failure of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import wait_until

from paceline.errors import ConfigError
from paceline.run.record.recorder import is_echo
from paceline.run.survive.listener import listen_for_abort, stop_listening, was_aborted
from paceline.run.survive.survivor import is_lost_peer
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

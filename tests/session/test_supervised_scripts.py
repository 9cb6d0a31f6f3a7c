"""A process that supervises the ranks of a script is a long one: its garbage is collected."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests_shared import decoder_task

import paceline as library
from paceline.session import run as session_run


@pytest.mark.parametrize("by", ["start_script_again", "attend_script"])
def test_the_collector_is_on_while_a_script_is_supervised(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rested from the constructor on, which supervises until the run has ended."""
    seen = list[bool]()

    def supervises(*given: Any) -> None:
        seen.append(gc.isenabled())
        raise SystemExit(0)

    brief = SimpleNamespace(plan=SimpleNamespace(layout=SimpleNamespace(devices=2)))
    monkeypatch.setattr(session_run, "place_here", lambda environ: None if by == "start_script_again" else brief)
    monkeypatch.setattr(session_run, "planned_brief", lambda *given, **more: brief)
    monkeypatch.setattr(session_run, by, supervises)
    with pytest.raises(SystemExit):
        library.Run(decoder_task(), run={"dir": str(tmp_path / "run")})
    assert seen == [True]

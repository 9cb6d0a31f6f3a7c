"""What a process tells of its place once its run is over: a supervisor lets it take its time then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from survive_runs import training

from paceline.run.loop.training import Training
from paceline.spec.survive.phases import ENDED


def heard(run: Training) -> list[str]:
    """Return the phases that a run tells, as they come."""
    told = list[str]()
    run._points._heart = SimpleNamespace(beat=lambda phase, step: told.append(phase))  # type: ignore[assignment]
    run._points._told = (run._points._heart.beat,)
    return told


def test_a_loop_that_is_left_is_over_and_so_it_stays_after_a_save(tmp_path: Path) -> None:
    """It counted as the loop's own code, or as a save, of which ten minutes are the limit."""
    run = training(tmp_path / "run")
    told = heard(run)
    for batch in run:
        run.step(batch)
        where = told[-1]
        run.save()
        assert told[-2:] == ["save", where], "between two steps too it is back where it was"
        break
    assert told[-1] == ENDED
    run.save()
    assert told[-2:] == ["save", ENDED]


def test_a_run_is_over_before_its_last_upload_for_which_peers_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training(tmp_path / "run")
    told, at_the_end = heard(run), list[str]()
    close = run._keeper.close
    monkeypatch.setattr(run._keeper, "close", lambda world: (at_the_end.append(told[-1]), close(world)))
    for batch in run:
        run.step(batch)
    assert at_the_end == [ENDED] and told[-1] == ENDED

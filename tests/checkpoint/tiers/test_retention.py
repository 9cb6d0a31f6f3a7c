"""Which checkpoints stay: by number, by age, by held-out loss; never fewer than the newest."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from checkpoint_samples import laid_out

from paceline.checkpoint import save_checkpoint
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.tiers.retention import HELD_OUT, Retention, best_first

NOW = datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)


def checkpoint(step: int, hours_old: float, loss: object = None) -> tuple[Path, Manifest]:
    created = (NOW - datetime.timedelta(hours=hours_old)).isoformat()
    extra = {} if loss is None else {HELD_OUT: {"step": step, "loss": loss}}
    return Path(str(step)), Manifest(step, step, created, 1, {}, extra)


SAVED = [checkpoint(6, 1), checkpoint(5, 2, 3.0), checkpoint(4, 3), checkpoint(3, 4, 1.0), checkpoint(2, 5, 2.0)]


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(1), "6"),
        (Retention(3), "654"),
        (Retention(3, seconds=2.5 * 3600), "65"),
        (Retention(3, seconds=60.0), "6"),
        (Retention(1, best=1), "63"),
        (Retention(2, best=2), "6532"),
        (Retention(1, best=9), "6532"),
        (Retention(1, seconds=1.0, best=1), "63"),
    ],
)
def test_what_stays(retention: Retention, stay: str) -> None:
    doomed = {str(path) for path in retention.doomed(SAVED, NOW)}
    assert "".join(str(path) for path, _ in SAVED if str(path) not in doomed) == stay


@pytest.mark.parametrize("loss", [None, "low", float("nan"), float("inf"), {}, []])
def test_a_loss_that_is_none_wins_nothing(loss: object) -> None:
    assert best_first([checkpoint(1, 0, loss)[1]]) == []
    assert Retention(1, best=3).doomed([checkpoint(2, 0), checkpoint(1, 0, loss)], NOW) == [Path("1")]


def test_the_best_is_of_the_metric_of_the_newest_evaluation() -> None:
    def of(step: int, metric: str, score: float) -> Manifest:
        extra = {HELD_OUT: {"step": step, "loss": 1.0, "metric": metric, "score": score}}
        return Manifest(step, step, NOW.isoformat(), 1, {}, extra)

    assert best_first(
        [checkpoint(6, 0)[1], of(5, "accuracy", -0.8), of(4, "accuracy", -0.9), of(3, "f1_macro", -0.99)]
    ) == [2, 1]
    assert best_first([of(5, "accuracy", -0.9), of(4, "accuracy", -0.9)]) == [0, 1], "of equal ones the newest"


@pytest.mark.parametrize("created", ["yesterday", "2026-01-01T00:00:00", ""])
def test_a_checkpoint_of_unknown_age_is_not_old(created: str) -> None:
    unknown = (Path("1"), Manifest(1, 1, created, 1, {}, {}))
    assert not Retention(2, seconds=1.0).doomed([checkpoint(2, 0), unknown], NOW)


def test_the_best_stay_on_disk(tmp_path: Path) -> None:
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), 1):
        extra = {HELD_OUT: {"step": step, "loss": loss}}
        save_checkpoint(tmp_path, step, laid_out("plain"), extra, keep_last=Retention(1, best=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (2, 3, 4)]

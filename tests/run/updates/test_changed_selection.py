"""Data that change under each way of selecting samples: what is trained on is another, and a resume says so.

By a score that stands beside a text, by equal documents that are left out, by loss while training, by damaged samples
that are skipped. What changes nothing of what is read is no change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import plan_of

from paceline.errors import ConfigError
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.supervise.told.brief import Brief
from paceline.task.data.prepare.prepare import prepare

MODEL = ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32)
STEPS, BY_LOSS = 6, SelectionSpec(by="loss", candidates=2)
Lines = list[Any]


def lines() -> Lines:
    """Return thirty documents of which every third one has a low score."""
    return [{"text": f"{number} {'word ' * 20}", "score": 0.1 if number % 3 == 0 else 0.9} for number in range(30)]


def write(folder: Path, found: Sequence[Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in found))
    return path


def with_score(number: int, score: float) -> Callable[[Lines], Lines]:
    return lambda found: [{**each, "score": score} if at == number else each for at, each in enumerate(found)]


def with_text(number: int, text: str) -> Callable[[Lines], Lines]:
    return lambda found: [{**each, "text": text} if at == number else each for at, each in enumerate(found)]


def source_of(folder: Path, found: Lines, kind: str) -> DataSpec:
    """Return the data of a way of selecting, written anew."""
    path = write(folder, found)
    data = DataSpec(str(path), seq_len=16, validation_fraction=0.0, cache_dir=str(folder / "cache"))
    if kind == "score":
        return DataSpec(str(path), seq_len=16, validation_fraction=0.0, cache_dir=data.cache_dir, score_min=0.5)
    if kind == "damaged":
        return DataSpec(str(path), seq_len=16, validation_fraction=0.0, cache_dir=data.cache_dir, on_bad="skip")
    if kind == "equal":  # into a folder of its own each time, at one place: as whoever prepares anew
        shards = folder / "shards"
        for file in shards.glob("*") if shards.exists() else ():
            file.unlink()
        prepare(data, shards, dedup=True)
        return DataSpec(str(shards), seq_len=16, validation_fraction=0.0, cache_dir=data.cache_dir)
    return data


def train(folder: Path, data: DataSpec, until: int, selection: SelectionSpec, **run: str) -> None:
    """Start the run or go on with it, and leave it after a step with a checkpoint."""
    spec = Spec(
        task=Task(model=MODEL, data=data, seed=3, selection=selection),
        cluster=ClusterSpec(learn=False),
        run=RunSpec(checkpoint_every=None, evaluate_every=None, **run),
    )
    brief = Brief(plan_of(Layout(), 4, 4), STEPS, 16, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), folder / "run")
    for batch in training:
        training.step(batch)
        if training.progress.step >= until:
            training.save()
            break


CHANGES: dict[str, tuple[str, SelectionSpec, Callable[[Lines], Lines]]] = {
    "a score falls below the least": ("score", SelectionSpec(), with_score(1, 0.2)),
    "a score rises above the least": ("score", SelectionSpec(), with_score(0, 0.7)),
    "one is left out and another comes in": (
        "score", SelectionSpec(), lambda found: with_score(0, 0.7)(with_score(1, 0.2)(found))
    ),
    "a text that is wanted": ("score", SelectionSpec(), with_text(1, "1 " + "turn " * 20)),
    "a copy that is one no more": ("equal", SelectionSpec(), lambda found: [*found[:-1], {"text": "none of them"}]),
    "one that becomes a copy": ("equal", SelectionSpec(), with_text(5, lines()[4]["text"])),
    "what losses are of": ("all", BY_LOSS, with_text(7, "7 " + "turn " * 20)),
    "a damaged line is mended": ("damaged", SelectionSpec(), lambda found: [*found[:-1], {"text": "mended"}]),
    "a line is damaged": ("damaged", SelectionSpec(), lambda found: [found[0], '{"text": ', *found[2:]]),
}  # fmt: skip
LAST: dict[str, Any] = {"equal": lines()[4], "damaged": '{"text": "cut'}


def of_kind(kind: str) -> Lines:
    """Return the documents of a way of selecting, before they change."""
    return [*lines(), LAST[kind]] if kind in LAST else lines()


@pytest.mark.parametrize("what", CHANGES)
def test_another_selection_is_told_and_accepted_by_its_fingerprint(tmp_path: Path, what: str) -> None:
    kind, selection, change = CHANGES[what]
    train(tmp_path, source_of(tmp_path, of_kind(kind), kind), 2, selection)
    now = source_of(tmp_path, change(of_kind(kind)), kind)
    with pytest.raises(ConfigError, match="trained on other data") as refused:
        train(tmp_path, now, 3, selection)
    assert "then and" in refused.value.because or "with other content" in refused.value.because
    accepted = refused.value.because.partition("is now ")[2][:32]
    train(tmp_path, now, 3, selection, accept_data=accepted)


UNCHANGED: dict[str, tuple[str, Callable[[Lines], Lines]]] = {
    "scores that choose the same": ("score", lambda found: with_score(0, 0.3)(with_score(1, 0.6)(found))),
    "the text of one that is not wanted": ("score", with_text(0, "quite another")),
    "one copy more": ("equal", lambda found: [*found, found[7]]),
    "damage of another kind": ("damaged", lambda found: [*found[:-1], "[1, 2"]),
}


@pytest.mark.parametrize("what", UNCHANGED)
def test_the_same_selection_goes_on(tmp_path: Path, what: str) -> None:
    kind, change = UNCHANGED[what]
    train(tmp_path, source_of(tmp_path, of_kind(kind), kind), 2, SelectionSpec())
    train(tmp_path, source_of(tmp_path, change(of_kind(kind)), kind), 3, SelectionSpec())
    assert [each["step"] for each in read_journal(tmp_path / "run") if each["kind"] == "step"] == [1, 2, 3]


def test_another_least_score_is_another_task(tmp_path: Path) -> None:
    data = source_of(tmp_path, lines(), "score")
    train(tmp_path, data, 2, SelectionSpec())
    other = DataSpec(data.source, seq_len=16, validation_fraction=0.0, cache_dir=data.cache_dir, score_min=0.05)
    with pytest.raises(ConfigError, match=r"score_min|trained on other data"):
        train(tmp_path, other, 3, SelectionSpec())

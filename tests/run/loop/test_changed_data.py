"""Data that change under a run: what changed is said, and nothing goes on unless it is accepted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import plan_of

from paceline.checkpoint import read_manifest
from paceline.errors import ConfigError
from paceline.run.loop import in_world
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.updates.growth import followed_before
from paceline.run.updates.selection import chosen_before
from paceline.spec.cluster import ClusterSpec
from paceline.spec.data.mix import MixSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.supervise.told.brief import Brief
from paceline.task.data import described
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.rows import kept_rows, packed_source

STEPS = 6
MODEL = ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32)


def write(folder: Path, name: str, documents: int) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(f'{{"text": "{name} {number} {"word " * 20}"}}' for number in range(documents)))
    return str(path)


def train(
    folder: Path,
    until: int,
    saves: bool = True,
    data: DataSpec | None = None,
    name: str = "run",
    after_first: Callable[[], None] | None = None,
    **run: str,
) -> list[float]:
    """Start the run or go on with it, leave it after a step with a checkpoint, or none, and return its losses.

    `data` are by default a mixture of two files. `after_first` is called after the start's first step.
    """
    if data is None:
        parts = tuple(MixSpec(str(folder / f"{part}.jsonl"), name=part) for part in ("first", "second"))
        data = DataSpec(seq_len=24, rows="packed", validation_fraction=0.0, cache_dir=str(folder / "cache"), mix=parts)
    spec = Spec(
        task=Task(model=MODEL, data=data, seed=3),
        cluster=ClusterSpec(learn=False),
        run=RunSpec(checkpoint_every=None, evaluate_every=None, **run),
    )
    brief = Brief(plan_of(Layout(), 4, 4), STEPS, 24, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), folder / name)
    losses: list[float] = []
    for batch in training:
        losses.append(training.step(batch).loss)
        if after_first is not None and len(losses) == 1:
            after_first()
        if training.progress.step >= until:
            if saves:
                training.save()
            break
    return losses


def test_changed_data_are_refused_in_words_and_accepted_by_their_fingerprint(tmp_path: Path) -> None:
    write(tmp_path, "first", 30)
    write(tmp_path, "second", 20)
    train(tmp_path, 2)
    train(tmp_path, 4)  # the same data: nothing is said
    write(tmp_path, "second", 35)
    with pytest.raises(ConfigError, match="trained on other data") as refused:
        train(tmp_path, 5)
    assert "'second': 20 documents then and 35 now" in refused.value.because and "'first'" not in refused.value.because
    now = refused.value.because.partition("is now ")[2][:32]
    assert f"run.accept_data={now}" in refused.value.try_
    with pytest.raises(ConfigError, match="trained on other data"):
        train(tmp_path, 5, accept_data="another")
    train(tmp_path, STEPS, accept_data=now)
    told = [record["because"] for record in read_journal(tmp_path / "run") if record.get("what") == "resume"]
    assert any("the data changed" in each and "35 now" in each for each in told)
    given = [record["given"] for record in read_journal(tmp_path / "run") if record["kind"] == "sources"]
    assert given[-1]["first"]["samples"] + given[-1]["second"]["samples"] == 4 * STEPS


def test_shards_that_grow_are_other_data_for_the_next_start_and_none_for_one_that_runs(tmp_path: Path) -> None:
    """A run reads the shards that were there when it began. What was appended is refused in words, and accepted."""
    source = DataSpec(write(tmp_path, "first", 40), validation_fraction=0.0)
    prepare(source, tmp_path / "shards", part_bytes=1_000)
    shards = DataSpec(str(tmp_path / "shards"), seq_len=24, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    plain = train(tmp_path, STEPS, saves=False, data=shards, name="plain")
    left = train(tmp_path, 2, data=shards)
    more = dataclasses.replace(source, source=write(tmp_path, "second", 25))

    def append() -> None:
        prepare(more, tmp_path / "shards", append=True, part_bytes=1_000)

    running = train(tmp_path, STEPS, saves=False, data=shards, name="running", after_first=append)
    assert running == plain and left == plain[:2]
    with pytest.raises(ConfigError, match="trained on other data") as refused:
        train(tmp_path, 4, data=shards)
    assert "40 documents then and 65 now" in refused.value.because
    now = refused.value.because.partition("is now ")[2][:32]
    went_on = train(tmp_path, STEPS, data=shards, accept_data=now)
    assert len(went_on) == STEPS - 2, "it goes on at the position where it was left"
    assert went_on != plain[2:], "with the samples that stand there in an order of all 65"
    grown = train(tmp_path, STEPS, saves=False, data=shards, name="grown")
    assert grown[:2] != left, "as a run from the start on all of them reads"


def test_steps_on_other_data_are_nothing_that_a_later_start_is_held_to(tmp_path: Path) -> None:
    """The first start came to step 5 and saved step 2. The next one accepts other data and saves step 3, so that what
    the journal has of steps 4 and 5 is of data that are no more: it is not what the third one has to repeat."""
    write(tmp_path, "first", 30)
    write(tmp_path, "second", 20)
    train(tmp_path, 2)
    train(tmp_path, 5, saves=False)
    write(tmp_path, "second", 35)
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, 3)
    now = refused.value.because.partition("is now ")[2][:32]
    train(tmp_path, 3, accept_data=now)
    train(tmp_path, 4, saves=False, accept_data=now)
    found = {each["attempt"]: each["facts"]["fingerprint"] for each in read_journal(tmp_path / "run")
             if each["kind"] == "run_started"}  # fmt: skip
    assert [found[attempt] == now for attempt in sorted(found)] == [False, False, True, True]
    again = train(tmp_path, STEPS, accept_data=now)
    assert len(again) == 3, "steps 4 to 6, the first of which is held against the third start's"
    replayed = [each for each in read_journal(tmp_path / "run") if each["kind"] == "replay"]
    assert [each["step"] for each in replayed] == [4] or [each["step"] for each in replayed] == [3, 4]


def test_what_was_decided_on_other_data_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()

    def start(number: int, fingerprint: str | None, mask: str, grown: int) -> None:
        facts = {} if fingerprint is None else {"fingerprint": fingerprint}
        positions = [(1, 0, 4), (2, 4, 8), (3, 8, 8 + grown)]
        steps = [{"kind": "step", "step": step, "position_before": before, "position_after": after}
                 for step, before, after in positions]  # fmt: skip
        chosen = {"kind": "selection", "step": 2, "position": 4, "candidates": 8, "chosen": mask}
        grows = {"kind": "decision", "what": "global_batch", "from": grown, "to": 2 * grown,
                 "evidence": {"rule": "noise", "step": 3, "position": 8}}  # fmt: skip
        lines = [{"kind": "run_started", "facts": facts}, *steps, chosen, grows]
        (tmp_path / "journal" / f"{number:04}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    start(1, None, "aa", 4)  # of an earlier release, which does not say
    start(2, "old", "bb", 16)
    assert chosen_before(tmp_path, "new") == {(2, 4, 8): "aa"}
    assert chosen_before(tmp_path, "old") == chosen_before(tmp_path) == {(2, 4, 8): "bb"}
    assert followed_before(tmp_path, 0, "new") == {(1, 0): 4, (2, 4): 4, (3, 8): 8}
    assert followed_before(tmp_path, 1, "old") == {(2, 4): 16, (3, 8): 32}


def test_the_state_of_the_data_is_a_fingerprint_a_seed_and_a_position_whatever_they_are(tmp_path: Path) -> None:
    """Under 300 bytes, of which the batches of a resume follow; nothing else of a checkpoint grows with the data."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for documents in (30, 900):
        folder = tmp_path / str(documents)
        folder.mkdir()
        for name in ("first", "second"):
            write(folder, name, documents)
        for step in (2, 4):
            losses = train(folder, step)
            newest = max((folder / "run" / "checkpoints").glob("step-*"), key=lambda path: path.name)
            found[documents, step] = dict(read_manifest(newest).extra)
        assert len(losses) == 2, "it went on where it was left"
    for (documents, step), extra in found.items():
        state = {"fingerprint": extra["data_fingerprint"], "seed": extra["spec"]["task"]["seed"],
                 "position": extra["progress"]["position"]}  # fmt: skip
        assert state["seed"] == 3 and state["position"] == 4 * step and len(json.dumps(state)) < 300
        before = found[documents, 2]
        assert {name for name in extra if extra[name] != before[name]} <= {"progress", "guard"}, "no more is kept"
    few, many = (len(json.dumps(found[documents, 4], default=str)) for documents in (30, 900))
    assert abs(many - few) < 40, "a few digits"


def test_a_part_that_changes_in_content_alone_is_named(tmp_path: Path) -> None:
    write(tmp_path, "first", 30)
    second = Path(write(tmp_path, "second", 20))
    train(tmp_path, 2)
    second.write_text(second.read_text().replace("word", "turn"))
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, 3)
    assert "'second': 20 documents" in refused.value.because
    assert "as before, with other content" in refused.value.because


def test_rows_of_another_version_of_the_packing_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The documents are the same: a checkpoint names the version; one from before is known by its fingerprint."""
    write(tmp_path, "first", 30)
    write(tmp_path, "second", 20)
    for names_version in (True, False):
        folder = tmp_path / str(names_version)
        folder.mkdir()
        for name in ("first", "second"):
            (folder / f"{name}.jsonl").write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
        with monkeypatch.context() as patch:
            for module in (packed_source, kept_rows, described):
                patch.setattr(module, "FORMAT", 1)
            if not names_version:
                patch.setattr(in_world, "described", lambda source: without_packing(described.described(source)))
            train(folder, 2)
        with pytest.raises(ConfigError, match="trained on other data") as refused:
            train(folder, 3)
        told = refused.value.because
        assert told.count("version 1 of the packing and are now by version 2") == 2 and "'first': the same doc" in told
        now = told.partition("is now ")[2][:32]
        assert f"run.accept_data={now}" in refused.value.try_
        train(folder, STEPS, accept_data=now)


def without_packing(told: Any) -> Any:
    """Return what an earlier release kept of its data."""
    kept = {name: value for name, value in told.items() if name not in ("packing", "content", "row")}
    return {**kept, "parts": {name: without_packing(part) for name, part in told["parts"].items()}} if (
        "parts" in told) else kept  # fmt: skip


def test_parts_that_come_and_go_are_told_so() -> None:
    first = {"fingerprint": "a", "samples": 3, "tokens": 5, "documents": 1, "content": "x"}
    before, now = {"parts": {"old": first, "both": first}}, {"parts": {"both": first, "new": first}}
    assert described.what_changed(before, now) == (
        "'old': it is no part of the data any more; 'new': it was no part of the data"
    )


def test_what_is_kept_of_a_spec_holds_the_mixture() -> None:
    from paceline.spec.load import dump_toml, parse_spec

    parts = (MixSpec("a", weight=2.0, most_samples=7), MixSpec("b", score_min=0.5))
    spec = Spec(task=Task(data=DataSpec(mix=parts, shuffle="windowed")))
    assert parse_spec(dump_toml(spec)).task == dataclasses.replace(spec.task)

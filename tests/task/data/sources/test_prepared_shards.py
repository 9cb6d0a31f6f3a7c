"""`prepare`: the same shards for any number of workers and after interruptions, with the documents of another walk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import signal
from collections.abc import Collection, Iterator
from concurrent.futures import Future, as_completed
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, DataError, WorkerDied
from paceline.run.loop.sources import open_sets
from paceline.run.process.world import World
from paceline.spec.data.mix import MixSpec
from paceline.spec.task import DataSpec, Task
from paceline.spec.watch.evaluate import EvaluateSpec, HeldOutSetSpec
from paceline.task.data.prepare import prepare as module
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.rows.one_tokenizer import unlike
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.folder import read_index, splits_of
from paceline.task.data.sources.shards.opened import storage_of

PART = 4000


def write_corpus(folder: Path) -> DataSpec:
    """Write text files and a JSONL file of several parts, some documents of both twice."""
    folder.mkdir()
    generator = random.Random(3)
    for number in range(12):
        words = " ".join(generator.choice(["one", "two", "drei", "vier ü"]) for _ in range(60 + 20 * number))
        (folder / f"{number:02}.txt").write_text(words)
    lines = [json.dumps({"text": f"line {generator.randrange(60)} " * generator.randrange(1, 9)}) for _ in range(400)]
    (folder / "many.jsonl").write_text("\n".join(lines) + "\n\n")
    (folder / "twice.txt").write_text((folder / "03.txt").read_text())
    return DataSpec(str(folder), seq_len=32, validation_fraction=0.2, cache_dir=str(folder / ".cache"))


def texts_of(spec: DataSpec) -> list[str]:
    """Return the documents by a walk of the folder that uses nothing of ours."""
    folder, texts = Path(spec.source), []
    for path in sorted(folder.glob("*.*")):
        if path.suffix == ".jsonl":
            texts += [json.loads(line)["text"] for line in path.read_text().splitlines() if line]
        else:
            texts.append(path.read_text())
    return texts


def stored(folder: Path, spec: DataSpec) -> dict[str, list[str]]:
    """Return the documents of each split as they are in the shards."""
    index, storage = read_index(str(folder), storage_of(spec)), storage_of(spec)
    found = {}
    for name, split in splits_of(str(folder), index, storage).items():
        tokens, offsets = split.open()[:], split.offsets()
        found[name] = [bytes(tokens[start : stop - 1].astype(np.uint8)).decode() for start, stop in pairwise(offsets)]
        assert (tokens[offsets[1:] - 1] == 256).all()
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def is_held_out(text: str) -> bool:
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()[:8], "little")
    return value < 0.2 * 2**64


def test_any_number_of_workers_writes_the_same_documents_each_once(tmp_path: Path) -> None:
    spec = write_corpus(tmp_path / "text")
    seen: list[float] = []
    one = prepare(spec, tmp_path / "one", part_bytes=PART, progress=lambda what, share: seen.append(share))
    prepare(spec, tmp_path / "three", workers=3, part_bytes=PART)
    assert content(tmp_path / "one") == content(tmp_path / "three") and not (tmp_path / "one" / ".work").exists()
    assert len(one.index.splits["train"]) > 5, "JSONL is cut"
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 1
    texts, found = texts_of(spec), stored(tmp_path / "one", spec)
    assert found["train"] == [text for text in texts if not is_held_out(text)]
    assert found["validation"] == [text for text in texts if is_held_out(text)]
    card = one.index.card
    assert (card["documents"], card["bytes"]) == (len(texts), sum(len(text.encode()) for text in texts))
    assert card["tokens_per_document"]["longest"] == max(len(text.encode()) for text in texts) + 1
    assert not prepare(spec, tmp_path / "one", part_bytes=PART).made, "what is there is not made again"


def test_of_equal_documents_the_first_is_kept(tmp_path: Path) -> None:
    spec = write_corpus(tmp_path / "text")
    done = prepare(spec, tmp_path / "out", workers=2, dedup=True, part_bytes=PART)
    texts = list(dict.fromkeys(texts_of(spec)))
    found = stored(tmp_path / "out", spec)
    assert found["train"] == [text for text in texts if not is_held_out(text)]
    assert done.index.card["duplicates_removed"] == len(texts_of(spec)) - len(texts) > 50


@pytest.mark.parametrize("dedup", [False, True])
def test_an_interrupted_preparation_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dedup: bool
) -> None:
    spec = write_corpus(tmp_path / "text")
    prepare(spec, tmp_path / "whole", dedup=dedup, part_bytes=PART)
    tokenise, done = module.tokenise, []

    def stop_after_four(job, part):  # type: ignore[no-untyped-def]
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(part.number)
        return tokenise(job, part)

    monkeypatch.setattr(module, "tokenise", stop_after_four)
    with pytest.raises(KeyboardInterrupt):
        prepare(spec, tmp_path / "cut", dedup=dedup, part_bytes=PART)
    assert not (tmp_path / "cut" / "shards.json").exists()
    with pytest.raises(DataError, match=r"no documents|shards|not there"):
        open_sources(DataSpec(f"shards:{tmp_path / 'cut'}", seq_len=32), 7)
    again: list[int] = []
    monkeypatch.setattr(module, "tokenise", lambda job, part: again.append(part.number) or tokenise(job, part))
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*.shard")}
    prepare(spec, tmp_path / "cut", dedup=dedup, part_bytes=PART)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    kept = {path for path, time in written.items() if path.exists() and path.stat().st_mtime_ns == time}
    assert len(kept) >= 4, "what was done is not done again"
    with pytest.raises(ConfigError, match="holds other shards"):
        prepare(spec, tmp_path / "cut", dedup=not dedup, part_bytes=PART)


def test_shards_are_added_and_those_that_are_there_stay(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "text"), tmp_path / "more"
    second.mkdir()
    (second / "new.txt").write_text("something new " * 100)
    more = DataSpec(str(second), validation_fraction=0.0)
    with pytest.raises(ConfigError, match="holds no shards"):
        prepare(first, tmp_path / "out", append=True, part_bytes=PART)
    before = prepare(first, tmp_path / "out", part_bytes=PART)
    kept = content(tmp_path / "out")
    after = prepare(more, tmp_path / "out", append=True, part_bytes=PART)
    now = content(tmp_path / "out")
    assert all(now[name] == kept[name] for name in kept if name.endswith(".shard"))
    assert stored(tmp_path / "out", first)["train"][-1] == "something new " * 100
    assert after.index.fingerprint != before.index.fingerprint
    assert after.index.card["documents"] == before.index.card["documents"] + 1
    assert not prepare(more, tmp_path / "out", append=True, part_bytes=PART).made


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_folder_holds_is_not_added_to_it_again(tmp_path: Path, workers: int) -> None:
    """A corpus that has grown: its new documents alone are added, whichever split the others are in."""
    spec = write_corpus(tmp_path / "text")
    before = prepare(spec, tmp_path / "out", dedup=True, part_bytes=PART)
    texts = texts_of(spec)
    lines = [json.dumps({"text": f"{number} new"}) for number in (1, 2, 1)]
    (tmp_path / "text" / "new.jsonl").write_text("\n".join(lines))
    after = prepare(spec, tmp_path / "out", workers=workers, dedup=True, append=True, part_bytes=PART)
    found = stored(tmp_path / "out", spec)
    assert sorted(found["train"] + found["validation"]) == sorted({*texts, "1 new", "2 new"})
    assert after.index.card["documents"] == before.index.card["documents"] + 2 and after.index.card["dedup"]
    removed = after.index.card["duplicates_removed"] - before.index.card["duplicates_removed"]
    assert removed == len(texts) + 1, "the rest was there"
    assert after.index.card["bytes"] == before.index.card["bytes"] + 2 * len("1 new")
    (tmp_path / "text" / "again.jsonl").write_text(json.dumps({"text": "1 new"}))
    nothing = prepare(spec, tmp_path / "out", workers=workers, dedup=True, append=True, part_bytes=PART)
    assert nothing.index.fingerprint == after.index.fingerprint, "nothing was new"
    prepare(spec, tmp_path / "twice", part_bytes=PART)
    (tmp_path / "text" / "new.jsonl").write_text(json.dumps({"text": "3 new"}))
    mixed = prepare(spec, tmp_path / "twice", dedup=True, append=True, part_bytes=PART).index.card
    assert not mixed["dedup"], "documents that were there are still there twice"


def test_a_process_that_is_ended_from_outside_is_told_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_corpus(tmp_path / "text")
    prepare(spec, tmp_path / "whole", part_bytes=PART)

    def ended(coming: Collection[Future[object]]) -> Iterator[Future[object]]:
        """End a worker before anything is waited for: on a loaded machine all may be done when one part is told."""
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
        return as_completed(coming)

    monkeypatch.setattr(module, "as_completed", ended)
    with pytest.raises(WorkerDied, match="ended by SIGKILL at tokenising") as told:
        prepare(spec, tmp_path / "cut", workers=2, part_bytes=PART)
    assert told.value.exit_code == 128 + signal.SIGKILL and "start the same command again" in told.value.try_
    monkeypatch.undo()
    prepare(spec, tmp_path / "cut", workers=2, part_bytes=PART)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_a_damaged_document_ends_it_or_is_left_out_and_counted(tmp_path: Path) -> None:
    spec = write_corpus(tmp_path / "text")
    lines = (tmp_path / "text" / "many.jsonl").read_text().splitlines()
    lines[250] = '{"text": 5'
    (tmp_path / "text" / "many.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"many.jsonl, byte [\d,]+ is not JSON"):
        prepare(spec, tmp_path / "out", workers=2, part_bytes=PART)
    skipping = DataSpec(spec.source, validation_fraction=0.2, on_bad="skip")
    with pytest.raises(ConfigError, match="unfinished work of another"):
        prepare(skipping, tmp_path / "out", part_bytes=PART)
    card = prepare(skipping, tmp_path / "other", part_bytes=PART).index.card
    assert card["left_out"] == 1 and "is not JSON" in card["left_out_first"]


def test_a_tokenizer_is_learned_once_and_travels_with_the_shards(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    spec = write_corpus(tmp_path / "text")
    learned = DataSpec(spec.source, tokenizer="bpe", vocab=300, validation_fraction=0.2, seq_len=16)
    done = prepare(learned, tmp_path / "out", workers=2, part_bytes=PART)
    train, _ = open_sources(DataSpec(str(tmp_path / "out"), seq_len=16), 7)
    assert train.vocab == done.index.vocab <= 300 and done.index.tokenizer == "bpe"
    from paceline.task.data.sources.tokenizer import from_json

    tokenizer = from_json((tmp_path / "out" / "tokenizer.json").read_text(), "x")
    offsets = train.split.offsets()
    text = tokenizer.decode(train.split.open()[0 : int(offsets[1])])
    assert text == next(text for text in texts_of(spec) if not is_held_out(text))


@pytest.mark.parametrize("other", ["same", "other options"])
def test_a_preparation_that_ends_as_another_begins_is_not_written_over(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no index when the second one looked, and held no lock any more when that took it."""
    spec, out, alone = write_corpus(tmp_path / "text"), tmp_path / "out", module._alone
    written: dict[str, tuple[int, bytes]] = {}

    def state() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir() if path.is_file()}

    def late(folder: Path) -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(module, "_alone", alone)
        prepare(spec, out, part_bytes=PART)
        written.update(state())
        return alone(folder)

    monkeypatch.setattr(module, "_alone", late)
    if other == "same":
        assert not prepare(spec, out, part_bytes=PART).made
    else:
        with pytest.raises(ConfigError, match="holds other shards"):
            prepare(spec, out, part_bytes=PART, dedup=True)
    assert state() == written and not (out / ".work").exists()


def test_a_lock_that_its_last_holder_has_taken_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = module.fcntl.flock

    def late(stream: IO[str], how: int) -> None:
        flock(stream, how)
        if how & module.fcntl.LOCK_EX:
            Path(stream.name).unlink()  # as the end of the preparation does that had held it

    monkeypatch.setattr(module.fcntl, "flock", late)
    with pytest.raises(module.PreparationBusy):
        prepare(write_corpus(tmp_path / "text"), tmp_path / "out", part_bytes=PART)


def test_one_that_begins_while_another_takes_its_work_away_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is gone before the folder is: whoever makes both anew has nothing of theirs taken away."""
    work, unlink = tmp_path / "out" / ".work", os.unlink

    def late(path: str | Path, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if Path(path).name == "lock":
            for name in ("lock", "job", "receipt"):
                (work / name).write_text("another's", encoding="utf-8")

    with monkeypatch.context() as during:
        during.setattr(os, "unlink", late)
        assert prepare(write_corpus(tmp_path / "text"), tmp_path / "out", part_bytes=PART).made
    assert {path.name: path.read_text(encoding="utf-8") for path in work.iterdir()} == dict.fromkeys(
        ("lock", "job", "receipt"), "another's"
    )


def test_a_folder_of_work_that_goes_before_its_lock_is_made_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, mkdir = write_corpus(tmp_path / "text"), Path.mkdir
    (tmp_path / "out").mkdir()

    def late(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)  # type: ignore[arg-type]
        if path.name == ".work":
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", late)
    with pytest.raises(module.PreparationBusy):
        prepare(spec, tmp_path / "out", part_bytes=PART)


def test_as_many_bytes_are_prepared_as_are_asked_for(tmp_path: Path) -> None:
    spec, most, wanted = write_corpus(tmp_path / "text"), 5_000, list[str]()
    for text in texts_of(spec):
        left = most - sum(len(each.encode()) for each in wanted)
        if left > 0:
            wanted.append(text.encode()[:left].decode("utf-8", "ignore"))
    spec = replace(spec, max_bytes=most)
    assert prepare(spec, tmp_path / "out", part_bytes=PART).made and len(wanted) < len(texts_of(spec))
    assert sorted(text for each in stored(tmp_path / "out", spec).values() for text in each) == sorted(wanted)
    assert not prepare(spec, tmp_path / "out", part_bytes=PART).made
    with pytest.raises(ConfigError, match="holds other shards"):
        prepare(replace(spec, max_bytes=0), tmp_path / "out", part_bytes=PART)


def test_a_small_corpus_holds_out_one_document_as_the_cache_does_and_a_mixture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(6):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number}")
    spec = DataSpec(str(tmp_path / "text"), validation_fraction=0.02, seq_len=2, cache_dir=str(tmp_path / "cache"))
    cached = open_sources(spec, 7)[1].split  # type: ignore[union-attr]
    done = prepare(spec, tmp_path / "out", part_bytes=20)
    assert done.index.documents("validation") == cached.documents == 1
    held_out = splits_of(str(done.folder), done.index, storage_of(spec))["validation"].open()
    assert np.array_equal(held_out[:], cached.open())
    assert not prepare(spec, tmp_path / "out", part_bytes=20).made
    assert not any(prepare(replace(spec, validation_fraction=0.0), tmp_path / "all").index.splits["validation"])
    for late in ({"score_min": 0.0}, {"score_max": 0.0}, {"max_bytes": 9}, {"include": ("*.txt",)}):
        with pytest.raises(ConfigError, match="tokens that are made already"):
            open_sources(DataSpec(str(done.folder), seq_len=2, **late), 7)  # type: ignore[arg-type]
    mixed = replace(spec, mix=(MixSpec(spec.source), MixSpec(spec.source, name="again")))
    with pytest.raises(ConfigError, match="prepare of a mixture"):
        prepare(mixed, tmp_path / "mixed")


def test_sources_of_a_mixture_and_a_named_tokenizer_are_one(tmp_path: Path) -> None:
    """Numbers of shards by one tokenizer were learnt as those of another's texts."""
    pytest.importorskip("tokenizers")
    spec = write_corpus(tmp_path / "text")
    learned = replace(spec, tokenizer="bpe", vocab=280, seq_len=16, cache_dir=str(tmp_path / "cache"))
    folder = Path(prepare(learned, tmp_path / "bpe").folder)
    told = json.loads((folder / "tokenizer.json").read_text())
    more = {**told, "added_tokens": [*told["added_tokens"], {**told["added_tokens"][0], "id": 280, "content": "<|s|>"}]}
    moved = json.loads(json.dumps(told))
    words = moved["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    for name, text in (("more", more), ("moved", moved)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(text, indent=1))
    shards, text = MixSpec(str(folder)), MixSpec(spec.source, name="text")
    same = replace(learned, vocab=4096, tokenizer=str(tmp_path / "more"), mix=(shards, text))
    assert open_sources(same, 7)[0].vocab == 281
    with pytest.raises(DataError, match="were not made by one tokenizer"):
        open_sources(replace(same, tokenizer="bytes"), 7)
    for name in ("moved", "more"):
        alone = replace(learned, source=str(folder), tokenizer=str(tmp_path / name), mix=())
        with (
            pytest.raises(ConfigError, match="made with another tokenizer")
            if name == "moved"
            else contextlib.nullcontext()
        ):
            assert open_sources(alone, 7)[0].samples > 0
    other = prepare(replace(learned, tokenizer=str(tmp_path / "moved")), tmp_path / "other").folder
    task = Task(data=replace(learned, source=str(folder), tokenizer="bytes"),
                evaluate=EvaluateSpec(sets=(HeldOutSetSpec("later", str(other)),)))  # fmt: skip
    with pytest.raises(ConfigError, match=r"samples of task\.evaluate\.sets 'later' are not like"):
        open_sets(task, World(0, 1, 0, torch.device("cpu")), open_sources(task.data, 7)[0])


def test_a_later_release_that_gives_free_numbers_to_new_tokens_is_the_same_tokenizer() -> None:
    """Llama 3's third free token moves by one in Llama 3.1, which has a token for padding in its place."""

    def told(*added: str) -> str:
        tokens = [{"content": each, "id": at, "special": True} for at, each in enumerate(added, 2)]
        return json.dumps({"model": {"vocab": {"a": 0, "b": 1}, "merges": []}, "added_tokens": tokens})

    end, pad, free = "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_{}|>".format
    earlier, later = told(end, free(0), free(1), free(2)), told(end, free(0), free(1), pad, free(2))
    assert unlike(earlier, later) == unlike(later, earlier) == ""
    assert unlike(told(end, pad), told(pad, end)) == "'<|end_of_text|>' is token 2 of one and 3 of the other"

"""The token cache: complete or absent, whoever builds it, whatever dies, and rebuilt when it is damaged."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataError, StorageError
from paceline.spec.task import DataSpec
from paceline.task.data.sources import cache as module
from paceline.task.data.sources.cache import cache_root, open_corpus
from paceline.task.data.sources.manifest import Corpus
from paceline.task.data.sources.tokenizer import train_bpe

SPLITS = ("train", "validation")


@pytest.fixture
def corpus_spec(tmp_path: Path) -> Callable[..., DataSpec]:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"document {number} été\n" * (number + 1))

    def spec(**options: Any) -> DataSpec:
        chosen = {"source": str(folder), "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.2} | options
        return DataSpec(**chosen)

    return spec


def documents_of(corpus: Corpus, split: str) -> list[str]:
    """Return the split's documents, decoded, checking that each ends in the end-of-document token and only there."""
    part = getattr(corpus, split)
    tokens, offsets = part.open(), part.offsets()
    assert offsets[0] == 0 and offsets[-1] == len(tokens) == part.tokens and len(offsets) == part.documents + 1
    assert np.array_equal(np.flatnonzero(tokens == corpus.end_of_document), offsets[1:] - 1)
    tokenizer = corpus.open_tokenizer()
    return [tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(offsets)]


def content(corpus: Corpus) -> dict[str, bytes]:
    return {split: getattr(corpus, split).open().tobytes() for split in SPLITS}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "file"])
def test_every_document_is_in_one_split_and_unchanged(
    tokenizer: str, corpus_spec: Callable[..., DataSpec], tmp_path: Path
) -> None:
    if tokenizer == "file":
        tokenizer = str(tmp_path / "tokenizer.json")
        Path(tokenizer).write_text(train_bpe([b"document", b"number"], 300).to_json())
    spec = corpus_spec(tokenizer=tokenizer, vocab=300)
    corpus = open_corpus(spec)
    expected = sorted(path.read_text() for path in Path(spec.source).iterdir())
    train, validation = documents_of(corpus, "train"), documents_of(corpus, "validation")
    assert sorted(train + validation) == expected
    assert 2 <= len(validation) <= 25
    assert corpus.documents == 60 and corpus.bytes == sum(len(text.encode()) for text in expected)
    assert corpus.train.dtype == "<u2"


def test_the_second_time_nothing_is_read(corpus_spec: Callable[..., DataSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = open_corpus(corpus_spec(), said.append)
    monkeypatch.setattr(module, "read_documents", lambda *_: pytest.fail("the documents were read again"))
    assert open_corpus(corpus_spec(), said.append) == first
    assert len(said) == 1 and "tokenising" in said[0]


def test_touched_files_are_read_but_not_tokenised_again(corpus_spec: Callable[..., DataSpec]) -> None:
    spec = corpus_spec()
    first = open_corpus(spec)
    for path in Path(spec.source).iterdir():
        os.utime(path, (1, 1))
    assert open_corpus(spec, lambda line: pytest.fail(line)) == first


def test_what_changes_the_tokens_changes_the_key(corpus_spec: Callable[..., DataSpec]) -> None:
    specs = [
        corpus_spec(),
        corpus_spec(tokenizer="bpe", vocab=300),
        corpus_spec(tokenizer="bpe", vocab=310),
        corpus_spec(validation_fraction=0.1),
        corpus_spec(max_bytes=500),
        corpus_spec(include=("1*.txt",)),
    ]
    assert len({open_corpus(spec).key for spec in specs}) == len(specs)
    assert open_corpus(corpus_spec(seq_len=7, vocab=999)).key == open_corpus(specs[0]).key


def test_a_changed_document_is_seen(corpus_spec: Callable[..., DataSpec]) -> None:
    spec = corpus_spec()
    before = documents_of(open_corpus(spec), "train") + documents_of(open_corpus(spec), "validation")
    path = Path(spec.source) / "07.txt"
    old = path.read_text()
    path.write_text(old.replace("7", "x"))
    after = documents_of(open_corpus(spec), "train") + documents_of(open_corpus(spec), "validation")
    assert sorted(set(before) - set(after)) == [old] and sorted(set(after) - set(before)) == [old.replace("7", "x")]


def test_added_documents_leave_the_split_of_the_others(corpus_spec: Callable[..., DataSpec]) -> None:
    spec = corpus_spec()
    before = {split: set(documents_of(open_corpus(spec), split)) for split in SPLITS}
    for number in range(40):
        (Path(spec.source) / f"new{number}.txt").write_text(f"a new text {number}")
    after = {split: set(documents_of(open_corpus(spec), split)) for split in SPLITS}
    assert all(before[split] <= after[split] for split in SPLITS)


def test_a_small_vocabulary_takes_two_bytes_a_large_one_four(tmp_path: Path) -> None:
    from paceline.task.data.sources.tokens import TokenWriter, dtype_for

    assert (dtype_for(257), dtype_for(65_536), dtype_for(65_537)) == ("<u2", "<u2", "<u4")
    with TokenWriter(tmp_path, "train", 100_000, 99_999) as writer:
        writer.add([np.array([70_000, 3]), np.array([], dtype=np.uint32)])
    assert writer.result().open().tolist() == [70_000, 3, 99_999, 99_999]
    assert writer.result().offsets().tolist() == [0, 3, 4]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest", "manifest cut", "manifest of another form"])
def test_a_damaged_corpus_is_built_again(damage: str, corpus_spec: Callable[..., DataSpec]) -> None:
    spec = corpus_spec()
    corpus = open_corpus(spec)
    good = content(corpus)
    folder = Path(corpus.folder)
    tokens, manifest = folder / "train.tokens", folder / "manifest.json"
    if damage == "flip":
        with tokens.open("r+b") as stream:
            stream.seek(1000)
            stream.write(b"\x99")
    elif damage == "cut":
        os.truncate(tokens, tokens.stat().st_size // 2)
    elif damage == "remove":
        tokens.unlink()
    elif damage == "manifest":
        manifest.unlink()
    elif damage == "manifest cut":
        os.truncate(manifest, manifest.stat().st_size // 2)
    else:
        manifest.write_text(json.dumps([1, 2]))
    said: list[str] = []
    assert content(open_corpus(spec, said.append)) == good
    assert len(said) == 1
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_copied_cache_is_checked_by_its_content_and_kept(corpus_spec: Callable[..., DataSpec]) -> None:
    corpus = open_corpus(corpus_spec())
    tokens = Path(corpus.folder) / "train.tokens"
    recorded = tokens.stat().st_mtime_ns
    os.utime(tokens, (5, 5))
    assert open_corpus(corpus_spec(), lambda line: pytest.fail(line)) == corpus
    assert tokens.stat().st_mtime_ns == recorded


CHILD = """
import sys
from paceline.task.data.sources import cache
from paceline.spec.task import DataSpec
{setup}
spec = DataSpec(source=sys.argv[1], cache_dir=sys.argv[2], validation_fraction=0.2)
print(cache.open_corpus(spec, lambda line: print("built")).train.digest)
"""


def child(spec: DataSpec, setup: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD.format(setup=setup), spec.source, spec.cache_dir]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_build_once(corpus_spec: Callable[..., DataSpec]) -> None:
    children = [child(corpus_spec()) for _ in range(4)]
    said = [process.communicate()[0].split() for process in children]
    assert [process.returncode for process in children] == [0] * 4
    assert len({words[-1] for words in said}) == 1
    assert sum(words.count("built") for words in said) == 1


def test_without_locks_processes_that_start_together_agree(corpus_spec: Callable[..., DataSpec]) -> None:
    setup = "import errno, fcntl\ndef flock(*_): raise OSError(errno.ENOLCK, 'no locks')\nfcntl.flock = flock"
    children = [child(corpus_spec(), setup) for _ in range(3)]
    said = [process.communicate()[0].split() for process in children]
    assert [process.returncode for process in children] == [0] * 3
    assert len({words[-1] for words in said}) == 1


def test_a_builder_killed_before_the_end_leaves_nothing_that_is_taken_for_a_corpus(
    corpus_spec: Callable[..., DataSpec],
) -> None:
    kill = "import os, signal\ncache.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    dead = child(corpus_spec(), kill)
    dead.communicate()
    assert dead.returncode == -signal.SIGKILL
    corpora = Path(corpus_spec().cache_dir) / "corpora"
    assert len(list(corpora.iterdir())) == 1
    said: list[str] = []
    corpus = open_corpus(corpus_spec(), said.append)
    assert len(said) == 1
    assert [path.name for path in corpora.iterdir()] == [corpus.key]


def test_a_full_disk(corpus_spec: Callable[..., DataSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"No space left on device.*free\n.*cache_dir"):
            open_corpus(corpus_spec())
    assert list((Path(corpus_spec().cache_dir) / "corpora").iterdir()) == []
    assert open_corpus(corpus_spec()).documents == 60


def test_a_cache_folder_that_cannot_be(corpus_spec: Callable[..., DataSpec], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        open_corpus(corpus_spec(cache_dir=str(tmp_path / "file" / "cache")))


def test_documents_that_change_while_they_are_read(
    corpus_spec: Callable[..., DataSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = corpus_spec()

    def write_meanwhile(line: str) -> None:
        (Path(spec.source) / "03.txt").write_text("other")

    with pytest.raises(DataError, match="changed while it was read"):
        open_corpus(spec, write_meanwhile)
    assert open_corpus(spec).documents == 60


def test_only_empty_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        open_corpus(DataSpec(source=str(tmp_path), cache_dir=str(tmp_path / "cache")))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(DataSpec()) == tmp_path / "paceline"
    for other in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache_root(DataSpec()) == tmp_path / "home" / ".cache" / "paceline"
    assert cache_root(DataSpec(cache_dir="here")) == Path("here")

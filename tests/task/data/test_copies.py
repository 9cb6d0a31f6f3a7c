"""Near copies: what is written beside a text against the shingles that it really shares with an earlier one."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError, DataError
from paceline.session.verbs.scoring import _texts
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.copies import SHINGLE_WORDS, EarlierDocuments, mark_copies, minimal_hashes
from paceline.task.data.source import open_sources

WORDS = [f"word{number}" for number in range(5000)]


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[at : at + SHINGLE_WORDS]) for at in range(max(1, len(words) - SHINGLE_WORDS + 1))}


def shared(one: str, other: str) -> float:
    return len(shingles(one) & shingles(other)) / len(shingles(one) | shingles(other))


def changed(text: str, changes: int, draws: random.Random) -> str:
    words = text.split()
    for place in draws.sample(range(len(words)), changes):
        words[place] = draws.choice(WORDS)
    return " ".join(words)


def test_what_documents_share_is_estimated() -> None:
    draws, errors = random.Random(1), []
    for _ in range(60):
        text = " ".join(draws.choices(WORDS, k=400))
        other = changed(text, draws.randrange(0, 40), draws)
        estimate = float((minimal_hashes(text.encode()) == minimal_hashes(other.encode())).mean())
        errors.append(estimate - shared(text, other))
    assert abs(np.mean(errors)) < 0.02 and np.abs(errors).max() < 0.2
    assert np.array_equal(minimal_hashes(b"a  b\nc"), minimal_hashes(b"a b c")), "spaces do not count"
    assert (minimal_hashes(b"a b c") != minimal_hashes(b"a b d")).all()
    assert len(minimal_hashes(b"\xff\x00")) == len(minimal_hashes(b" ")), "any bytes are a document"


def test_near_copies_are_found_among_others_and_the_first_one_stays() -> None:
    draws, earlier = random.Random(2), EarlierDocuments()
    texts = [" ".join(draws.choices(WORDS, k=300)) for _ in range(150)]
    assert all(earlier.add(text.encode()) == (0.0, -1) for text in texts), "unlike texts share nothing"
    for number, text in enumerate(texts):
        copy = changed(text, 6, draws)  # 0.82 of its shingles stay
        share, like = earlier.add(copy.encode())
        assert like == number and abs(share - shared(text, copy)) < 0.2


def test_documents_are_selected_by_what_they_share(tmp_path: Path) -> None:
    draws = random.Random(3)
    texts = [" ".join(draws.choices(WORDS, k=200)) for _ in range(20)]
    copies = [changed(text, 2, draws) for text in texts[:8]]
    lines = [*texts, *copies, texts[3]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    data = DataSpec(str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    found = mark_copies(data, tmp_path / "marked.jsonl")
    assert (found.documents, found.equal, found.near) == (29, 1, 9)
    marked = [json.loads(line) for line in (tmp_path / "marked.jsonl").read_text().splitlines()]
    assert [each["text"] for each in marked] == lines and marked[-1]["like"] == "a.jsonl line 4"
    kept = DataSpec(str(tmp_path / "marked.jsonl"), score_max=0.8, validation_fraction=0.0, seq_len=16,
                    cache_dir=data.cache_dir)  # fmt: skip
    assert open_sources(kept, 7)[0].split.documents == 20  # type: ignore[attr-defined]
    with (tmp_path / "a.jsonl").open("a") as stream:
        stream.write('{"text": 5}\n')
    skipping = mark_copies(replace(data, on_bad="skip"), tmp_path / "skipped.jsonl")
    assert (skipping.documents, skipping.left_out) == (29, 1) and "is not text" in skipping.left_out_first
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="holds no text"):
        mark_copies(DataSpec(str(tmp_path / "empty.txt")), tmp_path / "none.jsonl")
    assert not list(tmp_path.glob("*none*")) and not list(tmp_path.glob(".*.part"))


def test_what_is_held_out_by_name_is_not_written_among_what_is_trained_on(tmp_path: Path) -> None:
    for name in ("train-0", "validation-0"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / f"{name}.jsonl").write_text(json.dumps({"text": f"a text of {name}"}))
    whole, train = DataSpec(str(tmp_path / "set")), DataSpec(str(tmp_path / "set"), include=("train*",))
    with pytest.raises(ConfigError, match=r"holds out validation-0\.jsonl"):
        mark_copies(whole, tmp_path / "marked.jsonl")
    with pytest.raises(ConfigError, match=r"holds out validation-0\.jsonl"):
        list(_texts(whole))
    assert mark_copies(train, tmp_path / "marked.jsonl").documents == 1
    assert [texts for texts, _ in _texts(train)] == [[b"a text of train-0"]]

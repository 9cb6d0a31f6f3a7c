"""Tokenizers: exact round trips, the end of a document, and what is refused."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError, MissingExtra
from paceline.task.data.sources.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    from_json,
    load_tokenizer,
    train_bpe,
)

TEXTS = [f"def function_{n}(argument): return argument + {n}  # été\n".encode() for n in range(200)]


@pytest.fixture(scope="module")
def bpe() -> FileTokenizer:
    return train_bpe(TEXTS, 400)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: FileTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else bpe


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=200))
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab and token != tokenizer.end_of_document for token in ids.tolist())


def test_a_document_that_spells_the_mark_does_not_end_itself(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode([b"a <|endoftext|> b"])
    assert tokenizer.end_of_document not in ids.tolist()
    assert tokenizer.decode(ids) == "a <|endoftext|> b"


def test_decoding_drops_the_mark_and_foreign_ids(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode([b"hello"])
    assert tokenizer.decode(np.concatenate([ids, [tokenizer.end_of_document, tokenizer.vocab + 5]])) == "hello"


def test_restored_from_json_it_gives_the_same(tokenizer: Tokenizer) -> None:
    again = from_json(tokenizer.to_json(), tokenizer.name)
    assert (again.vocab, again.end_of_document, again.identity) == (
        tokenizer.vocab,
        tokenizer.end_of_document,
        tokenizer.identity,
    )
    for one, two in zip(tokenizer.encode(TEXTS), again.encode(TEXTS), strict=True):
        assert np.array_equal(one, two)


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab == 257 and tokenizer.end_of_document == 256
    assert tokenizer.encode([b"A\xc3\xa9"])[0].tolist() == [65, 195, 169]
    assert tokenizer.decode([65, 0xC3]) == "A\ufffd"


def test_bpe_is_deterministic_and_compresses(bpe: FileTokenizer) -> None:
    assert train_bpe(TEXTS, 400).to_json() == bpe.to_json()
    assert bpe.vocab == 400
    assert sum(map(len, bpe.encode(TEXTS))) < sum(map(len, TEXTS)) / 3


def test_bpe_of_a_tiny_text_offers_what_it_has() -> None:
    small = train_bpe([b"ab ab ab"], 4096)
    assert 257 < small.vocab < 300 and small.end_of_document < small.vocab


def test_a_tokenizer_file(bpe: FileTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(path)).identity == bpe.identity


def test_a_tokenizer_file_that_truncates_or_adds_tokens_does_neither(bpe: FileTokenizer, tmp_path: Path) -> None:
    content = json.loads(bpe.to_json())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert np.array_equal(load_tokenizer(str(tmp_path)).encode(TEXTS[:1])[0], bpe.encode(TEXTS[:1])[0])


def test_refusals(bpe: FileTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not there"):
        load_tokenizer(str(tmp_path / "no.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        load_tokenizer(str(broken))
    endless = bpe.to_json().replace("<|endoftext|>", "<|start|>")
    broken.write_text(endless)
    with pytest.raises(DataError, match="no end-of-document token") as raised:
        load_tokenizer(str(broken))
    assert "(it has <|start|>" in raised.value.try_, "it names what may be the one"


@pytest.mark.parametrize("end", ["<EOS_TOKEN>", "<end>", "<|END_OF_TURN_TOKEN|>", "<eod>", "[END_OF_DOCUMENT]"])
def test_a_special_token_that_says_end_by_other_words_is_the_end(bpe: FileTokenizer, tmp_path: Path, end: str) -> None:
    (tmp_path / "tokenizer.json").write_text(bpe.to_json().replace("<|endoftext|>", end))
    found = load_tokenizer(str(tmp_path))
    assert found.end_of_document == bpe.end_of_document and found.token(found.end_of_document) == end
    for other in ("<bend>", "<|endless|>", "<sender>", "<BOS_TOKEN>"):
        (tmp_path / "tokenizer.json").write_text(bpe.to_json().replace("<|endoftext|>", other))
        with pytest.raises(DataError, match="no end-of-document token"):
            load_tokenizer(str(tmp_path))


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtra, match=r"paceline\[bpe\]"):
        train_bpe(TEXTS, 300)

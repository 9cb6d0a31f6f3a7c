"""Documents begin as their tokenizer has texts begin, <s> or <bos>: as the package that made it gives them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.run.evaluate.samples import sample_writer
from paceline.session.verbs.scoring import _pieces
from paceline.spec.task import DataSpec
from paceline.spec.watch.samples import SamplesSpec
from paceline.task.data.pairs import preference_pairs
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.sources.cache import open_corpus
from paceline.task.data.sources.tables.store import open_table
from paceline.task.data.sources.tokenizer import load_tokenizer, special_text
from paceline.task.objective import next_token

package = pytest.importorskip("tokenizers")
TEXTS = ["a b", "cab", "b<s>a", "c" * 9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tokenizer that puts <s> before a text, as Llama's, Gemma's and Mistral's do."""
    return write(tmp_path, "<s> $A", [("<s>", 1)])


def write(folder: Path, single: str, special: list[tuple[str, int]]) -> Path:
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>", "<s>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(["a b c"], trainer)
    tokenizer.post_processor = package.processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def given(folder: Path, text: str) -> list[int]:
    """Return what the package gives for a text in which no special token is meant."""
    tokenizer = package.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return list(tokenizer.encode(text).ids)


def spec(folder: Path, source: str, **options: Any) -> DataSpec:
    return DataSpec(source, tokenizer=str(folder), validation_fraction=0.0, seq_len=24,
                    cache_dir=str(folder / "cache"), **options)  # fmt: skip


def documents(split: Any) -> list[list[int]]:
    tokens = split.open()
    return [tokens[a : b - 1].tolist() for a, b in itertools.pairwise(split.offsets().tolist())]


def test_texts_and_shards_of_them_begin_as_the_tokenizer_has_it(folder: Path, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    data = spec(folder, str(tmp_path), include=("*.txt",))
    expected = [given(folder, text) for text in TEXTS]
    assert all(ids[0] == 1 for ids in expected)
    assert documents(open_corpus(data).train) == expected
    cut = spec(folder, str(tmp_path), include=("*.txt",), document_tokens=3)
    assert documents(open_corpus(cut).train) == [ids[:3] for ids in expected], "it is one of the first tokens"
    prepare(data, tmp_path / "out", workers=1)
    shards = open_sources(DataSpec(f"shards:{tmp_path / 'out'}", validation_fraction=0.0, seq_len=24), 7)[0]
    assert documents(shards.split) == expected  # type: ignore[attr-defined]


def test_rows_of_a_table_begin_so_and_those_that_a_template_writes_as_it_has_them(folder: Path) -> None:
    rows = [{"prompt": text, "completion": " c"} for text in TEXTS]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = documents(open_table(spec(folder, f"table:{folder / 'p.jsonl'}")).corpus.train)
    assert made == [given(folder, text) + given(folder, " c")[1:] for text in TEXTS]

    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "c.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 2)
    for template, begins in (("plain", True), ("chatml", False)):
        table = open_table(spec(folder, f"table:{folder / 'c.jsonl'}", template=template))
        assert [ids[0] == 1 for ids in documents(table.corpus.train)] == [begins] * 2, template


def test_what_begins_a_row_is_not_learnt(folder: Path) -> None:
    (folder / "p.jsonl").write_text(json.dumps({"prompt": "", "completion": "a"}) + "\n")
    row = open_sources(spec(folder, f"table:{folder / 'p.jsonl'}", rows="padded"), 7)[0].read(np.array([0]))
    learnt = row["labels"][0][row["labels"][0] >= 0].tolist()
    assert learnt == [*given(folder, "a")[1:], load_tokenizer(str(folder)).end_of_document]


def test_pairs_prompts_of_samples_and_scores_begin_so(folder: Path) -> None:
    (folder / "pairs.jsonl").write_text(json.dumps({"prompt": "a b", "chosen": "c", "rejected": "b"}) + "\n")
    pairs = preference_pairs(str(folder / "pairs.jsonl"), 12, str(folder))
    prompt = given(folder, "a b")
    assert [row[: len(prompt)].tolist() for row in pairs[0]["tokens"]] == [prompt] * 2  # type: ignore[index]
    (folder / "0.txt").write_text("c" * 99)
    source, asked = open_sources(spec(folder, str(folder / "0.txt")), 7)[0], SamplesSpec(prompts=("a b",), tokens=4)
    writer = sample_writer(asked, source, next_token, 7)
    assert writer is not None and writer.prompts == (tuple(prompt),)
    tokenizer = load_tokenizer(str(folder))
    [(_, piece)] = _pieces(tokenizer, [b"a b"], 24)
    assert piece.tolist() == [tokenizer.end_of_document, *prompt, tokenizer.end_of_document]


@pytest.mark.parametrize(
    ("single", "special", "opening", "told"),
    [
        ("$A </s>", [("</s>", 0)], (), ", around a text </s>"),  # T5
        ("</s> $A", [("</s>", 0)], (), ", around a text </s>"),  # OPT: what ends a document stands before the next
        ("<s> $A </s>", [("<s>", 1), ("</s>", 0)], (1,), ", a document begins with <s>, around a text <s> </s>"),
        ("<s> $A", [("<s>", 1)], (1,), ", a document begins with <s>"),
    ],
)
def test_only_what_stands_before_a_text_and_ends_none_opens_it(
    single: str, special: list[tuple[str, int]], opening: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(write(tmp_path, single, special)))
    assert tokenizer.opening == opening
    assert special_text(tokenizer) == "end of document </s>" + told


def test_a_cache_without_it_is_not_taken(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.txt").write_text("a b")
    data = spec(folder, str(tmp_path / "0.txt"))
    with monkeypatch.context() as earlier:
        earlier.setattr("paceline.task.data.sources.cache.opened", lambda tokenizer, ids: ids)
        earlier.setattr("paceline.task.data.sources.cache.document_identity",
                        lambda data: load_tokenizer(data.tokenizer).identity)  # fmt: skip
        earlier.setattr("paceline.task.data.sources.cache.is_own", lambda tokenizer: True)
        old = open_corpus(data)
    assert documents(old.train) == [given(folder, "a b")[1:]]
    assert documents(open_corpus(data).train) == [given(folder, "a b")]

"""Samples of tables: padded rows against a plain loop, whatever rows are beside a row; conversations of which some
tokens count, padded and packed, against a walk of their segments."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.protocol import filled_for
from paceline.task.data.rows import packed_source
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tables.chat.messages import Conversation
from paceline.task.data.sources.tables.chat.own_template import of_tokenizer
from paceline.task.data.sources.tables.chat.parts import TextPart, encode_segments
from paceline.task.data.sources.tables.chat.templates import chatml, llama3, plain
from paceline.task.data.sources.tables.in_words import first_rows
from paceline.task.data.sources.tables.store import open_table
from paceline.task.data.sources.tokenizer import ByteTokenizer, load_tokenizer
from paceline.task.models.predicting import _ids

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]


def write_tokenizer(folder: Path, special: list[str]) -> Path:
    """Write a tokenizer.json of byte-level BPE with special tokens, and return its folder."""
    package = pytest.importorskip("tokenizers")
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    trainer = package.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["a b c"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def labelled(tmp_path: Path, **options: Any) -> DataSpec:
    lengths = np.random.default_rng(3).integers(0, 60, 80).tolist()
    rows = "".join(f"{'x' * size}{at},{'ab'[at % 2]}\n" for at, size in enumerate(lengths))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    given = {"seq_len": 40, "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache"), **options}
    return DataSpec(f"table:{tmp_path / 'a.csv'}", **given)


def test_rows_are_filled_up_and_cut_as_a_plain_loop_does(tmp_path: Path) -> None:
    data = labelled(tmp_path)
    table, (train, held_out) = open_table(data), open_sources(data, 7)
    assert held_out is not None and train.samples + held_out.samples == 80
    tokens, offsets = table.corpus.train.open(), table.corpus.train.offsets()
    for ids in (np.array([0]), np.arange(train.samples), np.array([5, 5, 2])):
        batch = train.read(ids)
        for at, row in enumerate(ids.tolist()):
            real = [int(one) for one in tokens[offsets[row] : offsets[row + 1]]][:40]
            assert batch["tokens"][at, : len(real)].tolist() == real
            assert batch["attention_mask"][at].tolist() == [1] * len(real) + [0] * (
                batch["tokens"].shape[1] - len(real)
            )
        assert batch["tokens"].shape[1] % 8 == 0 and batch["tokens"].shape[1] <= 40
    again = pickle.loads(pickle.dumps(train))
    assert again.fingerprint == train.fingerprint
    assert torch.equal(again.read(np.arange(4))["tokens"], train.read(np.arange(4))["tokens"])


def test_rows_of_one_cpu_are_filled_up_to_the_longest_and_no_further(tmp_path: Path) -> None:
    """Ranks of tp share a row's tokens, GPUs like even lengths, and bf16 on a CPU makes a kernel for each."""
    train = open_sources(labelled(tmp_path), 7)[0]
    lengths = np.asarray(train.lengths)
    longest = int(lengths[lengths % 8 > 0].max())  # of these rows
    ids = np.flatnonzero(lengths <= longest)
    tight, wide = filled_for(train, "cpu", 1, "fp32"), train.read(ids)
    batch = tight.read(ids)
    assert batch["tokens"].shape == (len(ids), longest) and wide["tokens"].shape[1] == longest + -longest % 8
    assert batch.keys() == wide.keys() and torch.equal(batch["labels"], wide["labels"])
    for name in ("tokens", "attention_mask"):
        assert torch.equal(batch[name], wide[name][:, :longest])
    assert tight.fingerprint == train.fingerprint and tight.samples == train.samples
    for others in (("cuda", 1, "fp32"), ("cpu", 2, "fp32"), ("cpu", 1, "bf16")):
        assert filled_for(train, *others) is train


def test_rows_that_are_filled_up_no_further_keep_their_order(tmp_path: Path) -> None:
    train = open_sources(labelled(tmp_path, shuffle="bucketed", shuffle_bucket=8), 7)[0]
    tight, places = filled_for(train, "cpu", 1, "fp32"), np.arange(3 * train.samples)
    assert np.array_equal(ids_at(tight, 7, places), ids_at(train, 7, places))
    widths = {tight.read(ids_at(tight, 7, places[at : at + 8]))["tokens"].shape[1] % 8 for at in range(0, 64, 8)}
    assert widths > {0}, "and are tight all the same"


@pytest.mark.parametrize("around", [False, True])
def test_a_labelled_text_is_what_its_tokenizer_gives_anywhere_else(tmp_path: Path, around: bool) -> None:
    """An end that `from_pretrained` and `pipeline` do not add would be learnt and then be missing."""
    package = pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path, ["<|endoftext|>", "[CLS]"])
    theirs = package.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if around:
        theirs.post_processor = package.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
        theirs.save(str(folder / "tokenizer.json"))
    texts = ["a b", "cab", "", "b<|endoftext|>"]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f'"{text}",{at % 2}\n' for at, text in enumerate(texts)))
    data = DataSpec(f"table:{tmp_path / 't.csv'}", tokenizer=str(folder), validation_fraction=0.0, seq_len=32,
                    labels="classification", cache_dir=str(tmp_path / "cache"))  # fmt: skip
    train = open_sources(data, 7)[0]
    theirs.encode_special_tokens = True
    end = load_tokenizer(str(folder)).end_of_document
    for row, text in enumerate(texts):
        batch = train.read(np.array([row]))
        real = batch["tokens"][0][batch["attention_mask"][0] > 0].tolist()
        assert real == (theirs.encode(text).ids or [end]), "a text of no token is its end"
    shown = first_rows(open_table(data), data, count=4)
    assert [row.length for row in shown] == train.lengths.tolist()


def test_a_text_that_is_cut_keeps_what_ends_it_as_its_tokenizer_cuts_it(tmp_path: Path) -> None:
    """BART's classifier reads the end of each text, and raises for rows of which some have none."""
    package = pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path, ["[SEP]", "[CLS]"])
    theirs = package.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 0)]
    )
    theirs.save(str(folder / "tokenizer.json"))
    texts = ["a b", "cab" * 9, "b" * 10, "ab" * 5 + "c"]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{text},{at % 2}\n" for at, text in enumerate(texts)))
    data = DataSpec(f"table:{tmp_path / 't.csv'}", tokenizer=str(folder), validation_fraction=0.0, seq_len=12,
                    labels="classification", cache_dir=str(tmp_path / "cache"))  # fmt: skip
    train, tokenizer = open_sources(data, 7)[0], load_tokenizer(str(folder))
    theirs.enable_truncation(12)
    for ids in (np.arange(4), np.array([1]), np.array([0, 3])):
        batch = train.read(ids)
        for at, row in enumerate(ids.tolist()):
            real = batch["tokens"][at][batch["attention_mask"][at] > 0].tolist()
            assert real == theirs.encode(texts[row]).ids == _ids(tokenizer, texts[row].encode(), False, 12).tolist()
    assert train.cut == 2 and tokenizer.behind() == 1
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again.read(np.arange(4))["tokens"], train.read(np.arange(4))["tokens"])
    whole = open_sources(replace(data, seq_len=40), 7)[0]
    assert whole.behind == 0 and whole.read(np.array([1]))["tokens"][0, : whole.lengths[1]].tolist()[-1] == 0


def test_the_order_by_length_has_rows_of_a_batch_alike(tmp_path: Path) -> None:
    data = labelled(tmp_path, shuffle="bucketed", shuffle_bucket=8)
    train = open_sources(data, 7)[0]
    epoch = ids_at(train, 7, np.arange(train.samples))
    assert sorted(epoch.tolist()) == list(range(train.samples))
    widths = [np.ptp(np.asarray(train.lengths)[epoch[at : at + 8]]) for at in range(0, train.samples - 7, 8)]
    assert max(widths) < 20  # of lengths 1..40 in any order a batch would have nearly all


@pytest.mark.parametrize("template", [plain, chatml, llama3])
def test_of_a_conversation_what_the_assistant_says_counts(template: Any) -> None:
    segments = template(Conversation(TALK))
    counted = "".join(segment.text for segment in segments if segment.counted)
    for said in ("Hello there", "See you"):
        assert said in counted
    for given in ("Be kind.", "Hi", "Bye", "user", "system"):
        assert given not in counted


@pytest.mark.parametrize(("rows", "long_tokens"), [("padded", 0), ("packed", 0), ("packed", 1000)])
def test_labels_of_what_does_not_count_are_left_out_and_of_all_else_not(
    tmp_path: Path, rows: str, long_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_source, "LONG_TOKENS", long_tokens)
    talks = [
        [{"role": "user", "content": "q" * (at % 9)}, {"role": "assistant", "content": f"a{at}"}] for at in range(30)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    data = DataSpec(
        f"table:{path}", seq_len=256, rows=rows, template="chatml", validation_fraction=0.0, cross_documents=False,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    train, none = open_sources(data, 7)
    assert none is None
    batch = train.read(np.arange(train.samples))
    tokens, labels = batch["tokens"], batch["labels"]
    learnt = labels[labels >= 0].tolist()
    wanted = [byte for at in range(30) for byte in f"a{at}<|im_end|>".encode()]
    assert sorted(one for one in learnt if one != 256) == sorted(wanted)
    following = tokens[:, 1:][labels[:, :-1] >= 0]  # a label is the token after it
    assert torch.equal(following, labels[:, :-1][labels[:, :-1] >= 0]) or rows == "packed"
    if rows == "packed":
        assert "documents" in batch and train.samples < 30
        assert ByteTokenizer().decode(np.array(learnt)).count("<|im_end|>") == 30


def test_a_prompt_counts_nothing_and_its_completion_with_the_end_all(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,completion\n1+1=,2\n2+2=,4!\n")
    data = DataSpec(f"table:{path}", seq_len=16, rows="padded", validation_fraction=0.0, cache_dir=str(tmp_path / "c"))
    batch = open_sources(data, 7)[0].read(np.array([0, 1]))
    learnt = [[one for one in row if one >= 0] for row in batch["labels"].tolist()]
    assert learnt == [[*b"2", 256], [*b"4!", 256]]


def test_marks_are_special_tokens_and_what_is_said_never_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])))
    start, end = (tokenizer.encode_special([mark])[0].tolist() for mark in (b"<|im_start|>", b"<|im_end|>"))
    assert len(start) == len(end) == 1
    talk = [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "<|im_end|> no"}]
    ((ids, counted),) = encode_segments(tokenizer, [chatml(Conversation(talk))])
    assert ids.tolist().count(end[0]) == 2 and ids.tolist().count(start[0]) == 2  # one for each message
    assert len(ids) == len(counted) and set(counted.tolist()) == {0, 1}
    assert tokenizer.decode(ids[counted > 0]).startswith("<|im_end|> no")


def test_the_tokenizers_own_template_says_what_counts(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    write_tokenizer(tmp_path, ["<|endoftext|>", "<s>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                         "{% if add_generation_prompt %}[assistant] {% endif %}",
    }))  # fmt: skip
    segments = of_tokenizer(str(tmp_path))(Conversation(TALK))
    assert "".join(one.text for one in segments) == (
        "<s>[system] Be kind.\n[user] Hi\n[assistant] Hello there\n[user] Bye\n[assistant] See you\n"
    )
    assert "".join(one.text for one in segments if one.counted) == "Hello there\nSee you\n"
    assert TextPart("Hello there\n", True, mark=True, goes_on=True) in segments
    with pytest.raises(DataError, match="no chat template"):
        of_tokenizer("bytes")


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
REFUSING += "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSING += "{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.mark.parametrize(("template", "told", "hint"), [
    ("{% for m in messages %}{{ m.content }", "is no template unexpected '}', in its line 1", 'template = "chatml"'),
    (REFUSING, "talks.jsonl, line 2 does not fit the template System role not supported", "on_bad"),
    ("{{ messages[0].content.nope.deeper }}", "line 1 does not fit", "on_bad"),
    ("{{ 1 / 0 }}", "line 1 does not fit the template division by zero", "on_bad"),
    ("{{ messages[7].content ~ messages[0]['no'] + 1 }}", "line 1 does not fit", "on_bad"),
])  # fmt: skip
def test_a_template_that_fails_is_told_with_its_row(tmp_path: Path, template: str, told: str, hint: str) -> None:
    """A template that is none ended in a defect of ours, and a row that one refuses was not named."""
    pytest.importorskip("jinja2")
    write_tokenizer(tmp_path, ["<|endoftext|>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in (TALK[1:], TALK)))
    data = DataSpec(f"table:{path}", seq_len=24, tokenizer=str(tmp_path), cache_dir=str(tmp_path / "c"))
    with pytest.raises(DataError) as raised:
        open_table(data)
    assert told in f"{raised.value.what} {raised.value.because}" and hint in raised.value.try_


def test_rows_whose_prompts_leave_nothing_to_learn_are_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    rows = "".join(f"{'q' * (40 if at % 4 == 0 else 3)},answer {at}\n" for at in range(20))
    path.write_text("prompt,completion\n" + rows)
    options: dict[str, Any] = {"seq_len": 24, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "c")}
    data = DataSpec(f"table:{path}", rows="padded", **options)
    train = open_sources(data, 7)[0]
    assert train.samples == 15
    assert any(
        "5 rows are left out: nothing of their first 24 tokens counts" in note for note in data_facts(data).notes
    )
    for source in (train, open_sources(DataSpec(f"table:{path}", rows="packed", **options), 7)[0]):
        for row in range(source.samples):  # no batch of any rows weighs nothing
            assert int((source.read(np.array([row]))["labels"] >= 0).sum()) > 0
    with pytest.raises(DataError, match="anything to learn within seq_len = 2 tokens"):
        open_sources(DataSpec(f"table:{path}", rows="padded", **{**options, "seq_len": 2}), 7)


def test_the_fingerprint_of_a_labelled_table_is_that_of_earlier_releases(tmp_path: Path) -> None:
    """As of 2026-11-28: a run that was begun then goes on. What is noted of labels to write them is no part of it."""
    table, train = open_table(labelled(tmp_path)), open_sources(labelled(tmp_path), 7)[0]
    assert table.labels is not None
    told = f"Labels(kind='classification', classes=('a', 'b'), because={table.labels.because!r})"
    made = f"{table.corpus.train.digest} {told} 40 {table.keeps_end} {table.pad}"
    labels = table.label_array("train").tobytes()
    assert train.fingerprint == hashlib.blake2b(made.encode() + labels, digest_size=16).hexdigest()

"""Sources with targets: what encoder-decoders learn from a table is what transformers computes of the same texts."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from distributed import run_kept
from tests_shared import decoder_task, plan_of

from paceline.errors import DataError
from paceline.run.process.world import join_world
from paceline.spec.data.mix import MixSpec
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import DataSpec, ModelSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.listed_once import listed_once
from paceline.task.data.sequence_pairs import SequencePairs, sequence_pairs
from paceline.task.data.source import open_sources
from paceline.task.data.sources.mapped import MapSource
from paceline.task.objective import resolve_objective
from paceline.units import Amount
from paceline.verify.compare.layout import compare
from paceline.verify.low.low import low

PAIRS = [("one plus two is", "three"), ("two", "two two two"), ("nine plus nine plus nine plus nine", "nine")]
WORDS = ["<pad>", "</s>", "<s>", "[UNK]", *sorted({word for pair in PAIRS for text in pair for word in text.split()})]
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 2,
      "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "dropout": 0.0,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
        "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
        "forced_eos_token_id": None}  # fmt: skip
FAMILIES = {
    "T5": (transformers.T5Config, T5, transformers.T5ForConditionalGeneration, "$A </s>"),
    "BART": (transformers.BartConfig, BART, transformers.BartForConditionalGeneration, "<s> $A </s>"),
}


def write_folder(folder: Path, family: str) -> Any:
    """Write a tiny encoder-decoder as transformers does, with its tokenizer, and return the model."""
    config, options, cls, around = FAMILIES[family]
    torch.manual_seed(0)
    model = cls(config(vocab_size=len(WORDS) + 2, **options))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    words = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<s>"])
    special = [(name, words[name]) for name in ("<s>", "</s>")]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=around, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def write_table(folder: Path, names: tuple[str, str] = ("source", "target")) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, pair, strict=True))) for pair in PAIRS))
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = write_folder(tmp_path, family)
    data = sequence_pairs(write_table(tmp_path), f"hf:{tmp_path}", source_len=12, target_len=6)
    assert isinstance(data, SequencePairs)
    batch = data.collate([data[index] for index in range(len(data))])
    loss, weight = resolve_objective("seq2seq", "samples")(model, batch)
    loss.backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    model.zero_grad()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<pad>")
    given = tokenizer([source for source, _ in PAIRS], return_tensors="pt", padding=True)
    labels = tokenizer([target for _, target in PAIRS], return_tensors="pt", padding=True)["input_ids"]
    labels = labels.masked_fill(labels == 0, -100)
    theirs = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], labels=labels).loss
    count = int((labels != -100).sum())
    (theirs * count).backward()
    assert int(weight) == count
    torch.testing.assert_close(loss, theirs * count, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def proved(table: str, folder: str, **changes: int) -> list[CheckProof]:
    world, found = join_world("cpu", threads=1), []
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2)):
        for prove, precision in ((compare, "fp64"), (low, "bf16")):
            model, data = ModelSpec(f"hf:{folder}"), MapSource(sequence_pairs(table, folder, 9, 5), 7)
            task = decoder_task(model=model, data=data, objective="seq2seq", global_batch=Amount(5, "samples"))
            plan = plan_of(layout, batch=5, micro_batch=2, precision=precision, **changes)
            found.append(prove(task, plan, world, task.data, 1, 2))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_micro_batches_whose_targets_have_other_numbers_of_tokens_train_as_one(
    family: str, tmp_path: Path
) -> None:
    """In bf16 too, where what several blocks read of the encoder sums its gradients in the order that FSDP2 has."""
    write_folder(tmp_path, family)
    for proof in run_kept(proved, 2, write_table(tmp_path), str(tmp_path))[0]:
        assert proof.equal, proof.first_difference


def logits_in_parts(table: str, folder: str) -> list[CheckProof]:
    return proved(table, folder, logits_elements=3 * len(WORDS))


def test_a_head_that_computes_the_loss_in_parts_is_one_device(tmp_path: Path) -> None:
    """T5's head does, and the one device that it is held against has its logits whole."""
    write_folder(tmp_path, "T5")
    for proof in run_kept(logits_in_parts, 2, write_table(tmp_path), str(tmp_path))[0]:
        assert proof.equal, proof.first_difference


def test_what_is_too_long_loses_its_end_and_keeps_what_stands_around_it(tmp_path: Path) -> None:
    write_folder(tmp_path, "BART")
    data = sequence_pairs(write_table(tmp_path), str(tmp_path), source_len=5, target_len=3, prefix="two ", held_out=1)
    assert not isinstance(data, SequencePairs)
    train, held_out = data
    assert (len(train), len(held_out)) == (2, 1)
    row = {name: value[0].tolist() for name, value in held_out.collate([held_out[0]]).items()}
    word = {name: index for index, name in enumerate(WORDS)}
    assert row["source"] == [word[each] for each in ("<s>", "two", "nine", "plus", "</s>")]
    assert row["labels"] == [word[each] for each in ("<s>", "nine", "</s>")]
    assert row["target"] == [word[each] for each in ("</s>", "<s>", "nine")]
    assert row["source_mask"] == [1] * 5


def test_tables_and_folders_that_do_not_fit_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path, "T5")
    assert len(sequence_pairs(write_table(tmp_path, ("article", "highlights")), str(tmp_path))) == 3
    table = write_table(tmp_path, ("de", "en"))
    assert len(sequence_pairs(table, str(tmp_path), source_field="de", target_field="en")) == 3
    for arguments, told in (
        ({}, "its columns are de, en"),
        ({"source_field": "de"}, "both, or none"),
        ({"source_field": "de", "target_field": "en", "held_out": 3}, "none would be left"),
    ):
        with pytest.raises(DataError) as caught:
            sequence_pairs(table, str(tmp_path), **arguments)  # type: ignore[arg-type]
        assert told in str(caught.value)
    (tmp_path / "empty.csv").write_text("source,target\none,two\ntwo,\n")
    with pytest.raises(DataError, match="has no text in the column 'target'"):
        sequence_pairs(str(tmp_path / "empty.csv"), str(tmp_path))
    for config in ({"model_type": "gpt2"}, {"model_type": "bart", "pad_token_id": 0}):  # a BART's default is no padding
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 99, **config}))
        with pytest.raises(DataError, match="nothing of how a target begins"):
            sequence_pairs(write_table(tmp_path), str(tmp_path))
    for kind, told in (
        ("mbart", "source_language is not given"),
        ("m2m_100", "source_language is not given"),  # NLLB is one
        ("marian", "writes targets otherwise than sources"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "decoder_start_token_id": 0}))
        with pytest.raises(DataError, match=told):
            sequence_pairs(write_table(tmp_path), str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 3, "decoder_start_token_id": 0}))
    with pytest.raises(DataError, match="its model knows 3"):
        sequence_pairs(write_table(tmp_path), str(tmp_path))


LANGUAGES = {"mBART": ("en_XX", "ro_RO"), "mBART-50": ("en_XX", "de_DE"), "NLLB": ("eng_Latn", "deu_Latn")}
PIECES = sorted({word for pair in PAIRS for text in pair for word in text.split()})
TINY = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "dropout": 0.0,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 24,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 1, "eos_token_id": 2,
        "bos_token_id": 0}  # fmt: skip


def write_multilingual(folder: Path, family: str, **more: Any) -> tuple[Any, Any]:
    """Write a tiny model of many languages with transformers' own tokenizer, and return both."""
    source, target = LANGUAGES[family]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer: Any
    if family == "NLLB":
        letters = sorted({letter for word in PIECES for letter in word} | {"▁"})
        vocab = {piece: at for at, piece in enumerate([*special, *letters])}
        tokenizer = transformers.NllbTokenizer(vocab=vocab, merges=[], src_lang=source, tgt_lang=target, **more)
        sizes = {"vocab_size": len(tokenizer), "decoder_start_token_id": 2, **TINY}
        model: Any = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**sizes))
    else:
        scores = [(name, 0.0) for name in special] + [(f"▁{word}", -2.0) for word in PIECES] + [("▁", -5.0)]
        cls = transformers.MBartTokenizer if family == "mBART" else transformers.MBart50Tokenizer
        tokenizer = cls(vocab=scores, src_lang=source, tgt_lang=target, **more)
        model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(vocab_size=len(tokenizer), **TINY))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.train(), tokenizer


@pytest.mark.parametrize(
    ("family", "more"), [("mBART", {}), ("mBART-50", {}), ("NLLB", {}), ("NLLB", {"legacy_behaviour": True})], ids=str
)
def test_languages_stand_where_transformers_writes_them(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, tokenizer = write_multilingual(tmp_path, family, **more)
    source, target = LANGUAGES[family]
    data = sequence_pairs(write_table(tmp_path), str(tmp_path), source_language=source, target_language=target)
    assert isinstance(data, SequencePairs)
    batch = data.collate([data[index] for index in range(len(data))])
    texts, targets = [pair[0] for pair in PAIRS], [pair[1] for pair in PAIRS]
    given = tokenizer(texts, text_target=targets, return_tensors="pt", padding=True)
    labels = given["labels"].masked_fill(given["labels"] == 1, -100)
    width = given["input_ids"].shape[1]
    assert torch.equal(batch["source"][:, :width], given["input_ids"]) and (batch["source"][:, width:] == 1).all()
    assert torch.equal(batch["source_mask"][:, :width], given["attention_mask"])
    assert (
        torch.equal(batch["labels"][:, : labels.shape[1]], labels) and (batch["labels"][:, labels.shape[1] :] < 0).all()
    )
    loss, weight = resolve_objective("seq2seq", "samples")(model, batch)
    theirs = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], labels=labels).loss
    assert int(weight) == int((labels != -100).sum())
    torch.testing.assert_close(loss, theirs * weight, rtol=1e-5, atol=1e-5)


def test_tokens_are_held_once_and_as_numbers_of_four_bytes(tmp_path: Path) -> None:
    """While a run begins they are kept for whoever opens the table again: as lists of Python's they took ten times."""
    write_folder(tmp_path, "T5")
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([json.dumps({"source": "two " * 200, "target": "nine " * 100})] * 300))
    with listed_once():
        tracemalloc.start()
        try:
            parts = sequence_pairs(str(path), str(tmp_path), held_out=100)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert not isinstance(parts, SequencePairs) and [len(part) for part in parts] == [200, 100]
    tokens = 300 * (200 + 1 + 100 + 1)  # with the end of each
    assert 4 * tokens < held < 5.5 * tokens
    assert all(
        torch.equal(row, parts[0][0][side]) for part in parts for at in (0, 99) for side, row in enumerate(part[at])
    )


def test_a_mixture_of_tables_has_the_rows_that_one_table_of_both_has(tmp_path: Path) -> None:
    """Each part filled its own rows up, to lengths of which no batch could be made."""
    write_folder(tmp_path, "T5")
    longer = [(" ".join(["two"] * several), " ".join(["nine"] * (several // 2 + 1))) for several in (3, 30, 7, 19)]
    tables, source = (
        {"short": PAIRS, "long": longer, "both": PAIRS + longer},
        f"{sequence_pairs.__module__}:sequence_pairs",
    )
    parts = {}
    for name, rows in tables.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"source": one, "target": other}) for one, other in rows))
        parts[name] = MixSpec(source, name, arguments={"path": str(path), "model": str(tmp_path), "source_len": 28})
    mixed, _ = open_sources(DataSpec(mix=(parts["short"], parts["long"])), 7)
    one, _ = open_sources(DataSpec(source, arguments=parts["both"].arguments), 7)
    for ids in ([6, 0, 4, 2], [1, 3], [5, 6], [2, 0]):
        found, told = (each.read(np.array(ids)) for each in (mixed, one))
        assert found.keys() == told.keys()
        for name, rows in told.items():
            assert torch.equal(found[name], rows), name
    assert data_facts(DataSpec(mix=(parts["short"], parts["long"]))).longest == int(one.lengths.max())
    with pytest.raises(DataError, match="do not make one batch"):  # what a function of the user's makes is as it is
        open_sources(DataSpec(mix=(parts["short"], parts["long"]), collate=as_they_are), 7)[0].read(np.array([0, 4]))


def as_they_are(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"source": torch.nn.utils.rnn.pad_sequence([source for source, _ in samples], batch_first=True)}


def test_languages_that_a_model_does_not_know_are_told(tmp_path: Path) -> None:
    write_multilingual(tmp_path / "mbart", "mBART-50")
    table = write_table(tmp_path)
    for languages, told in (
        ({}, "source_language is not given"),
        ({"source_language": "en_XX"}, "target_language is not given"),
        ({"source_language": "en_XX", "target_language": "de_DX"}, "did you mean 'de_DE'"),
    ):
        with pytest.raises(DataError) as caught:
            sequence_pairs(table, str(tmp_path / "mbart"), **languages)  # type: ignore[arg-type]
        assert told in str(caught.value)
    (tmp_path / "mbart" / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="does not say where its tokenizer writes a language"):
        sequence_pairs(table, str(tmp_path / "mbart"), source_language="en_XX", target_language="de_DE")
    write_folder(tmp_path / "t5", "T5")
    with pytest.raises(DataError, match="leave them out; T5 is told by prefix"):
        sequence_pairs(table, str(tmp_path / "t5"), source_language="en_XX")


def test_rows_are_filled_up_to_the_longest_beside_them_and_priced_as_the_longest_of_all(tmp_path: Path) -> None:
    write_folder(tmp_path, "T5")
    data = sequence_pairs(write_table(tmp_path), str(tmp_path), source_len=256, target_len=64)
    assert isinstance(data, SequencePairs)
    assert {name: tuple(value.shape) for name, value in data.collate([data[0], data[2]]).items()} == {
        "source": (2, 8), "source_mask": (2, 8), "target": (2, 8), "labels": (2, 8)
    }  # fmt: skip
    long = [(" ".join(["two"] * count), "nine") for count in (3, 30)]
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"source": one, "target": other}) for one, other in long))
    of_long = sequence_pairs(str(path), str(tmp_path), source_len=28, target_len=64)
    assert isinstance(of_long, SequencePairs)
    assert of_long.lengths.tolist() == [8 + 8, 28 + 8], "the first with its end; the second is cut to source_len"
    assert of_long.collate([of_long[1]])["source"].shape == (1, 28)
    facts = data_facts(of_long)
    assert (facts.longest, facts.unit) == (36, "samples")
    assert MapSource(of_long, 7).fingerprint != MapSource(data, 7).fingerprint

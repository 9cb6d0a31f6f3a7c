"""Filters, rows, orders, mixtures and growing batches drawn together, against what guide/task/data.md says of them.

The reference knows nothing of the code: it lays the documents' bytes one after the other and counts. What it holds the
batches to: which tokens each sample has, each sample of a source once in each epoch of it, a source's share of every
block of a mixture, and that ranks, micro-batches, threads and resumes change no row of any batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.run.loop.loader import BatchStream
from paceline.run.updates.growth import BatchGrowth
from paceline.run.updates.selection import CandidateBatches
from paceline.spec.data.mix import MixSpec, WeightChange
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.steps.growth import BatchCourse, GrowthSpec, Piece
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources

END, IGNORED, BLOCK, SEED = 256, -100, 4096, 5
CPU = torch.device("cpu")
Documents = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Part:
    """A file of documents with scores, and what of it is read: by score, so many times, in so large a share."""

    lines: list[dict[str, Any]]
    least: float | None
    below: float | None
    weight: float
    later: float  # its weight from the second block on
    most: int

    def documents(self, most_tokens: int) -> Documents:
        """Return the tokens of its documents, each with the mark at its end."""
        chosen = [
            line["text"].encode()[: most_tokens or None]
            for line in self.lines
            if (self.least is None or line["score"] >= self.least)
            and (self.below is None or line["score"] < self.below)
        ]
        return [(*text, END) for text in chosen]


def drawn_part(drawn: random.Random, number: int) -> Part:
    lines = [
        {"text": "".join(drawn.choices("abcdefghij", k=drawn.choice([1, 5, 16, 17, 40, drawn.randrange(1, 70)])))
         + f"{number}.{line}", "score": drawn.randrange(10) / 10}
        for line in range(drawn.randrange(12, 60))
    ]  # fmt: skip
    least, below = drawn.choice([None, None, 0.2]), drawn.choice([None, None, 0.8])
    most = drawn.choice([0, 0, 0, drawn.randrange(300, 5000)]) if number else 0  # one goes on for ever
    return Part(lines, least, below, drawn.choice([1.0, 2.0, 0.25]), drawn.choice([1.0, 3.0]), most)


def pairs_of(documents: Documents) -> Counter[tuple[int, int]]:
    """Return each token with the one after it, in documents one after the other."""
    flat = [token for document in documents for token in document]
    return Counter(itertools.pairwise(flat))


def check_windows(rows: dict[str, np.ndarray], documents: Documents, seq_len: int, apart: bool) -> None:
    """Hold the samples of a source, in the order of their ids, against windows over its documents."""
    flat = [token for document in documents for token in document]
    number = np.cumsum([0, *(token == END for token in flat)])  # the mark opens the document after it
    of_token = number[1:]
    assert len(rows["tokens"]) == (len(flat) - 1) // seq_len
    for row, tokens in enumerate(rows["tokens"].tolist()):
        at = row * seq_len
        assert tokens == flat[at : at + seq_len]
        assert rows["labels"][row].tolist() == flat[at + 1 : at + seq_len + 1]
        if apart:
            wanted = np.diff(of_token[at : at + seq_len]) != 0
            assert np.array_equal(np.diff(rows["documents"][row]) != 0, wanted)
    assert ("documents" in rows) == apart


def check_packed(rows: dict[str, np.ndarray], documents: Documents, seq_len: int, apart: bool) -> None:
    """Hold the samples of a source against its documents: each is whole in one row, but for those longer than a row."""
    counts = rows["labels"] != IGNORED
    found = Counter(zip(rows["tokens"][counts].tolist(), rows["labels"][counts].tolist(), strict=True))
    assert found == pairs_of(documents), "each token is a label once, after the token before it"
    assert (rows["tokens"][~counts] == 0).all()
    if not apart:
        return
    assert np.array_equal(rows["documents"] > 0, counts)
    pieces = Counter[tuple[int, ...]]()
    for labels, numbers in zip(rows["labels"], rows["documents"], strict=True):
        for number in np.unique(numbers[numbers > 0]):
            pieces[tuple(labels[numbers == number].tolist())] += 1
    wanted = Counter[tuple[int, ...]]()
    for at, document in enumerate(documents):  # the first token of all is no label
        labels = document[1:] if at == 0 else document
        wanted.update(labels[start : start + seq_len] for start in range(0, len(labels), seq_len))
    assert pieces == wanted


def sizes_of(drawn: random.Random, batch: int, kind: str) -> Any:
    """Return what says how large batches are: the plan, a schedule, or how many candidates are read for them."""
    if kind == "grown":
        pieces = tuple(Piece(None, at, drawn.randrange(20, 400)) for at in sorted(drawn.sample(range(1, BLOCK), 3)))
        return BatchGrowth(GrowthSpec("schedule"), BatchCourse(batch, pieces))
    return CandidateBatches(SelectionSpec("loss", candidates=3), batch) if kind == "chosen" else None


def trained(source: Any, drawn: random.Random, batch: int, kind: str, until: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the ids and rows of all positions up to one, read by other ranks after each resume. What a rank has begun
    to gather is lost with it."""
    sizes, position, step = sizes_of(drawn, batch, kind), 0, 1
    ids, parts = [], []
    while position < until:
        ranks, micro_batch = drawn.randrange(1, 13), drawn.randrange(1, 40)
        passes = accumulation_for(batch, ranks, micro_batch)
        plan = Plan(Layout(dp_shard=ranks), micro_batch=micro_batch, accumulation=passes, batch_samples=batch)
        again = pickle.loads(pickle.dumps(source))
        streams = [BatchStream(again, SEED, plan, rank, CPU, sizes) for rank in range(ranks)]
        for _ in range(drawn.randrange(1, 5)):
            read = [stream.at(position, step) for stream in streams]
            assert len({len(each.micro_batches) for each in read}) == 1, "ranks pass alike often"
            micro_batches = [micro for each in read for micro in each.micro_batches if micro.counts]
            ids += [micro.ids for micro in micro_batches]
            parts += [micro.data for micro in micro_batches]
            assert sum(len(micro.ids) for micro in micro_batches) == read[0].samples
            position, step = position + read[0].samples, step + 1
            if position >= until:
                break
    return np.concatenate(ids), {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}


def check_order(ids: np.ndarray, ends: np.ndarray, parts: list[Part], until: int) -> None:
    """Hold the order of a mixture against its words: shares of blocks, limits, and each sample once in an epoch."""
    gone = np.zeros(len(parts), dtype=int)
    for block in range(until // BLOCK):
        of_block = np.searchsorted(ends, ids[block * BLOCK : (block + 1) * BLOCK], side="right")
        counts = np.bincount(of_block, minlength=len(parts))
        weights = np.array([part.later if block else part.weight for part in parts])
        left = np.array([part.most - given if part.most else BLOCK for part, given in zip(parts, gone, strict=True)])
        open_ = left > 0
        share = np.where(open_, weights, 0.0) / weights[open_].sum() * BLOCK
        if (share <= left).all():
            assert np.abs(counts - share).max() <= len(parts), (block, counts, share)
        gone += counts
    for part, given in zip(parts, gone, strict=True):
        assert not part.most or given <= part.most
    times = np.bincount(ids[: until // BLOCK * BLOCK], minlength=int(ends[-1]))
    for of_source in np.split(times, ends[:-1]):
        assert of_source.max() - of_source.min() <= 1, "a source is read in epochs of its own"


@pytest.mark.parametrize("seed", range(12))
def test_what_is_drawn_together_is_what_the_guide_says(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    parts = [drawn_part(drawn, number) for number in range(drawn.choice([1, 2, 3]))]
    fields = ["score" if number % 2 == 0 else "quality" for number in range(len(parts))]
    for number, (part, field) in enumerate(zip(parts, fields, strict=True)):
        lines = [{field if name == "score" else name: value for name, value in each.items()} for each in part.lines]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    seq_len, most_tokens = drawn.choice([3, 8, 16]), drawn.choice([0, 0, 12])
    rows, apart = drawn.choice(["windows", "packed"]), drawn.random() < 0.5
    shuffle = drawn.choice(["global", "windowed", "none"])
    options: dict[str, Any] = {
        "seq_len": seq_len, "rows": rows, "cross_documents": not apart, "validation_fraction": 0.0,
        "document_tokens": most_tokens, "shuffle": shuffle, "shuffle_block": drawn.choice([4, 16]),
        "shuffle_window": drawn.choice([2, 5]), "cache_dir": str(tmp_path / "cache"), "score_field": "score",
    }  # fmt: skip
    is_mixed = len(parts) > 1
    if is_mixed:
        mix = [
            MixSpec(str(tmp_path / f"{number}.jsonl"), f"part {number}", part.weight,
                    (WeightChange(BLOCK, part.later),), most_samples=part.most,
                    score_min=part.least, score_max=part.below, score_field="" if field == "score" else field)
            for number, (part, field) in enumerate(zip(parts, fields, strict=True))
        ]  # fmt: skip
        data = DataSpec("", mix=tuple(mix), **options)
    else:
        data = DataSpec(str(tmp_path / "0.jsonl"), score_min=parts[0].least, score_max=parts[0].below, **options)
    source: Any = open_sources(data, SEED)[0]
    ends = np.cumsum([each.samples for each in source.sources]) if is_mixed else np.array([source.samples])
    whole = {name: values.numpy() for name, values in source.read(np.arange(source.samples)).items()}
    check = check_windows if rows == "windows" else check_packed
    for part, begin, end in zip(parts, [0, *ends[:-1]], ends, strict=True):
        check({name: values[begin:end] for name, values in whole.items()}, part.documents(most_tokens), seq_len, apart)
    until = 2 * BLOCK if is_mixed else 3 * source.samples
    batch = drawn.randrange(150, 400) if is_mixed else drawn.randrange(2, 60)
    ids, read = trained(source, drawn, batch, drawn.choice(["plain", "grown", "chosen"]), until)
    assert all(np.array_equal(values, whole[name][ids]) for name, values in read.items()), "content follows ids"
    if is_mixed:
        check_order(ids, ends, parts, until)
    else:
        for epoch in range(3):
            own = ids[epoch * source.samples : (epoch + 1) * source.samples]
            assert np.array_equal(np.sort(own), np.arange(source.samples))
            assert shuffle != "none" or np.array_equal(own, np.arange(source.samples))
    again, _ = trained(source, random.Random(seed + 1000), batch, "plain", until)
    assert np.array_equal(again[:until], ids[:until]), "other batches, ranks and resumes read the same samples in turn"

"""`inspect`: what it says of documents, against a walk of them; its packing is that of the samples trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.spec.task import DataSpec
from paceline.task.data.prepare.inspect import inspect
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources

ROW = 64


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_what_is_said_of_documents_is_what_they_are(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(1)
    texts = ["x" * size for size in random.integers(1, 150, 300).tolist()]  # of equal lengths many are equal
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options: dict[str, Any] = {"seq_len": ROW, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}
    data = DataSpec(str(tmp_path / "a.jsonl"), **options)
    if kind == "shards":
        prepare(data, tmp_path / "shards")
        data = DataSpec(str(tmp_path / "shards"), **options)
    found = inspect(data, samples=2)
    facts = found.splits["train"]
    lengths = np.array([len(text) + 1 for text in texts])
    assert (facts.documents, facts.tokens, facts.samples) == (300, lengths.sum(), (lengths.sum() - 1) // ROW)
    assert facts.lengths["longest"] == lengths.max() and facts.lengths["mean"] == pytest.approx(
        lengths.mean(), abs=0.01
    )
    assert facts.duplicates == pytest.approx(1 - len(set(texts)) / 300) and facts.hashed == 300
    assert facts.padded == pytest.approx(1 - lengths.mean() / lengths.max())
    ends = lengths.cumsum()
    assert facts.cut == pytest.approx(np.mean((ends - lengths) // ROW != (ends - 1) // ROW))
    packed = DataSpec(data.source, rows="packed", **options)
    labels = open_sources(packed, 7)[0]
    counted = (labels.read(np.arange(labels.samples))["labels"] >= 0).float().mean()
    assert facts.packed == pytest.approx(1 - float(counted))
    assert len(found.samples) == 2 and all(set(text) == {"x"} for text in found.samples)

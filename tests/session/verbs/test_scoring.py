"""Documents scored by a run's model: the score is their loss, and a later task reads those that it selects."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests_shared import plan_of

from paceline.errors import ConfigError
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.session.verbs.scoring import score_documents
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.supervise.told.brief import Brief
from paceline.task.data.source import open_sources
from paceline.task.objective import next_token

SEQ_LEN = 24
MODEL = ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents, and a run that was trained on the first half of them: words, and not the numbers."""
    folder = tmp_path_factory.mktemp("scoring")
    words = [f'{{"text": "{"the same words again " * (1 + number % 3)}"}}' for number in range(12)]
    numbers = [f'{{"text": "{7919 ** (3 + number)}"}}' for number in range(12)]
    (folder / "words.jsonl").write_text("\n".join(words))
    (folder / "all.jsonl").write_text("\n".join([*words, *numbers]))
    data = DataSpec(
        str(folder / "words.jsonl"), seq_len=SEQ_LEN, rows="packed", cross_documents=False, validation_fraction=0.0,
        cache_dir=str(folder / "cache"),
    )  # fmt: skip
    task = Task(model=MODEL, data=data, seed=3, global_batch="8 samples", optimizer=OptimizerSpec(lr=1e-2))
    spec = Spec(task=task, cluster=ClusterSpec(learn=False), run=RunSpec(checkpoint_every=None, evaluate_every=None))
    brief = Brief(
        plan_of(Layout(), 8, 8), 20, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord()
    )
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), folder / "run")
    for batch in training:
        training.step(batch)
    torch.save(training.model.state_dict(), folder / "weights.pt")
    return folder


def test_scores_are_the_losses_of_documents_and_select_them(folder: Path) -> None:
    out = folder / "scored.jsonl"
    done = score_documents(folder / "run", DataSpec(str(folder / "all.jsonl"), cache_dir=str(folder / "cache")), out)
    scored = [json.loads(line) for line in out.read_text().splitlines()]
    assert done.documents == len(scored) == 24 and done.step == 20
    assert max(each["score"] for each in scored[:12]) < min(each["score"] for each in scored[12:])
    data = DataSpec(
        str(out), seq_len=SEQ_LEN, rows="packed", validation_fraction=0.0, cache_dir=str(folder / "cache"),
        score_max=max(each["score"] for each in scored[:12]) + 1e-9,
    )  # fmt: skip
    kept, _ = open_sources(data, 7)
    words, _ = open_sources(replace(data, source=str(folder / "words.jsonl"), score_max=None), 7)
    assert kept.fingerprint == words.fingerprint, "the selected documents are the words, and nothing else"


def test_a_score_is_what_the_objective_says_of_the_document_alone(folder: Path) -> None:
    from paceline.task.models.build import build_model

    out = folder / "one.jsonl"
    score_documents(folder / "run", DataSpec(str(folder / "words.jsonl"), cache_dir=str(folder / "cache")), out)
    model = build_model(MODEL, 257, SEQ_LEN, 3).eval()
    model.load_state_dict(torch.load(folder / "weights.pt"))
    for line in out.read_text().splitlines()[:3]:
        record = json.loads(line)
        tokens = torch.tensor([256, *record["text"].encode(), 256])
        total = weight = 0.0
        for at in range(0, len(tokens) - 1, SEQ_LEN):
            piece = tokens[at : at + SEQ_LEN + 1]
            loss, count = next_token(model, {"tokens": piece[None, :-1], "labels": piece[None, 1:]})
            total, weight = total + float(loss.detach()), weight + float(count)
        assert record["score"] == pytest.approx(total / weight, rel=1e-5)


def test_entropy_is_below_that_of_guessing(folder: Path) -> None:
    out = folder / "entropy.jsonl"
    data = DataSpec(str(folder / "all.jsonl"), cache_dir=str(folder / "cache"))
    done = score_documents(folder / "run", data, out, by="uncertainty")
    assert 0 < done.quantiles["lowest"] <= done.quantiles["median"] < math.log(257)


def test_a_run_without_checkpoints_scores_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoints"):
        score_documents(tmp_path, DataSpec("stdlib"), tmp_path / "out.jsonl")


def test_a_core_set_has_documents_of_every_kind_before_copies(folder: Path) -> None:
    """24 documents, of which twelve are three different ones: a set of half of them leaves out copies alone."""
    out, data = folder / "core.jsonl", DataSpec(str(folder / "all.jsonl"), cache_dir=str(folder / "cache"))
    done = score_documents(folder / "run", data, out, by="core", share=0.5)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    texts, scores = [record["text"] for record in records], [record["score"] for record in records]
    taken = [text for text, score in zip(texts, scores, strict=True) if score < 1]
    assert done.core is not None and len(taken) == done.core.documents == 12 == len(set(taken))
    assert sorted(score for score in scores if score < 1) == [place / 24 for place in range(12)]
    assert 0 < done.core.radius < done.core.radius_of_one
    kept, _ = open_sources(
        DataSpec(str(out), seq_len=SEQ_LEN, validation_fraction=0.0, cache_dir=str(folder / "cache"), score_max=1.0), 7
    )
    assert kept.samples < open_sources(replace(data, seq_len=SEQ_LEN, validation_fraction=0.0), 7)[0].samples

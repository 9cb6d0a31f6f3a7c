"""The built-in metrics against scikit-learn on whole sets, however the samples are cut; and what is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

from paceline.errors import ConfigError
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.task.metrics.built_in import BitsPerByte
from paceline.task.metrics.metric import LossTotal, Metric
from paceline.task.metrics.own import OwnMetric
from paceline.task.metrics.resolve import metrics_of
from paceline.task.metrics.token_bytes import bytes_of_tokens
from paceline.task.objective import classification, next_token, regression

LOSS = LossTotal(12.0, 8.0)


def made(*names: Any, objective: Any = classification, cp: int = 1) -> tuple[Metric, ...]:
    return metrics_of(EvaluateSpec(metrics=names), SimpleNamespace(vocab=None), objective, cp)


def value(metric: Metric, parts: list[tuple[Any, Any]]) -> float:
    """Return the metric over parts of the samples, as they are added up."""
    sums: dict[str, Any] = {}
    for outputs, batch in parts:
        for name, found in metric.measure(outputs, batch).items():
            sums[name] = sums.get(name, 0.0) + found.double().reshape(-1).numpy()
    (only,) = metric.values(sums, LOSS).values()
    return only


def cut(outputs: torch.Tensor, labels: torch.Tensor, cuts: list[int]) -> list[tuple[Any, Any]]:
    places = [0, *sorted(at % (len(labels) + 1) for at in cuts), len(labels)]
    return [(outputs[a:b], {"x": outputs[a:b], "labels": labels[a:b]}) for a, b in itertools.pairwise(places)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 7), st.lists(st.integers(0, 40), max_size=4))
def test_classes_are_as_scikit_learn_has_them(seed: int, rows: int, classes: int, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator)
    labels = torch.randint(-1, classes, (rows,), generator=generator)
    labels[labels < 0] = -100
    kept = labels != -100
    true, scores = labels[kept].numpy(), logits[kept].numpy()
    found = {metric.name: value(metric, cut(logits, labels, cuts))
             for metric in made("accuracy", "top_3", "f1_macro", "f1_micro")}  # fmt: skip
    if not len(true):
        assert all(map(math.isnan, found.values()))
        return
    best = scores.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(true, best), rel=1e-12)
    assert found["f1_macro"] == pytest.approx(sklearn.f1_score(true, best, average="macro", zero_division=0), rel=1e-12)
    assert found["f1_micro"] == pytest.approx(sklearn.f1_score(true, best, average="micro"), rel=1e-12)
    top = np.argsort(-scores, axis=1)[:, :3]
    assert found["top_3"] == pytest.approx(np.mean([label in row for label, row in zip(true, top, strict=True)]))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30), st.integers(1, 4), st.lists(st.integers(0, 40), max_size=4))
def test_columns_that_say_yes_or_no_are_as_scikit_learn_has_them(
    seed: int, rows: int, columns: int, cuts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=generator)
    labels = torch.randint(0, 2, (rows, columns), generator=generator).float()
    labels[0], logits[0] = 1.0, 1.0  # every column is met
    parts = cut(logits, labels, cuts)
    found = {metric.name: value(metric, parts) for metric in made("accuracy", "f1_macro", "f1_micro")}
    true, yes = labels.numpy().astype(int), (logits > 0).numpy().astype(int)
    assert found["accuracy"] == pytest.approx((true == yes).mean())
    assert found["f1_macro"] == pytest.approx(
        np.mean([sklearn.f1_score(true[:, c], yes[:, c]) for c in range(columns)])
    )
    assert found["f1_micro"] == pytest.approx(sklearn.f1_score(true.reshape(-1), yes.reshape(-1)))


def test_numbers_are_as_scikit_learn_has_them_and_not_means_of_means() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, labels = torch.randn(11, 1, generator=generator), torch.randn(11, generator=generator)
    for metric, expected in zip(made("rmse", "mae"), (math.sqrt(sklearn.mean_squared_error(labels, outputs)),
                                sklearn.mean_absolute_error(labels, outputs)), strict=True):  # fmt: skip
        parts = cut(outputs, labels, [1, 3])
        assert value(metric, parts) == pytest.approx(expected, rel=1e-6)
        of_parts = [value(metric, [part]) for part in parts]
        assert np.mean(of_parts) != pytest.approx(expected, rel=1e-3), "uneven parts would show a mean of means"


def test_labels_that_are_no_numbers_count_in_no_metric_as_in_the_loss() -> None:
    outputs, labels = torch.tensor([[1.5], [2.0], [4.0]]), torch.tensor([1.0, math.nan, 3.0])
    expected = {"rmse": math.sqrt((0.25 + 1) / 2), "mae": 0.75}
    for metric in made(*expected):
        assert value(metric, cut(outputs, labels, [1])) == pytest.approx(expected[metric.name])
    loss, weight = regression(torch.nn.Identity(), (outputs, labels))
    assert float(loss / weight) == pytest.approx(expected["rmse"] ** 2)


def per_row(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.sum(1)


def several(outputs: Any, batch: Any) -> dict[str, Any]:
    return {"low": (outputs.min(), 1), "sum": outputs.sum(1)}


def of_mean(outputs: Any, batch: Any) -> torch.Tensor:
    return outputs.mean()


def test_functions_of_ones_own_give_rows_pairs_or_several() -> None:
    outputs = torch.arange(12.0).reshape(6, 2)
    parts = [(outputs[:1], None), (outputs[1:], None)]
    row, _ = made(per_row, several)
    assert value(row, parts) == 11.0
    found = made(several)[0]
    sums: dict[str, Any] = {}
    for part, batch in parts:
        sums = {n: sums.get(n, 0.0) + v.numpy() for n, v in found.measure(part, batch).items()}
    assert found.values(sums, LOSS) == {"low": 1.0, "sum": 11.0}
    with pytest.raises(ConfigError, match="does not add up"):
        made(of_mean)[0].measure(outputs, None)


class Keeps:
    """A metric that keeps a state, and does not say what it is."""

    def __call__(self, outputs: Any, batch: Any) -> float:
        return 0.0

    update = compute = reset = __call__


def test_a_tensor_without_values_is_refused() -> None:
    metric = OwnMetric(lambda outputs, batch: (torch.zeros((), device="meta"), 1), "mine")
    with pytest.raises(ConfigError, match="device 'meta'"):
        metric.measure(None, None)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="one rank's samples alone"):
        made(Keeps())
    with pytest.raises(ConfigError, match="language models"):
        made("perplexity")
    with pytest.raises(ConfigError, match="cp = 2"):
        made(per_row, cp=2)
    with pytest.raises(ConfigError, match="tokenised here"):
        made("bits_per_byte", objective=next_token)
    accuracy, rmse = made("accuracy", "rmse")
    with pytest.raises(ConfigError, match=r"\[3, 2\] with labels \[4\]"):
        accuracy.measure(torch.zeros(3, 2), (None, torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="no labels"):
        rmse.measure(torch.zeros(3), {"x": torch.zeros(3)})
    with pytest.raises(ConfigError, match="a tuple"):
        accuracy.measure((1, 2), (None, torch.zeros(4, dtype=torch.int64)))


def makes_one() -> object:
    return object()


def with_more(outputs: object, batch: object, share: float = 0.5) -> tuple[int, int]:
    return 1, 2


def test_what_makes_a_metric_is_no_metric_and_told_before_training() -> None:
    """It ended in a TypeError at the first evaluation, as a defect of Paceline."""
    source: Any = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"'makes_one' cannot be called with \(outputs, batch\)") as raised:
        metrics_of(EvaluateSpec(metrics=(makes_one,)), source, classification)
    assert "named as an object" in raised.value.try_
    assert [each.name for each in metrics_of(EvaluateSpec(metrics=(with_more, max)), source, classification)]


def test_a_token_stands_for_its_bytes(tmp_path: Path) -> None:
    """Bytes of byte-level tokens are those of the text that they spell; other tokenizers are refused."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    text = "größer als jede Äpfelwiese, größer als alles: 日本語"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    source: Any = SimpleNamespace(split=SimpleNamespace(folder=str(tmp_path)), vocab=tokenizer.get_vocab_size())
    table = bytes_of_tokens(source)
    ids = tokenizer.encode(text).ids
    assert table[ids].sum() == len(text.encode()) and len(ids) < len(text.encode())
    assert table[tokenizer.token_to_id("<|endoftext|>")] == 0
    labels = torch.tensor([[*ids, -100, tokenizer.token_to_id("<|endoftext|>")]])
    metric = BitsPerByte(table)
    loss = LossTotal(math.log(2) * len(text.encode()), len(ids) + 1.0)
    sums = {
        name: found.double().reshape(-1).numpy() for name, found in metric.measure(None, {"labels": labels}).items()
    }
    assert metric.values(sums, loss) == {"bits_per_byte": pytest.approx(1.0)}
    written = json.loads(tokenizer.to_str())
    listed = {**written, "model": {"type": "Unigram", "vocab": [["a", -1.0], ["\u0120bc", -2.0]], "unk_id": None}}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**listed, "added_tokens": []}))
    assert bytes_of_tokens(source)[:3].tolist() == [1, 3, 0]
    written["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="neighbours"):
        bytes_of_tokens(source)

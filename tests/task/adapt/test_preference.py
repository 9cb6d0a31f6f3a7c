"""Preference pairs: the loss by hand and as trl writes it, on every layout, and the rows of a file of pairs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from tests_shared import decoder_task, plan_of

from paceline.errors import ConfigError, DataError
from paceline.run.process.world import join_world
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.adapt.preference import PreferenceSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec, Task
from paceline.task.adapt.preference import PreferenceLoss, adapters_off, log_margins
from paceline.task.data.pairs import PreferencePairs, preference_pairs
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.models.build import build_model
from paceline.task.profile.limits import check_reference
from paceline.verify.compare.layout import compare

SEQ, VOCAB = 12, 61
MODEL = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, tied=False)
LORA = AdapterSpec(kind="lora", rank=3, init="random")


class Pairs:
    """A source of random pairs of which parts do not count."""

    samples, items_per_sample, unit, vocab, fingerprint = 200, 1, "samples", VOCAB, "pairs"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return pairs that depend on their ids alone."""
        tokens, labels = torch.empty(len(ids), 2, SEQ, dtype=torch.int64), torch.empty(len(ids), 2, SEQ).long()
        for row, number in enumerate(ids):
            generator = torch.Generator().manual_seed(int(number))
            drawn = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
            tokens[row], labels[row] = drawn[:, :-1], drawn[:, 1:]
            labels[row, :, : int(number) % 7] = -100
        return {"tokens": tokens, "labels": labels}


def built(adapter: AdapterSpec = LORA) -> Any:
    return build_model(MODEL, VOCAB, SEQ, seed=3, adaptation=Adaptation(adapter)).double()


def by_hand(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the log-probability of a row's labels, one by one."""
    logits = model(tokens[None])[0]
    chances = (logits.softmax(-1)[at, int(label)] for at, label in enumerate(labels) if label != -100)
    return sum(math.log(float(chance.detach())) for chance in chances)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(smoothing: float) -> None:
    model, batch = built(), Pairs().read(np.arange(3))
    loss, count = PreferenceLoss(0.3, smoothing)(model, batch)
    expected = 0.0
    for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
        own = [by_hand(model, *row) for row in zip(tokens, labels, strict=True)]
        with adapters_off(model):
            base = [by_hand(model, *row) for row in zip(tokens, labels, strict=True)]
        h = 0.3 * ((own[0] - base[0]) - (own[1] - base[1]))
        expected -= (1 - smoothing) * -math.log(1 + math.exp(-h)) + smoothing * -math.log(1 + math.exp(h))
    assert int(count) == 3 and float(loss.detach()) == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_that_of_trl() -> None:
    # trl's DPOTrainer, loss_type "sigmoid": logits are ratios of the model's pair less ratios of the reference's.
    model, batch = built(), Pairs().read(np.arange(4))
    margins = log_margins(model, batch)
    theirs = -F.logsigmoid(0.1 * margins) * (1 - 0.05) - F.logsigmoid(-0.1 * margins) * 0.05
    torch.testing.assert_close(PreferenceLoss(0.1, 0.05)(model, batch)[0], theirs.sum())


def test_at_the_start_a_model_prefers_what_its_base_does() -> None:
    model = built(dataclasses.replace(LORA, init="kaiming"))
    loss, count = PreferenceLoss()(model, Pairs().read(np.arange(5)))
    torch.testing.assert_close(loss / count, torch.tensor(math.log(2.0), dtype=torch.float64))
    loss.backward()
    assert all((p.grad is None) == (not p.requires_grad) for p in model.parameters())


def task() -> Task:
    spec = PreferenceSpec(beta=0.5, label_smoothing=0.1)
    return decoder_task(model=MODEL, data=Pairs(), objective="dpo", adapter=LORA, preference=spec)


def compared(plans: list[Plan], adapters: list[AdapterSpec]) -> list[CheckProof]:
    """Return comparisons with one device."""
    world = join_world("cpu", threads=1)
    tasks = [dataclasses.replace(task(), adapter=adapter) for adapter in adapters]
    return [compare(one, plan, world, one.data, 1, 2) for plan in plans for one in tasks]


@pytest.mark.parametrize(
    "plans",
    [[plan_of(Layout(dp_shard=2), precision="fp64", zero=zero) for zero in (1, 3)],
     [plan_of(Layout(tp=2), precision="fp64"), plan_of(Layout(dp_replicate=2), precision="fp64", recompute="full")]],
    ids=lambda plans: str(plans[0].layout),
)  # fmt: skip
def test_preference_pairs_equal_one_device(plans: list[Plan]) -> None:
    for proof in run_ranks(compared, 2, plans, [LORA, dataclasses.replace(LORA, kind="dora", dropout=0.2)])[0]:
        assert proof.equal, proof.first_difference


def test_a_base_that_is_trained_is_no_reference() -> None:
    for changes in ({"adapter": AdapterSpec()}, {"train": ("lm_head",)}):
        with pytest.raises(ConfigError, match="frozen base as its reference"):
            check_reference(dataclasses.replace(task(), **changes))
    with pytest.raises(ConfigError, match="without adapters"):
        PreferenceLoss()(build_model(MODEL, VOCAB, SEQ, 3), Pairs().read(np.arange(1)))


def test_rows_of_pairs() -> None:
    pairs, end = PreferencePairs([("ab", "cd", "e")], 6, ByteTokenizer()), ByteTokenizer().end_of_document
    row = pairs[0]
    assert row["tokens"].tolist() == [[*b"abcd", end, end], [*b"abe", end, end, end]]
    assert row["labels"].tolist() == [[-100, *b"cd", end, -100, -100], [-100, *b"e", end, -100, -100, -100]]
    short = PreferencePairs([("abcdef", "gh", "ijklmn")], 4, ByteTokenizer())[0]
    assert short["tokens"].tolist() == [[*b"efgh"], [*b"fijk"]]  # what is left of a prompt is its end
    assert short["labels"].tolist() == [[-100, *b"gh", end], [*b"ijkl"]]


def test_a_file_of_pairs(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    train, held_out = preference_pairs(str(tmp_path / "pairs.jsonl"), 16, held_out=2)  # type: ignore[misc]
    assert (len(train), len(held_out), train.vocab) == (3, 2, ByteTokenizer().vocab)
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(DataError, match=r"wrong\.jsonl:1 is no preference pair"):
        preference_pairs(str(tmp_path / "wrong.jsonl"), 16)

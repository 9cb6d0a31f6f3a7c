"""Entries of a batch that an objective never reads are found, whatever way it reads the others, and said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_huggingface import Rows, causal, hf_task
from tests_shared import VOCAB, decoder_task, plan_of
from torch import Tensor, nn

from paceline.run.assemble import assemble
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.task.entries_read import Reading
from paceline.task.objective import next_token
from paceline.task.profile.plain import pack_profile, unpack_profile
from paceline.task.profile.traced import profile_module

BATCH = {"tokens": torch.zeros(2, 4, dtype=torch.long), "labels": torch.ones(2, 4, dtype=torch.long),
         "attention_mask": torch.ones(2, 4), "weights": torch.ones(2)}  # fmt: skip

WAYS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "by name": (lambda b: (b["tokens"], b["labels"]), ("attention_mask", "weights")),
    "get": (lambda b: (b.get("tokens"), b.get("absent")), ("labels", "attention_mask", "weights")),
    "pop": (lambda b: b.pop("weights"), ("tokens", "labels", "attention_mask")),
    "asked for, not read": (lambda b: "weights" in b and len(b) and sorted(b), tuple(BATCH)),
    "copied": (lambda b: b.copy()["tokens"], ("labels", "attention_mask", "weights")),
    "values": (lambda b: [value.sum() for value in b.values()], ()),
    "items": (lambda b: {name: value.clone() for name, value in b.items()}, ()),
    "as keywords": (lambda b: dict(**b), ()),
    "spread": (lambda b: {**b, "more": 1}, ()),
    "dict": (lambda b: dict(b), ()),
    "joined": (lambda b: b | {"more": 1}, ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_reads_are_seen(way: str) -> None:
    read, unread = WAYS[way]
    reading = Reading(lambda model, batch: read(batch))  # type: ignore[arg-type,return-value]
    reading(None, dict(BATCH))
    assert reading.unread == unread


def masked_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a loss of one's own that forgets the mask."""
    logits = model(batch["tokens"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), torch.tensor(
        1
    )


class Plain(nn.Module):
    """A language model that takes tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.embed(tokens))


@pytest.mark.parametrize(("objective", "name"), [(masked_loss, "masked_loss"), (next_token, "next_token")])
def test_plan_and_training_say_what_has_no_effect(objective: Any, name: str) -> None:
    source = Rows(16, "left")
    profile = profile_module(Plain(), source.read(torch.arange(2).numpy()), objective)
    (said,) = profile.remarks
    assert said.startswith(f"the batch's attention_mask: not read by the objective {name}, and without effect")
    assert unpack_profile(pack_profile(profile)).remarks == profile.remarks, "on its way from the process that traces"
    task = decoder_task(model=Plain, data=source, objective=objective)
    built = assemble(task, plan_of(Layout()), join_world("cpu", threads=1), source, 16)
    assert [remark for remark in built.remarks if "attention_mask" in remark] == [said]


def only_dicts(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return a loss by an objective that takes no subclass of dict."""
    assert type(batch) is dict
    return next_token(model, batch)


def test_an_objective_that_takes_plain_dicts_alone_is_not_disturbed() -> None:
    source = Rows(16, "left")
    profile = profile_module(Plain(), source.read(torch.arange(2).numpy()), only_dicts)
    assert profile.remarks == () and profile.source == "traced"


def test_next_token_hands_a_mask_to_models_of_transformers() -> None:
    task, model = hf_task("Llama", 16, "left"), causal("Llama").double()
    batch = task.data.read(torch.arange(6).numpy())
    loss, count = next_token(model, batch)
    logits = model(input_ids=batch["tokens"], attention_mask=batch["attention_mask"]).logits
    counted = batch["labels"] != -100
    expected = nn.functional.cross_entropy(logits[counted], batch["labels"][counted], reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12) and int(count) == int(
        counted.sum()
    )
    without, _ = next_token(model, {name: batch[name] for name in ("tokens", "labels")})
    assert abs(float(without.detach() - expected.detach())) > 1e-6 * float(expected.detach()), "padding would count"
    assert profile_module(model.float(), batch, next_token).remarks == ()


def test_a_balance_loss_that_is_left_out_is_said_by_the_plan() -> None:
    batch = Rows(16).read(torch.arange(2).numpy())
    (said,) = profile_module(causal("Mixtral"), batch, next_token).remarks
    assert "router_aux_loss_coef = 0.001" in said and "sequence_balance" in said
    assert profile_module(causal("Mixtral", router_aux_loss_coef=0.0), batch, next_token).remarks == ()
    assert profile_module(causal("Mixtral"), batch, masked_logits).remarks == (), "an objective of one's own may add it"


def masked_logits(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of squared logits."""
    return model(batch["tokens"], use_cache=False).logits.square().sum() + 0 * batch["labels"].sum(), torch.tensor(1)

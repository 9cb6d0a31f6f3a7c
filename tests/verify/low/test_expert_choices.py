"""Choices of experts: handed over exactly, judged by what a unit in the last place moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from tests_huggingface import causal
from tests_shared import SEQ_LEN, VOCAB

from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.moe import routers
from paceline.verify.low.choices import Choices, HandedChoices, disagreeing, joined, misrouted, routed_blocks

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": VOCAB, "experts": 8, "top_k": 2}
TOKENS = torch.randint(0, VOCAB, (3, SEQ_LEN), generator=torch.Generator().manual_seed(0))


def any_choices(model: Any, experts: int) -> Choices:
    generator = torch.Generator().manual_seed(1)
    return {
        name: {at: torch.rand(SEQ_LEN, experts, generator=generator).topk(2).indices for at in range(len(TOKENS))}
        for name in routed_blocks(model)
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    return getattr(found, "logits", found)


def test_our_routers_go_where_they_are_told() -> None:
    model = build_model(ModelSpec("moe-2m", **SMALL), VOCAB, SEQ_LEN, 0)
    choices, free = any_choices(model, 8), logits(model)
    handed = HandedChoices(model, choices)
    with handed.chosen_for(range(len(TOKENS))):
        ours = logits(model)
    assert handed.is_complete() and torch.equal(logits(model), free), "outside of it a model chooses for itself"
    for (name, rows), router in zip(choices.items(), routers(model).values(), strict=True):

        def plain(x: torch.Tensor, router: Any = router, rows: Any = rows) -> Any:
            scores = F.linear(x, router.weight).softmax(-1)
            told = torch.stack([rows[at] for at in range(len(x))])
            weights = scores.gather(-1, told)
            return scores, weights / weights.sum(-1, keepdim=True) if router.renormalise else weights, told

        router.forward = plain
        assert handed.scores[name].keys() == rows.keys()
    assert torch.allclose(ours, logits(model), atol=1e-6) and not torch.allclose(ours, free, atol=1e-3)


def test_blocks_of_transformers_go_where_they_are_told() -> None:
    model: Any = causal("Mixtral")
    choices, free = any_choices(model, 4), logits(model)
    handed = HandedChoices(model, choices)
    with handed.chosen_for(range(len(TOKENS))):
        ours = logits(model)
    assert handed.is_complete()
    for rows, layer in zip(choices.values(), model.model.layers, strict=True):

        def told(gate: Any, args: Any, output: Any, rows: Any = rows) -> Any:
            indices = torch.cat([rows[at] for at in range(len(TOKENS))])
            weights = output[0].float().softmax(-1).gather(-1, indices)
            return output[0], weights / weights.sum(-1, keepdim=True), indices

        layer.mlp.gate.register_forward_hook(told)
    assert torch.allclose(ours, logits(model), atol=1e-6) and not torch.allclose(ours, free, atol=1e-3)


def test_a_model_that_is_called_twice_for_a_sample_is_not_known() -> None:
    model = build_model(ModelSpec("moe-2m", **SMALL), VOCAB, SEQ_LEN, 0)
    handed = HandedChoices(model, any_choices(model, 8))
    with handed.chosen_for(range(len(TOKENS))):
        logits(model)
        logits(model)
    assert not handed.is_complete()


def test_a_tie_is_rounding_and_a_clear_choice_is_none() -> None:
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(400, 8, generator=generator).softmax(-1)
    noise = lambda: scores + 1e-3 * torch.randn(scores.shape, generator=generator)  # noqa: E731
    chosen = noise().topk(2).indices
    moved = [{"mlp": {0: noise()}} for _ in range(8)]

    def judged(chosen: torch.Tensor) -> Any:
        (found,) = misrouted({"mlp": {0: chosen}}, {"mlp": {0: scores}}, moved)
        return found

    right = judged(chosen)
    assert right.tokens == 0 and right.near > 0 and right.of == 400, "some are nearly tied, or this shows nothing"
    wrong = chosen.clone()
    order = scores.argsort(descending=True)
    far = int((scores.gather(1, order[:, 1:2]) - scores.gather(1, order[:, 2:3])).argmax())
    wrong[far] = order[far, [0, 2]]
    assert judged(wrong).tokens == 1
    everywhere = [{"mlp": {0: torch.full_like(scores, -torch.inf)}} for _ in range(8)]
    (found,) = misrouted({"mlp": {0: wrong}}, {"mlp": {0: scores}}, everywhere)
    assert found.tokens >= 1, "scores that are not numbers move nothing"


def test_parts_of_a_sequence_are_put_together_and_gaps_are_seen() -> None:
    plan, chosen = Plan(Layout(cp=2), micro_batch=1, accumulation=1, batch_samples=1), torch.arange(5).unsqueeze(1)
    places = [torch.tensor([0, 3]), torch.tensor([1, 2, 4, 5])]  # the last fills up a sequence of five tokens
    parts = [{("mlp", 0): (at, at.unsqueeze(1))} for at in places]
    found = joined(parts, plan, length=5, first=0)
    assert found is not None and torch.equal(found["mlp"][0], chosen)
    assert joined(parts[:1], plan, length=5, first=0) is None
    two = dataclasses.replace(plan, batch_samples=2)
    assert joined(parts, two, length=5, first=0) is None, "of another sample nothing is known"
    assert joined([], plan, length=5, first=0) is None
    later = [{("mlp", 7): part["mlp", 0]} for part in parts]
    moved = joined(later, plan, length=5, first=7)
    assert moved is not None and torch.equal(moved["mlp"][7], chosen), "a later step's samples stand further on"


def test_ranks_of_a_tensor_group_must_choose_alike() -> None:
    at, layout = torch.arange(4), Layout(dp_shard=2, tp=2)
    parts = [{("mlp", row): (at, torch.full((4, 1), row))} for row in (0, 0, 1, 1)]
    assert disagreeing(parts, layout) == []
    parts[3] = {("mlp", 1): (at, torch.tensor([[1], [1], [0], [1]]))}
    assert disagreeing(parts, layout) == [3]

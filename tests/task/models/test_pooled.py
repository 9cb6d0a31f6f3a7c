"""A head on the mean over a text's tokens: what fills a row up changes nothing, and losses are sums over rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError
from paceline.task.models.pooled import pooled_decoder
from paceline.task.objective import classification, multi_label, regression

SHAPE: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48}


def batch_of(lengths: list[int], labels: torch.Tensor, width: int = 0, fill: int = 0) -> dict[str, torch.Tensor]:
    """Return rows of such lengths, filled up with a token."""
    width = width or max(lengths)
    tokens = torch.stack([(torch.arange(width) * (7 + at)) % 250 for at in range(len(lengths))])
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    return {"tokens": tokens.where(real, fill), "attention_mask": real.long(), "labels": labels}


def test_what_fills_a_row_up_changes_nothing() -> None:
    torch.manual_seed(3)
    model = pooled_decoder("llama-1m", 3, 257, **SHAPE).double()
    lengths, labels = [5, 11, 1, 8], torch.tensor([0, 2, 1, -100])
    plain = model(**{name: one for name, one in batch_of(lengths, labels).items() if name != "labels"})
    for width, fill in ((11, 99), (24, 0), (32, 256)):
        wide = batch_of(lengths, labels, width, fill)
        torch.testing.assert_close(model(wide["tokens"], wide["attention_mask"]), plain)
    for at, length in enumerate(lengths):  # a row is what it is alone
        alone = batch_of(lengths, labels)["tokens"][at : at + 1, :length]
        torch.testing.assert_close(model(alone), plain[at : at + 1])
    loss, weight = classification(model, batch_of(lengths, labels))
    wanted = -plain.log_softmax(-1)[torch.arange(3), labels[:3]].sum()
    torch.testing.assert_close(loss, wanted)
    assert int(weight) == 3


def test_losses_of_numbers_and_of_several_labels_are_sums_over_rows() -> None:
    torch.manual_seed(3)
    model = pooled_decoder("llama-1m", 1, 257, **SHAPE)
    labels = torch.tensor([1.5, -2.0, math.nan])
    batch = batch_of([4, 7, 5], labels)
    found = model(batch["tokens"], batch["attention_mask"]).squeeze(-1)
    loss, weight = regression(model, batch)
    torch.testing.assert_close(loss, ((found - labels)[:2] ** 2).sum())
    assert int(weight) == 2
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    several = pooled_decoder("llama-1m", 2, 257, **SHAPE)
    wanted = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    batch = batch_of([4, 7, 5], wanted)
    chance = several(batch["tokens"], batch["attention_mask"]).sigmoid()
    loss, weight = multi_label(several, batch)
    torch.testing.assert_close(loss, -(wanted * chance.log() + (1 - wanted) * (1 - chance).log()).sum())
    assert int(weight) == 6


def test_a_head_of_another_width_and_a_model_without_a_mask_are_refused() -> None:
    model = pooled_decoder("llama-1m", 3, 257, **SHAPE)
    with pytest.raises(ConfigError, match="a number for each row"):
        regression(model, batch_of([4, 7], torch.tensor([1.0, 2.0])))
    with pytest.raises(ConfigError, match="a number for each class"):
        multi_label(model, batch_of([4, 7], torch.ones(2, 2)))

    class Blind(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens.float()

    with pytest.raises(ConfigError, match="takes no argument 'attention_mask'"):
        classification(Blind(), batch_of([4, 7], torch.tensor([1, 2])))
    with pytest.raises(ConfigError, match="a llama size"):
        pooled_decoder("moe-2m", 3, 257)


def test_its_weights_are_drawn_by_the_seed() -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = pooled_decoder("llama-1m", 3, 257, **SHAPE)
        assert not model.score.bias.any()
        return model.layers[0].mlp.up_proj.weight.detach()

    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert 0.015 < float(drawn(1).std()) < 0.025

"""Objectives are sums with a weight, whatever the model returns and however the batch is cut."""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding import FP64
from torch import nn

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.coupling import is_coupled
from paceline.task.models.build import build_model
from paceline.task.objective import classification, multi_label, next_token, regression, resolve_objective
from paceline.task.profile.traced import profile_module
from paceline.task.sums import as_sum, back_through


class Wrapped(nn.Module):
    """Returns logits as transformers does, and takes its arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: dict[str, Any] = {}

    def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> SimpleNamespace:
        self.seen = {"use_cache": use_cache}
        return SimpleNamespace(logits=self.inner(input_ids))


@pytest.fixture
def tokens() -> dict[str, torch.Tensor]:
    values = torch.randint(0, 257, (4, 9), generator=torch.Generator().manual_seed(0))
    labels = values[:, 1:].clone()
    labels[1, :5] = -100
    return {"tokens": values[:, :-1], "labels": labels}


def test_next_token_is_the_same_fused_plain_and_wrapped(tokens: dict[str, torch.Tensor]) -> None:
    decoder = build_model(ModelSpec(name="llama-1m", layers=1), 257, 8, seed=0).double()
    plain = nn.Sequential(decoder)
    wrapped = Wrapped(decoder)
    expected = F.cross_entropy(decoder(tokens["tokens"]).flatten(0, 1), tokens["labels"].flatten(), reduction="sum")
    for model in (decoder, plain, wrapped):
        loss_sum, weight = next_token(model, tokens)
        torch.testing.assert_close(loss_sum, expected, rtol=FP64, atol=0)
        assert weight == 4 * 8 - 5
    assert wrapped.seen == {"use_cache": False}


def test_parts_of_a_batch_add_up(tokens: dict[str, torch.Tensor]) -> None:
    decoder = build_model(ModelSpec(name="llama-1m", layers=1), 257, 8, seed=0).double()
    whole, weight = next_token(decoder, tokens)
    parts = [next_token(decoder, {name: rows[part] for name, rows in tokens.items()}) for part in ([0], [1, 2, 3])]
    torch.testing.assert_close(sum(loss_sum for loss_sum, _ in parts), whole, rtol=1e-12, atol=0)
    assert sum(count for _, count in parts) == weight


@pytest.mark.parametrize("as_pair", [True, False])
def test_classification(as_pair: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    images, labels = torch.randn(5, 1, 2, 2, dtype=torch.float64), torch.tensor([0, 1, 2, -100, 1])
    batch = (images, labels) if as_pair else {"images": images, "labels": labels}
    loss_sum, weight = classification(model, batch)
    torch.testing.assert_close(loss_sum, F.cross_entropy(model(images), labels, reduction="sum"), rtol=FP64, atol=0)
    assert weight == 4


@pytest.mark.parametrize("as_pair", [True, False])
def test_numbers_of_ones_own_data(as_pair: bool) -> None:
    model = nn.Linear(3, 1).double()
    rows, prices = torch.randn(4, 3, dtype=torch.float64), torch.tensor([1.0, math.nan, -2.0, 0.5])
    batch = (rows, prices) if as_pair else {"rows": rows, "labels": prices}
    loss_sum, weight = regression(model, batch)
    apart = model(rows).squeeze(1)[[0, 2, 3]] - prices[[0, 2, 3]].double()
    torch.testing.assert_close(loss_sum, apart.square().sum(), rtol=FP64, atol=0)
    assert weight == 3


@pytest.mark.parametrize("as_pair", [True, False])
def test_columns_of_ones_own_data(as_pair: bool) -> None:
    model = nn.Linear(3, 2).double()
    rows, columns = torch.randn(4, 3, dtype=torch.float64), torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]])
    loss_sum, weight = multi_label(model, (rows, columns) if as_pair else {"rows": rows, "labels": columns})
    expected = F.binary_cross_entropy_with_logits(model(rows), columns.double(), reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=FP64, atol=0)
    assert weight == 8


def test_bf16_logits_give_an_fp32_loss() -> None:
    model = nn.Linear(4, 3).bfloat16()
    loss_sum, _ = classification(model, (torch.randn(5, 4).bfloat16(), torch.zeros(5, dtype=torch.int64)))
    assert loss_sum.dtype == torch.float32


def of_users(model: nn.Module, batch: Any) -> Any:
    return model(batch).sum(), 1


def test_objectives_are_resolved() -> None:
    assert resolve_objective("auto", "tokens") is next_token
    assert resolve_objective("auto", "samples") is classification
    assert resolve_objective("classification", "tokens") is classification
    assert resolve_objective(of_users, "tokens") is of_users
    assert resolve_objective("operator:add", "samples") is operator.add


@pytest.mark.parametrize(
    ("objective", "what"),
    [
        ("next_tokens", "no objective 'next_tokens'"),
        (3, "of type int"),
        ("math:pi", "of type float"),
        ("math:tau2", "names no object"),
    ],
)
def test_what_is_no_objective_is_refused(objective: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        resolve_objective(objective, "tokens")


@pytest.mark.parametrize(
    ("objective", "model", "batch", "what"),
    [
        (next_token, nn.Identity(), {"tokens": torch.zeros(1, 1)}, 'no "labels"'),
        (next_token, nn.Identity(), torch.zeros(1), 'no "tokens"'),
        (classification, nn.Identity(), {"labels": torch.zeros(1)}, "with labels"),
        (classification, nn.Identity(), [torch.zeros(1)], "of type list"),
        (classification, nn.Linear(2, 3), (torch.zeros(1, 2), torch.zeros(1)), "of torch.float32, which has fractions"),
        (regression, nn.Identity(), [torch.zeros(1)], "objective 'regression' got a batch of type list"),
        (multi_label, nn.Identity(), {"labels": torch.zeros(1)}, "objective 'multi_label' got a batch with labels"),
        (classification, nn.LSTM(2, 2), (torch.zeros(1, 2), torch.zeros(1)), "returned tuple"),
    ],
)
def test_batches_and_outputs_that_do_not_suit(objective: Any, model: nn.Module, batch: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        objective(model, batch)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (nn.MSELoss(), "nn.MSELoss(reduction='sum')(model(inputs), labels)"),
        (nn.CrossEntropyLoss, "nn.CrossEntropyLoss(reduction='sum')("),
        (F.l1_loss, "F.l1_loss(model(inputs), labels, reduction='sum')"),
        ("torch.nn.functional:mse_loss", "F.mse_loss("),
    ],
)
def test_a_loss_of_torchs_is_told_what_an_objective_is(loss: Any, line: str) -> None:
    with pytest.raises(ConfigError, match="an objective calls the model") as caught:
        resolve_objective(loss, "samples")
    assert line in caught.value.try_


def mean_alone(model: nn.Module, batch: Any) -> Any:
    return model(batch[0]).mean()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (torch.tensor(1.0), "returned a Tensor alone"),
        ((torch.tensor(1.0), 2, 3), "returned 3 values"),
        ((torch.ones(4), torch.tensor(4)), r"a loss of shape \[4\]"),
    ],
)
def test_what_is_no_sum_with_a_weight_is_told_in_words(found: Any, said: str) -> None:
    """The first thing that a user writes is a loss alone: it ended in "TypeError: iteration over a 0-d tensor"."""
    with pytest.raises(ConfigError, match=f"the objective mean_alone {said}" if "loss" not in said else said) as caught:
        as_sum(found, mean_alone)
    assert "return loss_sum, items" in caught.value.try_
    assert as_sum([torch.tensor(1.0), 2], mean_alone) == (torch.tensor(1.0), 2)


def test_items_with_a_gradient_are_told() -> None:
    """A loop by hand goes back through the division: here a part of the gradient was left out, on every layout."""
    items = torch.ones(3, requires_grad=True).sum()
    with pytest.raises(ConfigError, match="a number of items that has a gradient"):
        as_sum((torch.tensor(1.0), items), mean_alone)
    assert as_sum((torch.tensor(1.0), items.detach()), mean_alone)[1] == 3


@pytest.mark.parametrize("loss", [torch.zeros(()), 0.0, torch.ones(3, requires_grad=True).sum().detach()])
def test_a_loss_that_leads_back_to_no_weight_is_told(loss: Any) -> None:
    """torch ends the run with "element 0 of tensors does not require grad", wherever the first such batch comes."""
    with pytest.raises(ConfigError, match="the objective mean_alone returned a loss that leads back to no weight"):
        back_through(loss, mean_alone)
    weight = torch.ones(3, requires_grad=True)
    back_through(weight.sum() * 2, mean_alone)
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 3


def test_a_loss_alone_is_told_before_anything_is_planned() -> None:
    model, batch = nn.Linear(3, 1), (torch.ones(2, 3), torch.ones(2))
    with pytest.raises(ConfigError, match="the objective mean_alone returned a"):
        profile_module(model, batch, mean_alone, 1)


@pytest.mark.parametrize("value", [True, "rows"])
def test_a_coupling_that_is_declared_in_another_way_is_an_error_and_no_silence(value: object) -> None:
    def contrast(model: object, batch: object) -> None: ...

    contrast.coupled = value  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"coupled = {value!r}") as caught:
        is_coupled(torch.nn.Linear(1, 1), contrast)
    assert caught.value.try_ == 'coupled = "batch"'
    named = torch.nn.Linear(1, 1)
    named.coupled = True  # type: ignore[assignment]
    assert not is_coupled(named, lambda model, batch: None), "an attribute of a model may mean anything"

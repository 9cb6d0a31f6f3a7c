"""Hooks on gradients, weights that are changed as they are read, sparse gradients: each closes axes, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.task.touched_weights import touched_axes


def model(**options: object) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(7, 4, **options), nn.Linear(4, 7))  # type: ignore[arg-type]


def test_plain_layers_close_nothing() -> None:
    assert touched_axes(model()) == {}


REPLACED = {"dp_shard", "cp", "tp"}


@pytest.mark.parametrize("hook, closed", [
    ("register_hook", REPLACED),
    # It runs for every micro-batch, and before the gradients of copies are added up: halving what is there is another
    # step then.
    ("register_post_accumulate_grad_hook", {*REPLACED, "dp_replicate", "pp", "accumulation"}),
])  # fmt: skip
def test_a_hook_on_a_gradient_closes_the_axes_that_lose_it_or_run_it_too_often(hook: str, closed: set[str]) -> None:
    own = model()
    getattr(own[1].weight, hook)(lambda found: None)
    assert set(touched_axes(own)) == closed
    assert all("1.weight" in because for because in touched_axes(own).values())


def test_an_embedding_that_changes_its_rows_closes_all_axes_on_which_others_do_not_see_it() -> None:
    own = model(max_norm=1.0)
    before = own[0].weight.detach().clone()
    own(torch.arange(7))
    assert not torch.equal(own[0].weight, before), "it changes its weight as it is read"
    assert set(touched_axes(own)) == {"dp_replicate", "dp_shard", "cp", "tp"}


def test_sparse_gradients_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'0' of Sequential has sparse gradients"):
        touched_axes(model(sparse=True))

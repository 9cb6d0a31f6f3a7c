"""Models whose tensors are odd: weights that hooks compute, sparse buffers, shapes that nobody knows yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from paceline.errors import ConfigError
from paceline.task.models.build import build_model
from paceline.task.models.copied import copied
from paceline.task.models.unfilled import build_unfilled, stand_in


def normed() -> nn.Module:
    """Return a layer with weight norm as it was done by hooks."""
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(6, 4))


def pruned() -> nn.Module:
    """Return a layer of which a hook prunes half of the weights."""
    return prune.l1_unstructured(nn.Linear(6, 4), "weight", amount=0.5)


@pytest.mark.parametrize("make", [normed, pruned], ids=["weight norm", "pruning"])
def test_weights_that_a_hook_computes_are_copied_with_the_model(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(3, 6)
    model(x)  # the attribute is a step of a graph from here on
    assert not model.weight.is_leaf
    own = copied(model)
    assert torch.equal(own(x), model(x))
    with torch.no_grad():
        for weight in own.parameters():
            weight.mul_(2)
    assert not torch.equal(own(x), model(x)), "it is computed of the copy's own weights"
    if make is normed:
        found = build_unfilled(make, 0)
        assert found.model is not None
        assert stand_in(found.model, torch.device("cpu"))(x).shape == (3, 4)


class Sparse(nn.Module):
    """Has a sparse matrix in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("adjacent", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs."""
        return self.body(torch.sparse.mm(self.adjacent, x.T).T)


@pytest.mark.parametrize("make, named, says", [
    (Sparse, "'adjacent'", "dense tensors alone"),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)), "'1.weight'", "when it is first called"),
], ids=["sparse", "lazy"])  # fmt: skip
def test_tensors_that_cannot_be_shared_are_refused_with_what_to_try(
    make: Callable[[], nn.Module], named: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        build_model(make, 0, 0, seed=0)
    assert named in refused.value.what and says in refused.value.because and refused.value.try_

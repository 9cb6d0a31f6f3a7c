"""The loss over chunks, whole or of a vocabulary spread over ranks, against torch's own where logits are unusual."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.errors import ConfigError
from paceline.task.models.layers.loss import IGNORED, cross_entropy_sum
from paceline.task.models.layers.norm import RMSNorm
from paceline.task.models.layers.vocabulary import spread_logits_cross_entropy

VOCAB, WIDTH, TOKENS = 8, 5, 12
INFINITE, NOT_A_NUMBER = math.inf, math.nan
NOTHING = slice(0, 0)  # masked
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a head and labels, of which one does not count."""
    draws = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(count, WIDTH, generator=draws, dtype=torch.float64) for count in (TOKENS, VOCAB))
    labels = torch.randint(1, VOCAB - 2, (TOKENS,), generator=draws)
    labels[3] = IGNORED
    return hidden, head, labels


def chunked(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_sum(hidden, head, labels, 2 * VOCAB)[0]


def torchs(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.T, labels, ignore_index=IGNORED, reduction="sum")


def told(loss: Loss, hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return the loss and both gradients."""
    given = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    found = loss(*given, labels)
    return (found.detach(), *torch.autograd.grad(found, given))


@pytest.mark.parametrize("unusual", ["none", "first masked", "ignored is NaN", "ignored is large", "huge", "ignored"])
def test_unusual_logits_have_torchs_loss(unusual: str) -> None:
    hidden, head, labels = batch()
    if unusual == "first masked":  # its row stands in for that of a label that does not count
        hidden[:, 0], head[0] = 1.0, torch.tensor([-INFINITE, 0, 0, 0, 0])
    hidden[3] *= {"ignored is NaN": NOT_A_NUMBER, "ignored is large": 1e300}.get(unusual, 1.0)
    hidden *= 1e4 if unusual == "huge" else 1.0
    labels[:] = IGNORED if unusual == "ignored" else labels
    for ours, theirs in zip(told(chunked, hidden, head, labels), told(torchs, hidden, head, labels), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-10, equal_nan=True)


def spread(masked: slice, label: int) -> tuple[float, Tensor]:
    """Return the loss of logits whose vocabulary is spread, some of them masked, and its gradient."""
    hidden, head, labels = batch()
    logits, labels[1] = hidden @ head.T, label
    if masked != NOTHING:
        logits[:, masked], logits[3] = -INFINITE, NOT_A_NUMBER
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parts = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    found = spread_logits_cross_entropy(parts, labels).sum()
    found.backward()
    assert parts.grad is not None
    return float(found.detach()), parts.grad.full_tensor()


def spread_cases() -> list[tuple[float, Tensor]]:
    return [spread(slice(0, 1), 5), spread(slice(6, 8), 5), spread(NOTHING, VOCAB), spread(NOTHING, -1)]


def test_masked_logits_that_are_spread_have_torchs_loss() -> None:
    """The first row of a rank's part stands in for a label of another rank: its logit, where masked, made a NaN."""
    for masked, (loss, gradient) in zip((slice(0, 1), slice(6, 8)), run_ranks(spread_cases, 2)[0], strict=False):
        hidden, head, labels = batch()
        logits = hidden @ head.T
        logits[:, masked], logits[3], labels[1] = -INFINITE, NOT_A_NUMBER, 5
        logits.requires_grad_()
        expected = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
        torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_a_label_outside_of_a_spread_vocabulary_is_no_ordinary_loss() -> None:
    """On one device torch says so; of ranks each took the label for another one's, and the loss was a finite one."""
    hidden, head, labels = batch()
    labels[1] = VOCAB
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked(hidden, head, labels)
    for loss, _ in run_ranks(spread_cases, 2)[0][2:]:
        assert math.isnan(loss)


def penalised(loss: Loss) -> Tensor:
    """Return the gradient of a loss and of a penalty on its own gradient."""
    hidden, head, labels = batch()
    weight = torch.eye(WIDTH, dtype=torch.float64, requires_grad=True)
    found = loss(torch.tanh(hidden @ weight), head, labels)
    (first,) = torch.autograd.grad(found, weight, create_graph=True)
    (found + first.square().sum()).backward()
    assert weight.grad is not None
    return weight.grad


def test_a_second_derivative_of_gradients_taken_ahead_is_an_error() -> None:
    """A gradient penalty silently lacked what comes through the loss."""
    assert bool(penalised(torchs).isfinite().all())
    with pytest.raises(ConfigError, match="differentiated again"):
        penalised(chunked)


def test_a_norm_has_second_derivatives() -> None:
    norm = RMSNorm(WIDTH, 1e-5).double()

    def normed(apply: Callable[[Tensor], Tensor]) -> Tensor:
        norm.zero_grad()
        penalised(lambda hidden, head, labels: torchs(apply(hidden), head, labels))
        assert norm.weight.grad is not None
        return norm.weight.grad.clone()

    ours, theirs = normed(norm), normed(lambda x: F.rms_norm(x, (WIDTH,), norm.weight, 1e-5))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)

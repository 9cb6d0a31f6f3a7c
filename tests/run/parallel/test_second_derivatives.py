"""Second derivatives through what moves tensors between ranks are those of one process, as a gradient penalty needs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from distributed import run_kept
from torch import Tensor

from paceline.errors import ConfigError
from paceline.run.parallel.context import sequence_attention as context
from paceline.run.parallel.data.rows_of_all_ranks import GatheredRows
from paceline.run.parallel.expert.all_to_all import exchange_rows
from paceline.task.models.layers.collectives import add, gather, join, once, part, scatter, share

ROWS, SEQ, WIDTH, RANKS = 2, 4, 3, 2


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


WEIGHT, BACK = drawn(RANKS, WIDTH, 5, seed=1), drawn(RANKS, 5, WIDTH, seed=2)  # a part for each rank
INPUT = drawn(ROWS, SEQ, WIDTH, seed=3)
Found = tuple[Tensor, Tensor]  # gradients by the input and by the first weights


def penalised(loss_of: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> Found:
    """Return the gradients of a loss and of a penalty on its gradient by the input."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_of(x, weight)
    (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + by_x.square().sum()).backward()
    assert x.grad is not None and weight.grad is not None
    return x.grad, weight.grad


def told(y: Tensor) -> Tensor:
    return y.pow(3).sum() + y.sin().sum()


def whole(x: Tensor, weight: Tensor) -> Tensor:
    """A feed-forward layer whose parts are summed, in one process."""
    return told(x + sum(torch.tanh(x @ weight[rank]) @ BACK[rank] for rank in range(RANKS)))


def alike(x: Tensor, weight: Tensor) -> Tensor:
    """A layer that all ranks compute alike."""
    return told(torch.tanh(x @ weight[0]) @ BACK[0])


def shared_and_added(x: Tensor, weight: Tensor) -> Tensor:
    group = dist.group.WORLD
    return told(x + add(torch.tanh(share(x, group) @ weight) @ BACK[dist.get_rank()], group))


def gathered_and_scattered(x: Tensor, weight: Tensor) -> Tensor:
    group = dist.group.WORLD
    return told(x + scatter(torch.tanh(gather(x, group) @ weight) @ BACK[dist.get_rank()], group))


def joined_and_parted(x: Tensor, weight: Tensor) -> Tensor:
    return told(part(torch.tanh(join(x, dist.group.WORLD) @ weight) @ BACK[0], dist.group.WORLD))


def on_one_of_them(x: Tensor, weight: Tensor) -> Tensor:
    return told(once(torch.tanh(share(x, dist.group.WORLD) @ weight) @ BACK[0], dist.group.WORLD))


def on_ranks(move: Callable[[Tensor, Tensor], Tensor], is_split: bool, is_alike: bool) -> Found:
    rank = dist.get_rank()
    return penalised(move, INPUT.chunk(RANKS, 1)[rank] if is_split else INPUT, WEIGHT[0 if is_alike else rank])


@pytest.mark.parametrize(
    ("move", "reference", "is_split"),
    [
        (shared_and_added, whole, False), (gathered_and_scattered, whole, True),
        (joined_and_parted, alike, True), (on_one_of_them, alike, False),
    ],
)  # fmt: skip
def test_moves_of_activations(move: Callable[..., Tensor], reference: Callable[..., Tensor], is_split: bool) -> None:
    """Without a word the gradient of the penalty ended at the first sum over ranks."""
    by_x, by_weight = penalised(reference, INPUT, WEIGHT)
    found = run_kept(on_ranks, RANKS, move, is_split, reference is alike)
    for rank, (ours, _) in enumerate(found):
        torch.testing.assert_close(ours, by_x.chunk(RANKS, 1)[rank] if is_split else by_x)
    if move is on_one_of_them:  # the others send zeros back
        torch.testing.assert_close(found[0][1] + found[1][1], by_weight[0])
        return
    for rank, (_, ours) in enumerate(found):
        torch.testing.assert_close(ours, by_weight[0 if reference is alike else rank])


def contrasted(x: Tensor, everyone: Tensor, own: slice) -> Tensor:
    return torch.nn.functional.cross_entropy(
        x @ everyone.T, torch.arange(len(everyone), device=x.device)[own], reduction="sum"
    )


UNEVEN = (slice(0, 3), slice(3, 4))  # rows of each rank


def contrast_of_all() -> Found:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.tanh(x @ weight)
        return contrasted(rows, rows, slice(None))

    return penalised(loss, INPUT[0], WEIGHT[0])


def contrast_on_ranks() -> Found:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.tanh(x @ weight)
        everyone, own = GatheredRows(dist.group.WORLD)(rows)
        return contrasted(rows, everyone, own)

    return penalised(loss, INPUT[0][UNEVEN[dist.get_rank()]], WEIGHT[0])


def test_rows_of_all_ranks() -> None:
    by_x, by_weight = contrast_of_all()
    found = run_kept(contrast_on_ranks, RANKS)
    torch.testing.assert_close(torch.cat([ours for ours, _ in found]), by_x)
    torch.testing.assert_close(found[0][1] + found[1][1], by_weight)


SENT = ((1, 2), (1, 0))  # rows that each rank sends to each


def exchanged() -> Found:
    """Rows go to the rank of their expert, and back."""
    rank, group = dist.get_rank(), dist.group.WORLD
    sent, arriving = list(SENT[rank]), [each[rank] for each in SENT]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        rows = exchange_rows(x, arriving, sent, group)
        return told(exchange_rows(torch.tanh(rows @ weight) @ BACK[rank], sent, arriving, group))

    return penalised(loss, INPUT[0][UNEVEN[rank]], WEIGHT[rank])


def test_rows_that_travel_to_their_experts() -> None:
    experts = [expert for sent in SENT for expert, count in enumerate(sent) for _ in range(count)]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return told(torch.stack([torch.tanh(row @ weight[at]) @ BACK[at] for row, at in zip(x, experts, strict=True)]))

    by_x, by_weight = penalised(loss, INPUT[0], WEIGHT)
    found = run_kept(exchanged, RANKS)
    torch.testing.assert_close(torch.cat([ours for ours, _ in found]), by_x)
    torch.testing.assert_close(torch.stack([ours for _, ours in found]), by_weight)


def sequences_shared() -> tuple[Found, str]:
    """Keys that are gathered whole have second derivatives; attention over shared sequences says that it has none."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        keys = context.whole_sequence(torch.tanh(x @ weight), name)
        return (keys.pow(3) * (rank + 1)).sum()

    found = penalised(loss, KEYS.unflatten(3, (4, 1))[:, :, :, [rank, 3 - rank]].flatten(3, 4), WEIGHT[0])
    q = drawn(1, 2, 4, 8, seed=rank)
    try:
        penalised(lambda x, w: told(context.sequence_attention(x * w, q, q, name, "gather")[0]), q, drawn(1, seed=5))
    except ConfigError as error:
        return found, str(error)
    return found, "no error"


KEYS = drawn(2, 1, 2, 4, WIDTH, seed=6)  # [2, rows, heads, tokens, head_dim]


def test_shared_sequences() -> None:
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (torch.tanh(x @ weight).pow(3) * 3).sum()

    by_x, by_weight = penalised(loss, KEYS, WEIGHT[0])
    found = run_kept(sequences_shared, RANKS)
    for rank, ((ours, _), said) in enumerate(found):
        torch.testing.assert_close(ours, by_x[:, :, :, [rank, 3 - rank]])
        assert "is differentiated again" in said and "plan.cp = 1" in said
    torch.testing.assert_close(found[0][0][1] + found[1][0][1], by_weight)

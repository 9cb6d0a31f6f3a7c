"""Programs that nobody here designed for, on every data layout, against a plain torch loop."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_kept, run_ranks
from programs import CLASSES, EVERY_LAYOUT, WIDTH, Block, Stack, assert_like_plain, cross_entropy, laid_out, plain_loop
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.parallel.calls import Calls
from paceline.spec.layout import Layout


class InnerChoice(Stack):
    """Each batch passes one of two layers beside the blocks, by its data: ranks reach different weights."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits; rows of one kind go left, the others right, and a layer without rows is not called."""
        x = self.stem(x) * self.scale
        kinds = x.detach()[:, 0] > 0.4
        out = torch.zeros_like(x)
        for side, layer in ((kinds, self.left), (~kinds, self.right)):
            if side.any():
                out = out + torch.where(side[:, None], layer(x), 0.0)
        for block in self.blocks:
            out = block(out)
        return self.head(out)


class TiedBlocks(Stack):
    """Two blocks that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[0].linear.weight


class Scalars(Stack):
    """A parameter without dimensions at the top and one in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * block.gain
        return self.head(x) * self.temperature


class ScaledBlock(Block):
    """A block with a gain that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class InnerScalars(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Twice(Stack):
    """Calls its blocks in another order, one of them twice, and one never."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in (2, 0, 2):
            x = self.blocks[index](x)
        return self.head(x)


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].norm.weight.requires_grad_(False)
        self.stem.requires_grad_(False)


class Bare(nn.Module):
    """A model of two layers, without repeated blocks, whose encoder the objective calls by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.encode(x))


class Encoding(Stack):
    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def encodes(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call a method of the model, never the model."""
    return (model.encode(batch["x"]) ** 2).sum(), torch.tensor(len(batch["x"]))


def encodes_and_calls(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call a method of the model, and then the model."""
    hidden = model.encode(batch["x"]).square().sum()
    loss, weight = cross_entropy(model, batch)
    return loss + 0.1 * hidden, weight


def calls_parts(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call a block first, then a layer outside of the blocks, and use a weight by itself."""
    x = model.blocks[1](batch["x"])
    x = model.head(x) @ model.head.weight
    return x.square().sum(), torch.tensor(len(x))


class EmptyParts(Stack):
    """Modules without parameters between those with, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), nn.Tanh(), Block()])
        self.nothing = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


PROGRAMS = {
    "inner choice": (InnerChoice, cross_entropy),
    "tied blocks": (TiedBlocks, cross_entropy),
    "scalars": (InnerScalars, cross_entropy),
    "twice": (Twice, cross_entropy),
    "frozen": (Frozen, cross_entropy),
    "encode": (Encoding, encodes),
    "encode bare": (Bare, encodes),
    "encode and call": (Encoding, encodes_and_calls),
    "parts": (Stack, calls_parts),
    "empty parts": (EmptyParts, cross_entropy),
}


def all_of(programs: list[str], layout: Layout, zero: int, **options: Any) -> dict[str, Any]:
    """Return what each program computes under one layout."""
    return {name: laid_out(*PROGRAMS[name], layout, zero, **options) for name in programs}


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return {name: plain_loop(factory, objective) for name, (factory, objective) in PROGRAMS.items()}


@pytest.mark.parametrize(("layout", "zero"), EVERY_LAYOUT, ids=str)
def test_programs_train_as_plain_loops(layout: Layout, zero: int, plain: dict[str, Any]) -> None:
    ranks = run_kept(all_of, layout.devices, list(PROGRAMS), layout, zero)
    for name, expected in plain.items():
        assert_like_plain([rank[name] for rank in ranks], expected)


UNDER_FORWARD = ["inner choice", "tied blocks", "scalars", "twice", "frozen", "empty parts"]


def test_recompute_goes_with_them(plain: dict[str, Any]) -> None:
    for rank in run_kept(functools.partial(all_of, recompute="full"), 2, UNDER_FORWARD, Layout(dp_shard=2), 3):
        for name in UNDER_FORWARD:
            assert_like_plain([rank[name]], plain[name])


def test_bf16_means_the_same_on_one_device_and_on_shards() -> None:
    low = functools.partial(all_of, precision="bf16")
    names = [name for name in PROGRAMS if name != "parts"]  # a weight by itself is what it is: fp32
    single = low(names, Layout(), 3)
    for zero in (1, 3):
        for rank in run_kept(low, 2, names, Layout(dp_shard=2), zero):
            for name, (losses, state) in rank.items():
                assert {tensor.dtype for tensor in state.values()} == {torch.float32}
                torch.testing.assert_close(losses, single[name][0], rtol=2**-8, atol=0.0)
    gathered = run_kept(
        functools.partial(laid_out, precision="bf16"), 2, RoutedByRows, cross_entropy, Layout(dp_shard=2)
    )
    single_losses, _ = laid_out(RoutedByRows, cross_entropy, Layout(), precision="bf16")
    torch.testing.assert_close(gathered[0][0], single_losses, rtol=2**-8, atol=0.0)


# ---- ranks that call other blocks ----------------------------------------------------------------------------------


class Routed(Stack):
    """Each batch passes the block of its kind alone: ranks call other blocks. The kind changes at `first`."""

    wide = False
    first = 0

    def __init__(self) -> None:
        super().__init__()
        if self.wide:
            self.blocks[1].extra = nn.Linear(WIDTH, 3 * WIDTH)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        x = self.stem(x)
        kind = int(x.detach().sum() > 0) if self.passes > self.first else 0
        return self.head(self.blocks[kind](x))


class RoutedWide(Routed):
    """The blocks are of other sizes."""

    wide = True


class RoutedLate(Routed):
    """Ranks call the same block at first, until all trust it."""

    first = 12


class RoutedGathered(RoutedWide):
    """The same, with all weights gathered."""

    needs_whole_weights = True


class LossOfOne(Stack):
    """All ranks call all blocks, but what a block returns does not always count."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        both = [self.blocks[0](x), self.blocks[1](x)]
        return self.head(both[int(x.detach().sum() > 0)])


def fails(factory: Any, layout: Layout, zero: int, objective: Any = None) -> str:
    """Return what a program says under a layout that cannot train it."""
    Calls.patience_seconds = 2.0
    try:
        laid_out(factory, objective or cross_entropy, layout, zero, steps=8)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("factory", [Routed, RoutedWide, LossOfOne])
def test_ranks_that_call_other_blocks_are_told_which(factory: Any, zero: int) -> None:
    for said in run_ranks(fails, 2, factory, Layout(dp_shard=2), zero):
        assert "ranks call different parts of the model: rank 0 comes to the" in said
        assert "pass of 'blocks." in said and "needs_whole_weights" in said


def looks_as_often_as_a_rank_asks(model: nn.Module, batch: Any) -> Any:
    """Call the model once more on every rank: as a text is written until it ends."""
    with torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            model(batch["x"])
    return cross_entropy(model, batch)


def test_ranks_that_call_a_model_another_number_of_times_are_told() -> None:
    """One was in its backward pass, the other in a forward pass: both waited, without end."""
    for said in run_ranks(fails, 2, Stack, Layout(dp_shard=2), 3, looks_as_often_as_a_rank_asks):
        assert "rank 0 comes to the end of the objective, rank 1 to the forward pass of" in said


def late() -> None:
    """Train a program of which a rank leaves the path that all trusted."""
    Calls.patience_seconds = 2.0
    laid_out(RoutedLate, cross_entropy, Layout(dp_shard=2), 3, steps=8)


def test_a_rank_that_leaves_a_trusted_path_says_so_before_it_gathers() -> None:
    with pytest.raises(ConfigError, match=r"comes to the forward pass of 'blocks.1', the other ranks to the forward"):
        run_ranks(late, 2)


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)], ids=str)
def test_ranks_may_call_other_blocks_where_all_weights_are_gathered(layout: Layout) -> None:
    plain = plain_loop(RoutedByRows, cross_entropy)
    for zero in (1, 3):
        ranks = run_kept(laid_out, layout.devices, RoutedByRows, cross_entropy, layout, zero)
        assert_like_plain(ranks, plain)


class RoutedByRows(Stack):
    """Rows of one kind pass one block, the others another one; a block without rows is not called at all."""

    needs_whole_weights = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kinds = x.detach()[:, 0] > 0.4
        out = torch.zeros_like(x)
        for side, block in ((kinds, self.blocks[0]), (~kinds, self.blocks[1])):
            if side.any():
                out = out + torch.where(side[:, None], block(x), 0.0)
        return self.head(out)


def penalised(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Add the squares of a block's weights, which the objective reads by itself."""
    loss, weight = cross_entropy(model, batch)
    return loss + 0.1 * float(weight) * model.blocks[1].linear.weight.square().sum(), weight


def reads_inside(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call a layer of a block past the block."""
    loss, weight = cross_entropy(model, batch)
    return loss + model.blocks[1].linear(batch["x"]).square().sum(), weight


class Whole(Stack):
    needs_whole_weights = True


def reads(objective: Any) -> str:
    """Return what an objective says that uses a block's weight outside of it."""
    try:
        laid_out(Stack, objective, Layout(dp_shard=2))
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("objective", [penalised, reads_inside])
def test_a_blocks_weight_outside_of_it_is_refused_or_gathered(objective: Any) -> None:
    assert all("was used outside of the block" in said for said in run_ranks(reads, 2, objective))
    plain = plain_loop(Whole, objective)
    assert_like_plain(run_kept(laid_out, 2, Whole, objective, Layout(dp_shard=2), 3), plain)

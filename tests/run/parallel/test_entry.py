"""Weights of a block that a program takes while the block does not run are refused in words, whatever takes them."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from distributed import run_kept
from programs import Block, Stack, assert_like_plain, cross_entropy, laid_out, plain_loop
from torch import Tensor, autograd, enable_grad, nn, no_grad

from paceline.errors import ConfigError
from paceline.spec.layout import Layout


class _Again(autograd.Function):
    """A block that keeps no activations: it is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.block = block
        ctx.save_for_backward(x)
        with no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with enable_grad():
            out = ctx.block(x)
            by_x, *by_weights = autograd.grad(out, (x, *ctx.block.parameters()), grad)
        return by_x, None, *by_weights


class HandedBlocks(Stack):
    """Hands its blocks and their weights to a Function."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = _Again.apply(x, block, *block.parameters())
        return self.head(x)


class HandedWhole(HandedBlocks):
    needs_whole_weights = True


class _Synthetic(autograd.Function):
    """Multiplies gradients by a weight that it reads in the backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad @ ctx.layer.weight.detach(), None


class ReadsBackwards(Stack):
    """Reads a weight of a later block on the way back, when that block is over."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](_Synthetic.apply(self.stem(x), self.blocks[2].linear)))


class ReadsBackwardsWhole(ReadsBackwards):
    needs_whole_weights = True


def gradient_penalty(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and a penalty of its gradient by the inputs, of which a gradient is taken again."""
    with enable_grad():
        x = batch["x"].clone().requires_grad_()
        loss, count = cross_entropy(model, {**batch, "x": x})
        (by_x,) = autograd.grad(loss, x, create_graph=True)
    return loss + by_x.square().sum(), count


class StackWhole(Stack):
    needs_whole_weights = True


def says(factory: Any, zero: int, objective: Any = cross_entropy) -> str:
    try:
        laid_out(factory, objective, Layout(dp_shard=2), zero)
    except ConfigError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("factory", "whole"), [(HandedBlocks, HandedWhole), (ReadsBackwards, ReadsBackwardsWhole)])
def test_weights_of_a_block_that_a_function_takes_are_refused_or_gathered(factory: Any, whole: Any) -> None:
    for said in run_kept(says, 2, factory, 3):
        assert "was used outside of the block" in said and "needs_whole_weights" in said
    assert_like_plain(
        run_kept(laid_out, 2, whole, cross_entropy, Layout(dp_shard=2), 3), plain_loop(factory, cross_entropy)
    )
    assert_like_plain(
        run_kept(laid_out, 2, factory, cross_entropy, Layout(dp_replicate=2)), plain_loop(factory, cross_entropy)
    )


def test_a_gradient_that_an_objective_takes_itself_is_refused_in_words_or_has_the_weights_whole() -> None:
    for said in run_kept(says, 2, Stack, 3, gradient_penalty):
        assert "leads back through weights that are let go of" in said and "needs_whole_weights" in said
    expected = plain_loop(Stack, gradient_penalty)
    assert_like_plain(run_kept(laid_out, 2, StackWhole, gradient_penalty, Layout(dp_shard=2), 3), expected)
    assert_like_plain(run_kept(laid_out, 2, Stack, gradient_penalty, Layout(dp_replicate=2)), expected)


class InThreads(Stack):
    """Calls its blocks in a thread of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            for block in (self.stem, *self.blocks):
                x = threads.submit(block, x).result()
        return self.head(x)


class InThreadsWhole(InThreads):
    needs_whole_weights = True


def test_blocks_that_threads_call_are_refused_or_gathered() -> None:
    """Of two threads that call a block each, ranks waited for one another without end, in the proof too."""
    for said in run_kept(says, 2, InThreads, 3):
        assert "in a thread of the program's own" in said and "needs_whole_weights" in said
    expected = plain_loop(InThreads, cross_entropy)
    assert_like_plain(run_kept(laid_out, 2, InThreadsWhole, cross_entropy, Layout(dp_shard=2), 3), expected)


class _View(Block):
    """A block that returns a view of what it has computed, as many do that reshape at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, :]


class GivesViews(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_View() for _ in range(3))


class ChangesViews(GivesViews):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.head(x)


def warned(factory: Any, zero: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        laid_out(factory, cross_entropy, Layout(dp_shard=2), zero)
    return [str(each.message) for each in caught if "view" in str(each.message)]


def test_blocks_that_return_views_are_warned_of_by_nobody_and_a_view_that_is_changed_is_refused() -> None:
    """What torch warns of is no fault of a model that changes nothing in place, and an error of ours where it is."""
    for zero in (2, 3):
        assert run_kept(warned, 2, GivesViews, zero) == [[], []]
    trained = run_kept(laid_out, 2, GivesViews, cross_entropy, Layout(dp_shard=2), 3)
    assert_like_plain(trained, plain_loop(GivesViews, cross_entropy))
    for said in run_kept(says, 2, ChangesViews, 3):
        assert "that is changed in place" in said and "needs_whole_weights" in said
    kept = run_kept(
        laid_out, 2, ChangesViews, cross_entropy, Layout(dp_shard=2), 2
    )  # its weights are there all the time
    assert_like_plain(kept, plain_loop(ChangesViews, cross_entropy))

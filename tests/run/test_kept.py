"""What a user's model is, it stays: strides, complex numbers, modes of submodules, buffers that ranks share."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from programs import (
    CLASSES,
    EVERY_LAYOUT,
    WIDTH,
    Stack,
    assert_like_plain,
    cross_entropy,
    laid_out,
    plain_loop,
    trained,
)
from tests_shared import world_here
from torch import Tensor, nn

from paceline.errors import ConfigError, VerificationFailed
from paceline.run.numerics.invariants import check_agreement
from paceline.run.record.remarks import remarks_on, remarks_on_batch
from paceline.spec.layout import Layout
from paceline.task.models.build import build_model, evaluating, has_batch_statistics
from paceline.task.objective import next_token


class Strided(nn.Module):
    """Weights that do not lie row after row: a convolution with channels last, a transposed matrix, a gap."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(WIDTH, 9).t())
        self.gapped = nn.Parameter(torch.randn(WIDTH, 2 * CLASSES)[:, ::2])
        self.mixed = nn.Parameter(torch.randn(3, 2, WIDTH).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, classes]."""
        image = torch.cat([x, x], 1).reshape(-1, 2, 2, 4)
        hidden = torch.tanh(self.conv(image)).flatten(1) @ self.turned
        return hidden @ self.gapped + (hidden @ self.mixed.flatten(1))[:, :CLASSES]


class Rotary(Stack):
    """A complex buffer that turns its input, as in Meta's code, and one that is not kept in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH // 2) * 0.7
        self.register_buffer("freqs_cis", torch.polar(torch.ones(WIDTH // 2), angles))
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), angles / 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(len(x), -1, 2).float().to(x.dtype)) * self.freqs_cis * self.turn
        return super().forward(torch.view_as_real(turned).flatten(1))


class ComplexWeight(Stack):
    """A complex parameter, as in a layer that filters frequencies, beside a block with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))
        self.blocks[1].filter = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(len(x), -1, 2)) * self.filter
        return super().forward(torch.view_as_real(turned).flatten(1))


KEPT = {"strides": Strided, "rotary": Rotary, "complex": ComplexWeight}


def all_kept(layout: Layout, zero: int) -> dict[str, Any]:
    """Return what each model computes, by both optimizers."""
    return {
        name: {kind: laid_out(factory, cross_entropy, layout, zero, kind) for kind in ("adamw", "sgd")}
        for name, factory in KEPT.items()
    }


@pytest.mark.parametrize(("layout", "zero"), [(Layout(), 3), *EVERY_LAYOUT], ids=str)
def test_strides_and_complex_numbers_are_kept(layout: Layout, zero: int) -> None:
    ranks = run_kept(all_kept, layout.devices, layout, zero) if layout.devices > 1 else [all_kept(layout, zero)]
    for name, factory in KEPT.items():
        for kind in ("adamw", "sgd"):
            assert_like_plain([rank[name][kind] for rank in ranks], complex_plain(factory, kind))


def complex_plain(factory: Any, kind: str) -> Any:
    """Return the plain loop's result; `model.to(float64)` would drop imaginary parts there too."""

    def widened() -> nn.Module:
        model = factory()
        return model._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t.double())

    return plain_loop(widened, cross_entropy, optimizer=kind, dtype=None)


def test_two_weights_in_one_memory_are_refused_on_shards() -> None:
    with pytest.raises(ConfigError, match=r"'head.weight' is a view of the memory of 'stem.weight'"):
        run_ranks(functools.partial(laid_out, precision="fp32"), 2, Viewed, cross_entropy, Layout(dp_shard=2))


class Viewed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem.weight = nn.Parameter(self.stem.weight.detach())
        self.head.weight = nn.Parameter(self.stem.weight.detach()[:CLASSES])


# ---- modes of submodules -------------------------------------------------------------------------------------------


class FrozenStatistics(Stack):
    """A BatchNorm and a dropout that their user has put into evaluation mode, beside a dropout that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.norm.eval()
        self.drop.eval()
        self.norm.running_mean.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(self.norm(x)))


class Loaded(nn.Module):
    """A model that was handed out in evaluation mode, with a BatchNorm that will train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class KeepsItself(Loaded):
    """A class that keeps its BatchNorm in evaluation mode itself."""

    def train(self, mode: bool = True) -> KeepsItself:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_submodules_in_evaluation_mode_stay_in_it(layout: Layout) -> None:
    for factory in (FrozenStatistics, KeepsItself):
        plain = plain_loop(factory, cross_entropy)
        ranks = [laid_out(factory, cross_entropy, layout)] if layout.devices == 1 else run_kept(
            laid_out, layout.devices, factory, cross_entropy, layout)  # fmt: skip
        assert_like_plain(ranks, plain)


class Hears(nn.Linear):
    """A layer that keeps what it is told of modes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.heard: list[bool] = []

    def train(self, mode: bool = True) -> Hears:
        self.heard = [*getattr(self, "heard", []), mode]
        return super().train(mode)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_class_hears_of_the_end_of_an_evaluation_too(is_frozen: bool) -> None:
    """Flags alone were put back: what a class does as it is evaluated (merged adapters, a cache) stayed."""
    model = nn.Sequential(Hears(), nn.BatchNorm1d(WIDTH), nn.Dropout())
    model[1].eval()
    if is_frozen:
        model[0].eval()
        model[0].heard.clear()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, not is_frozen, False, True]
    assert model[0].heard == ([False, True, False] if is_frozen else [False, True])


def test_guards_see_the_modes_of_training() -> None:
    assert has_batch_statistics(build_model(Loaded, 0, 1, seed=7))
    assert has_batch_statistics(build_model(Loaded(), 0, 1, seed=7, device="meta"))
    assert not has_batch_statistics(build_model(FrozenStatistics, 0, 1, seed=7))
    assert not has_batch_statistics(build_model(KeepsItself, 0, 1, seed=7))


# ---- buffers -------------------------------------------------------------------------------------------------------


class Drifting(Stack):
    """A buffer that follows the rows that a rank sees, and one that follows the weights."""

    follows_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0) if self.follows_rows else self.stem.weight.mean(0))
        return super().forward(x)


class Following(Drifting):
    follows_rows = False


def agreement(factory: Any, layout: Layout) -> str:
    """Return what the invariants say after a few steps."""
    _, model = trained(factory, cross_entropy, layout)
    try:
        check_agreement(model, {}, 3, world_here(), layout)
    except VerificationFailed as error:
        return str(error)
    return "agree"


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2)], ids=str)
def test_a_buffer_that_drifts_by_rank_is_named(layout: Layout) -> None:
    assert all("no longer agree on the buffer ema" in said for said in run_kept(agreement, 2, Drifting, layout))
    assert run_kept(agreement, 2, Following, layout) == ["agree"] * 2
    assert run_kept(agreement, 2, Rotary, layout) == ["agree"] * 2


# ---- what is left out ----------------------------------------------------------------------------------------------


def test_what_is_rounded_or_not_read_is_said() -> None:
    model = Stack()
    model.register_buffer("table", torch.arange(3, dtype=torch.float64) / 3)
    (said,) = remarks_on(model, cross_entropy, torch.float32)
    assert said.startswith("table: rounded to float32") and not remarks_on(model, cross_entropy, torch.float64)
    model.config = SimpleNamespace(router_aux_loss_coef=0.001)
    assert "router_aux_loss_coef = 0.001" in remarks_on(model, next_token, torch.float64)[0]
    batch = {"tokens": torch.zeros(1, 2), "labels": torch.zeros(1, 2), "attention_mask": torch.ones(1, 2)}
    assert "the batch's attention_mask: not read" in remarks_on_batch(next_token, batch)[0]
    assert not remarks_on_batch(next_token, {"tokens": 0, "labels": 0}) and not remarks_on_batch(cross_entropy, batch)


def test_the_rounding_of_complex_numbers_is_said() -> None:
    model = Stack()
    model.register_buffer("phases", torch.ones(3, dtype=torch.complex128))
    (said,) = remarks_on(model, cross_entropy, torch.float32)
    assert said.startswith("phases: rounded to float32") and not remarks_on(model, cross_entropy, torch.float64)
    model.phases = model.phases.to(torch.complex64)
    assert not remarks_on(model, cross_entropy, torch.float32)

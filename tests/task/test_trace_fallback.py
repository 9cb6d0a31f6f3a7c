"""Models whose forward pass asks for values are profiled all the same: run for real, or estimated with a word."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests_shared import SEQ_LEN, VOCAB, PaddedText
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from paceline.errors import ConfigError
from paceline.plan.feasible.refusals import refusal
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.sizes import resolve_decoder
from paceline.task.objective import next_token
from paceline.task.profile import traced as profile_traced
from paceline.task.profile.apart import trace_here
from paceline.task.profile.moe import profile_moe

WIDTH, CLASSES = 8, 3


class Rows:
    """Sixteen rows of a vector and a class."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), index / 16), torch.tensor(index % CLASSES)


class Threes(Rows):
    """Rows with something after the class."""

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), torch.zeros(1)


class Program(nn.Module):
    """Two layers, and between them whatever `look` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.modes = nn.Parameter(torch.ones(WIDTH // 2 + 1, 2))

    def look(self, x: Tensor) -> Tensor:
        """Return the activation between the layers."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.look(self.inner(x)))


class Any_(Program):
    def look(self, x: Tensor) -> Tensor:
        return x.relu() if (x > 0).any() else x


class Nonzero(Program):
    def look(self, x: Tensor) -> Tensor:
        rows = (x.sum(-1) > -9).nonzero()[:, 0]
        return x.index_copy(0, rows, x[rows] * 2)


class Coin(Program):
    def look(self, x: Tensor) -> Tensor:
        return x.relu() if torch.rand(()) < 0.5 else x


class Dispatched(Program):
    """Two experts that rows go to in turn, each with dropout: it draws for as many rows as it has."""

    def look(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 2
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            rows = (chosen == expert).nonzero()[:, 0]
            out = out.index_copy(0, rows, F.dropout(x[rows] * (1 + expert), 0.2, self.training))
        return out


class DroppedAsAsked(Program):
    """Dropout for every row, beside a look at values, which has it run for real."""

    def look(self, x: Tensor) -> Tensor:
        return F.dropout(x if float(x.detach().sum()) > -1e9 else -x, 0.2, self.training)


class Scripted(Program):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())) for _ in range(3)
        )

    def look(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Transformed(Program):
    def look(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: row.tanh().sum()))(x)


class TransformedBlock(Program):
    """A repeated block is called inside of the transform, where its inputs have no storage of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def look(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.func.vmap(torch.func.jacrev(lambda row, block=block: block(row).sum()))(x)
        return x


class Item(Program):
    def look(self, x: Tensor) -> Tensor:
        return x * float(x.detach().abs().max().item())


class Fft(Program):
    def look(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.modes), n=WIDTH)


class AsksInInit(Program):
    """As timm's: rates of stochastic depth are items of a linspace, which a meta device does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]


def mean_squares(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return a summed loss."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), torch.tensor(len(batch[0]))


def profiled(model: Any) -> ModelProfile:
    return trace_here(Task(model=model, data=Rows(), objective=mean_squares, seed=7))


PRODUCTS = 2 * WIDTH * WIDTH + 2 * WIDTH * CLASSES  # FLOPs of a row's two products


@pytest.mark.parametrize("kind", [Any_, Nonzero, Coin, Item, Fft, AsksInInit])
def test_a_factory_s_model_is_profiled_whatever_it_looks_at(kind: type[Program]) -> None:
    profile = profiled(kind)
    assert profile.source == "traced" and not profile.note
    assert profile.forward_flops == PRODUCTS
    assert profiled(kind()).forward_flops == PRODUCTS


def test_random_numbers_for_as_many_rows_as_chance_sends_belong_to_no_sample() -> None:
    """The plan closes what training would refuse; what draws for each row, or decides by what is drawn, stays open."""
    closed = profiled(Dispatched).closed_axes or {}
    assert {"dp_replicate", "dp_shard", "accumulation"} <= set(closed)
    assert "random numbers that belong to no sample" in closed["dp_shard"]
    for kind in (DroppedAsAsked, Coin):
        assert not {"dp_replicate", "dp_shard", "accumulation"} & set(profiled(kind).closed_axes or {}), kind


def test_what_nobody_can_watch_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="cannot be traced") as error:
        profiled(Scripted)
    assert "without torch.jit.script" in error.value.try_


def test_what_transforms_keep_is_taken_to_be_all_that_operators_give() -> None:
    """torch lets nobody watch it; what watches for its work, recompute and activations on the host, is refused."""
    found, plain = profiled(Transformed), profiled(Program)
    assert found.source == "traced" and "torch.func" in found.note
    assert found.forward_flops == plain.forward_flops == PRODUCTS
    kept, known = ([block.saved_elements for block in profile.blocks] for profile in (found, plain))
    assert all(ours >= own for ours, own in zip(kept, known, strict=True)) and sum(kept) > sum(known)
    assert not {"dp_replicate", "dp_shard", "accumulation"} & set(found.closed_axes or {})
    plan = Plan(Layout())
    assert refusal(plan, found) is None
    assert not {"dp_replicate", "dp_shard"} & set(profiled(TransformedBlock).closed_axes or {})
    for changed in ({"recompute": "full"}, {"recompute": "selective"}, {"offload": "activations"}):
        assert "torch.func" in (refusal(dataclasses.replace(plan, **changed), found) or ""), changed


def test_a_named_factory_too() -> None:
    profile = profiled(ModelSpec(f"{__name__}:Nonzero"))
    assert profile.forward_flops == PRODUCTS


SHAPE = {"hidden": 16, "layers": 3, "heads": 2, "kv_heads": 2, "ffn": 8, "experts": 4, "vocab": VOCAB}


def own_objective(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what next-token prediction returns, in an objective that nobody here knows."""
    return next_token(model, batch)


@pytest.mark.parametrize("more", [{}, {"balance": "bias"}, {"scoring": "sigmoid"}])
def test_built_in_experts_under_an_objective_of_ones_own_are_profiled(more: dict[str, str]) -> None:
    """How many tokens an expert gets is data, which tensors without values do not have."""
    spec = ModelSpec("moe-2m", **SHAPE, **more)
    found = trace_here(Task(model=spec, data=PaddedText(), objective=own_objective, seed=7))
    assert found.source == "traced" and not found.note
    known = profile_moe(resolve_decoder(spec, VOCAB, SEQ_LEN), SEQ_LEN)
    assert [block.experts for block in found.blocks] == [4, 4, 4, 0]
    assert found.parameters == known.parameters
    assert found.forward_flops == known.forward_flops, "experts' results are summed by elements, which are no products"


def test_the_user_s_module_and_random_numbers_are_left_alone() -> None:
    class Counts(Coin):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(()))

        def look(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().look(x)

    model, before = Counts(), torch.random.get_rng_state()
    profiled(model)
    assert float(model.passes) == 0
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_too_large_to_run_here_is_estimated_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_traced, "usable_memory_bytes", lambda: 100)
    profile = profiled(Nonzero)
    assert profile.source == "estimated"
    assert "asks for values" in profile.note and "estimated from its weights" in profile.note
    assert profile.forward_flops == pytest.approx(PRODUCTS, rel=0.5)
    assert all(block.saved_elements > 0 for block in profile.blocks if block.parameters)


def test_a_batch_that_an_objective_of_ours_cannot_read_is_told_in_our_words() -> None:
    task = Task(model=Program, data=Threes(), objective="regression")
    with pytest.raises(ConfigError) as raised:
        trace_here(task)
    assert raised.value.what == "objective 'regression' got a batch of type list of 3"
    assert 'a mapping with "labels"' in raised.value.because and "of your own" in raised.value.try_


class Fails(Program):
    """A program that asks for what is not there, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return self.log(x)  # type: ignore[no-any-return,operator]


def test_what_fails_alike_with_and_without_values_is_told_once() -> None:
    task = Task(model=Fails, data=Rows())
    with pytest.raises(ConfigError, match="cannot be traced") as raised:
        trace_here(task)
    assert raised.value.because.count("no attribute 'log'") == 1


class Flexible(Program):
    """Attends by flex_attention, whose backward pass torch has on GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.head(x)[:, None, :, None]
        return flex_attention(heads, heads, heads)[:, 0, :, 0]  # type: ignore[no-any-return,index]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is estimated from its weights")
def test_flex_attention_is_refused_with_what_a_cpu_has() -> None:
    with pytest.raises(ConfigError, match="cannot be traced") as raised:
        trace_here(Task(model=Flexible, data=Rows()))
    assert raised.value.because == "flex_attention has a backward pass on GPUs alone"
    assert "scaled_dot_product_attention" in raised.value.try_


class FiveNearest:
    """Each row with the five nearest of the batch: of two rows there are none."""

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the loss, and the rows."""
        outputs = model(batch[0])
        apart = (outputs[:, None] - outputs).square().sum(-1)
        return apart.topk(6, largest=False).values.sum(), len(outputs)


def test_what_needs_more_rows_of_a_batch_is_traced_where_it_says_that_it_sees_all_of_them() -> None:
    objective = FiveNearest()
    with pytest.raises(ConfigError, match="cannot be traced"):
        trace_here(Task(model=Program, data=Rows(), objective=objective, global_batch="12 samples"))
    objective.coupled = "batch"  # type: ignore[attr-defined]
    found = trace_here(Task(model=Program, data=Rows(), objective=objective, global_batch="12 samples"))
    assert found.source == "traced" and found.forward_flops == pytest.approx(PRODUCTS, rel=0.01)
    with pytest.raises(ConfigError, match="cannot be traced"):  # its batch has none either
        trace_here(Task(model=Program, data=Rows(), objective=objective, global_batch="4 samples"))

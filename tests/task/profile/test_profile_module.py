"""Traced profiles of modules that are not ours: a convolutional network, transformers, modules that need values."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.task.objective import classification, next_token
from paceline.task.profile import traced
from paceline.task.profile.traced import REST, profile_module


class Residual(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.GroupNorm) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width) if norm is nn.GroupNorm else norm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Pool(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def network(norm: type[nn.Module] = nn.GroupNorm) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 1, bias=False), Residual(8, norm), Residual(8, norm), Pool(), nn.Linear(8, 10))


IMAGES = {"images": torch.randn(4, 1, 8, 8), "labels": torch.zeros(4, dtype=torch.int64)}


def test_a_convolutional_network() -> None:
    model = network()
    profile = profile_module(model, IMAGES, classification)
    assert [block.name for block in profile.blocks] == ["1", "2", REST]
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert profile.tokens_per_sample == 1
    block, rest = profile.blocks[0], profile.blocks[-1]
    assert block.matmul_flops == 2 * 8 * 8 * 9 * 64  # out x in x kernel x positions
    assert rest.matmul_flops == 2 * 8 * 64 + 2 * 8 * 10
    assert block.matmul_width == round((8 * 8 * 9) ** 0.5)
    assert block.input_elements == 8 * 64
    # Input of the convolution, its output (for the norm) and the relu's output.
    assert block.saved_elements == pytest.approx(3 * 8 * 64, rel=0.05)
    assert block.selective_elements == 2 * 8 * 64
    assert block.attention_flops == 0 and profile.grouped == ()
    assert block.open_axes == ("dp_replicate", "dp_shard")


def test_a_small_module_is_traced_without_the_compiler_that_fake_tensors_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways, follow = [], traced.trace
    monkeypatch.setattr(traced, "trace", lambda *given, **how: ways.append(how["where"]) or follow(*given, **how))
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # who imports it now fails
    assert profile_module(network(), IMAGES, classification).source == "traced"
    assert ways == ["small"]


def test_who_looks_at_values_is_traced_on_fake_tensors_and_then_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, follow = [], traced.trace
    monkeypatch.setattr(traced, "trace", lambda *given, **how: ways.append(how["where"]) or follow(*given, **how))

    class Looks(nn.Module):
        def __init__(self, look: Callable[[torch.Tensor], object]) -> None:
            super().__init__()
            self.weight, self.look = nn.Parameter(torch.ones(1, 8, 8)), look

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.look(x * self.weight)
            return (x * self.weight).flatten(1)

    looks: tuple[Callable[[torch.Tensor], object], ...] = (
        torch.Tensor.tolist, lambda x: x.detach().numpy(), lambda x: bool(x.sum() > 0), lambda x: x.max().item(),
        lambda x: x[x > 0], torch.nonzero, lambda x: torch.equal(x, x),
    )  # fmt: skip
    for look in looks:
        ways.clear()
        profile_module(Looks(look), IMAGES, classification)
        assert ways == ["small", "fake", "fake", "real"], look


def test_what_an_objective_keeps_of_its_own_is_not_changed_by_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, ways, follow = torch.zeros(10), [], traced.trace
    monkeypatch.setattr(traced, "trace", lambda *given, **how: ways.append(how["where"]) or follow(*given, **how))

    def objective(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch["images"])
        kept.add_(logits.detach().float().mean(0))
        return logits.sub(kept).square().sum(), torch.tensor(len(logits))

    profile_module(network(), IMAGES, objective)  # type: ignore[arg-type]
    assert ways[:2] == ["small", "fake"] and not kept.any()


def test_blocks_with_convolutions_in_groups_are_named() -> None:
    class Depthwise(Residual):
        def __init__(self) -> None:
            super().__init__(8)
            self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    model = nn.Sequential(nn.Conv2d(1, 8, 1), Depthwise(), Depthwise(), Pool(), nn.Linear(8, 10))
    assert profile_module(model, IMAGES, classification).grouped == ("1", "2")
    turned = nn.ConvTranspose2d(8, 8, 2, groups=2)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), Residual(8), Residual(8), turned, Pool(), nn.Linear(8, 10))
    assert profile_module(model, IMAGES, classification).grouped == (REST,)


def test_tracing_leaves_the_model_alone() -> None:
    model = network(nn.BatchNorm2d)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    profile_module(model, IMAGES, classification)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_batch_statistics_close_the_data_axes() -> None:
    profile = profile_module(network(nn.BatchNorm2d), IMAGES, classification)
    assert profile.closed_axes is not None
    for axis in ("dp_replicate", "dp_shard", "accumulation"):
        assert "BatchNorm" in profile.closed_axes[axis]
        assert "GroupNorm" in profile.closed_axes[axis]
    assert all(block.open_axes == () for block in profile.blocks)
    assert "dp_shard" not in (profile_module(network(), IMAGES, classification).closed_axes or {})


def test_counts_are_per_sample() -> None:
    larger = {name: tensor.repeat(3, *[1] * (tensor.dim() - 1)) for name, tensor in IMAGES.items()}
    once, thrice = (profile_module(network(), batch, classification) for batch in (IMAGES, larger))
    for small, large in zip(once.blocks[:-1], thrice.blocks[:-1], strict=True):
        assert small.matmul_flops == large.matmul_flops
        assert small.operators == large.operators
        assert small.saved_elements == pytest.approx(large.saved_elements, rel=0.01)


def test_transformers_llama_has_the_flops_of_its_formula() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=40, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    profile = profile_module(model, {"tokens": tokens, "labels": tokens}, next_token)
    layer = profile.blocks[0]
    assert [block.name for block in profile.blocks] == ["model.layers.0", "model.layers.1", "model.layers.2", REST]
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert layer.matmul_flops == 2 * 16 * (4 * 32 * 32 + 3 * 32 * 64)
    # On tensors without values transformers writes its causal mask out, and a mask's zeros cannot be counted.
    assert layer.attention_flops == 2 * (2 * 16 * 16 * 32)
    assert layer.saved_fp32_elements > 16 * 32  # its norms work in fp32
    assert profile.tokens_per_sample == 16


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if x.abs().sum().item() > -1 else x


def test_a_model_that_asks_for_values_runs_for_real() -> None:
    batch = (torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    profile = profile_module(AsksForValues(), batch, classification)
    assert profile.forward_flops == 2 * 6 * 6 + 2 * 6 * 3
    assert [block.name for block in profile.blocks] == [REST]
    assert not profile.blocks[0].recomputable


def test_shared_weights_are_counted_once() -> None:
    model = network()
    model[2].conv.weight = model[1].conv.weight
    profile = profile_module(model, IMAGES, classification)
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert profile.blocks[1].tied_to == "1"


def test_a_model_that_fails_is_refused_with_its_error() -> None:
    with pytest.raises(ConfigError, match="shapes cannot be multiplied") as refusal:
        profile_module(nn.Linear(3, 3), (torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)), classification)
    assert "Linear cannot be traced" in refusal.value.what


@pytest.mark.parametrize("batch", [{"labels": 3}, (torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64))])
def test_batches_without_one_row_per_sample_are_refused(batch: object) -> None:
    with pytest.raises(ConfigError, match="first dimension"):
        profile_module(nn.Linear(3, 3), batch, classification)


class LateHead(nn.Module):
    """Makes its head when it first sees what comes."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.body, self.looks = network(), looks
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.body(x)
        if self.looks and x.sum().item() == 0:
            return x
        if self.head is None:
            self.head = nn.Linear(x.shape[1], 10).to(x)
        return self.head(x)


@pytest.mark.parametrize("looks", [False, True], ids=["without values", "for real"])
def test_weights_that_a_forward_pass_makes_are_refused(looks: bool) -> None:
    model = LateHead(looks)
    with pytest.raises(ConfigError, match=r"makes the parameter 'head\.weight'"):
        profile_module(model, IMAGES, classification)
    assert model.head is None
    model(IMAGES["images"])
    assert profile_module(model, IMAGES, classification).source == "traced"


class TiedLate(nn.Module):
    """Ties its head to another layer as it runs."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.flat, self.enter = nn.Flatten(), nn.Linear(64, 10)
        self.mid, self.head = nn.Linear(10, 10), nn.Linear(10, 10, bias=False)
        if not is_late:
            self.head.weight = self.mid.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        self.head.weight = self.mid.weight
        return self.head(self.mid(self.enter(self.flat(x))))


def test_weights_that_a_forward_pass_ties_are_refused() -> None:
    """The proof of every layout ended with `KeyError: Parameter containing` and all its numbers."""
    with pytest.raises(ConfigError, match=r"puts another parameter in the place of the parameter 'head\.weight'"):
        profile_module(TiedLate(is_late=True), IMAGES, classification)
    assert profile_module(TiedLate(is_late=False), IMAGES, classification).source == "traced"


@pytest.mark.parametrize("rows", [1, 4])
def test_weights_are_no_short_lived_buffers(rows: int) -> None:
    """They rest, and do not grow with the samples: a product of 64 to 512 and a gelu hold 512 values and 512 more."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(2)))
    batch = {"images": torch.randn(rows, 64), "labels": torch.zeros(rows, dtype=torch.int64)}
    block = profile_module(model, batch, classification).blocks[0]
    assert block.transient_elements == 2 * 512

"""Frozen weights in four bits: bitsandbytes' numbers, the same on every layout, priced, checkpointed and merged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept
from model_folders import write_model
from runs import write_corpus
from safetensors.torch import load_file
from tests_shared import coarse_plan as plan_of
from tests_shared import decoder_task, run_steps

from paceline.errors import DoesNotFit
from paceline.plan.explain.headline import trained_text
from paceline.plan.planned import plan_task
from paceline.spec.adapt.adapter import NF4_BYTES, Adaptation, AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.load import parse_spec
from paceline.spec.task import ModelSpec
from paceline.task.adapt.linear import PackedLinear
from paceline.task.adapt.merge import MergedTensors
from paceline.task.adapt.nf4 import LEVELS, pack, packed_product, sizes_of
from paceline.task.models.build import build_model

MODEL = ModelSpec("llama-1m", hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=61)
QLORA = AdapterSpec(kind="lora", rank=4, alpha=8.0, init="random", base_dtype="nf4")
SHAPES = [(64, 128), (300, 257), (33, 7), (1, 64)]


def drawn(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_as_near_as_its_levels_allow(shape: tuple[int, int]) -> None:
    """No value is further off than half the widest gap of levels, of the largest magnitude of its block."""
    weight = drawn(shape)
    packed = pack(weight)
    assert sizes_of(shape) == (len(packed.values), len(packed.scales), len(packed.wide))
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64).abs().amax(1)
    gap = max(b - a for a, b in itertools.pairwise(LEVELS)) / 2
    bound = (blocks.repeat_interleave(64)[: weight.numel()] * gap).view(shape)
    off = (packed.to(torch.float32) - weight).abs()
    assert bool((off <= bound + 0.03 * float(blocks.max())).all()), "the second quantisation adds little"
    again = pack(packed.to(torch.float32))
    assert torch.equal(again.values, packed.values), "what is in four bits already stays in the same ones"
    assert torch.equal(pack(torch.zeros(shape)).to(torch.float32), torch.zeros(shape))


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_numbers_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight, packed = drawn(shape), pack(drawn(shape))
    theirs, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True, blocksize=64)
    assert torch.equal(theirs.flatten(), packed.values)
    assert torch.equal(state.state2.absmax, packed.wide[:-1].view(torch.float32))
    assert float(state.offset) == float(packed.wide[-1:].view(torch.float32))
    apart = (state.absmax.int() - packed.scales.int()).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01, "scales in the middle of two codes"
    if shape[1] % 64 == 0:  # its CPU kernel unpacks narrower rows wrongly (0.50.2)
        torch.testing.assert_close(functional.dequantize_4bit(theirs, state), packed.to(torch.float32))


def test_the_product_keeps_no_whole_weight_and_has_the_gradient_of_one() -> None:
    packed, x = pack(drawn((48, 33))), torch.randn(2, 5, 33, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore
        out = packed_product(x, packed)
    assert all(not tensor.is_floating_point() for tensor in kept) and len(kept) == 3
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    whole = packed.to(torch.float32)
    torch.testing.assert_close(out, F.linear(x, whole))
    torch.testing.assert_close(gradient, 2 * F.linear(x, whole) @ whole)


def built(spec: AdapterSpec, model: ModelSpec = MODEL) -> Any:
    return build_model(model, 61, 8, seed=3, adaptation=Adaptation(spec))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_model_computes_with_the_quantised_weights_and_merges_into_them(kind: str) -> None:
    """As a plain model does whose weights went through four bits; merged weights do so without adapters."""
    spec = dataclasses.replace(QLORA, kind=kind)
    model = built(spec)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}
    assert len(layers) == 14 and not any(name.endswith("q_proj.weight") for name, _ in model.named_parameters())
    plain = build_model(MODEL, 61, 8, seed=3)
    for name, layer in layers.items():
        assert torch.equal(layer.weight, pack(plain.get_submodule(name).weight).to(torch.float32)), name
    tokens = torch.arange(16).view(2, 8) % 61
    merged = dict(MergedTensors(model.state_dict(), spec))
    assert set(merged) == set(plain.state_dict())
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    model(tokens).sum().backward()
    assert all(layer.lora_A.grad is not None for layer in layers.values())
    assert model.double().state_dict()["layers.0.mlp.up_proj.weight_wide"].dtype == torch.int32, "no cast reaches it"


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_a_folder_is_quantised_as_it_is_read(tmp_path: Path, family: str) -> None:
    """The built-in decoder is filled layer by layer, a class of transformers after it was read."""
    if family == "Llama":
        folder, name = write_model(tmp_path, "Llama"), "layers.1.mlp.up_proj"
    else:
        import transformers

        config = transformers.GPTNeoXConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                            num_attention_heads=2)  # fmt: skip
        transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
        folder, name = tmp_path, "gpt_neox.layers.1.mlp.dense_h_to_4h"
    stored = load_file(folder / "model.safetensors")
    whole = stored[f"model.{name}.weight" if family == "Llama" else f"{name}.weight"]
    layer = built(QLORA, ModelSpec(name=str(folder))).get_submodule(name)
    assert torch.equal(layer.weight, pack(whole).to(torch.float32))


Steps = list[tuple[float, float]]


def three_steps(layout: Layout, **changes: Any) -> Steps:
    """Return loss and gradient norm of three steps."""
    task = decoder_task(adapter=QLORA)
    stats, _ = run_steps(task, plan_of(layout, **changes), 3)
    return [(step.loss, step.grad_norm) for step in stats]


@pytest.fixture(scope="module")
def alone() -> Steps:
    """The steps of one device."""
    (found,) = run_kept(three_steps, 1, Layout())
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2),
        pytest.param(Layout(pp=2), marks=pytest.mark.deep),
        pytest.param(Layout(cp=2), marks=pytest.mark.deep),
        pytest.param(Layout(dp_replicate=2), marks=pytest.mark.deep),
    ],
)
def test_every_layout_has_the_same_four_bits(layout: Layout, alone: Steps) -> None:
    for there in run_kept(three_steps, layout.devices, layout):
        for step, (loss, norm) in zip(there, alone, strict=True):
            assert step == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))


SPEC = """
[task]
model = {{ name = "llama-1m" }}
data = {{ source = "{corpus}", seq_len = 16, cache_dir = "{corpus}/../cache" }}
adapter = {{ kind = "lora", base_dtype = "{dtype}" }}
global_batch = "8 samples"
stop = "3 steps"

[cluster]
device = "cpu"
devices = 2
probe = false

[plan]
{plan}
"""


def test_four_bits_are_priced_and_close_the_tensor_axis(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)

    def planned(dtype: str, plan: str = "dp_shard = 2") -> Any:
        return plan_task(parse_spec(SPEC.format(corpus=corpus, dtype=dtype, plan=plan)))

    packed, whole = planned("nf4"), planned("")
    blocks = packed.profile.blocks
    count = sum(block.packed_parameters for block in blocks)
    assert count + packed.profile.parameters == whole.profile.parameters
    assert packed.profile.trained_parameters == whole.profile.trained_parameters
    told = re.search(r"trains (\S+ \S+) of (\S+ \S+) parameters \(([\d.]+)%\)", trained_text(packed))
    share = whole.profile.trained_parameters / whole.profile.parameters
    assert told and told[0] in trained_text(whole), "four bits are parameters of the model too"
    assert float(told[3]) == pytest.approx(100 * share, abs=0.006)
    (term,) = [term for term in packed.forecast.memory if term.name == "weights in four bits"]
    largest = max(block.unpacked_elements for block in blocks)
    assert count * NF4_BYTES < term.value <= count * NF4_BYTES + 12 * largest
    with pytest.raises(DoesNotFit, match="tp") as refusal:
        planned("nf4", "tp = 2")
    assert "four bits" in str(refusal.value)


SPREAD = [
    (Layout(dp_replicate=3), {"recompute": "full"}),
    (Layout(dp_replicate=2, dp_shard=2), {"zero": 2}),
    pytest.param(Layout(dp_replicate=2), {}, marks=pytest.mark.deep),
    pytest.param(Layout(dp_shard=3), {"zero": 3}, marks=pytest.mark.deep),
]


@pytest.mark.parametrize(("layout", "changes"), SPREAD, ids=lambda each: str(each).replace(" ", ""))
def test_spread_bits_compute_as_whole_ones(layout: Layout, changes: dict[str, Any], alone: Steps) -> None:
    """Three ranks divide no layer's bytes evenly."""
    for there in run_kept(functools.partial(three_steps, frozen="spread", **changes), layout.devices, layout):
        for step, (loss, norm) in zip(there, alone, strict=True):
            assert step == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))

"""Profiles of published families count the parameters, FLOPs and bytes that their publications print."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.transformer import ExpertSizes, Latent, TransformerShape

GPT3 = TransformerShape("gpt-175B", 96, 12288, 49152, 96, 96, 128, 51200, 2048)
MODERN = {"gated": True, "biases": False, "layer_norm": False, "positions": "rotary", "tied": False}


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [  # sums over the tensors of the released checkpoints
        (TransformerShape("bloom", 70, 14336, 57344, 112, 112, 128, 250880, 2048, positions="alibi",
                          embedding_norm=True),
         176_247_271_424),
        (TransformerShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, **MODERN), 8_030_261_248),
        (TransformerShape("llama-3-405b", 126, 16384, 53248, 128, 8, 128, 128256, 8192, **MODERN), 405_853_388_800),
        (TransformerShape("mixtral", 32, 4096, 14336, 32, 8, 128, 32000, 4096, **MODERN,
                          experts=ExpertSizes(8, 2, 14336)),
         46_702_792_704),
    ],
    ids=lambda value: value.name if isinstance(value, TransformerShape) else "",
)  # fmt: skip
def test_parameters_are_those_of_the_released_models(shape: TransformerShape, parameters: int) -> None:
    assert shape.profile().parameters == parameters


@pytest.mark.parametrize(
    ("shape", "total_billion", "active_billion"),
    [  # as printed: DeepSeek-V2 236B / 21B, DeepSeek-V3 671B / 37B, Qwen3 30.5B / 3.3B
        (TransformerShape("v2", 60, 5120, 12288, 128, 128, 128, 102400, 4096, **MODERN,
                          experts=ExpertSizes(160, 6, 1536, 3072, 1), latent=Latent(1536, 512, 128, 64, 128)), 236, 21),
        (TransformerShape("v3", 61, 7168, 18432, 128, 128, 128, 129280, 4096, **MODERN,
                          experts=ExpertSizes(256, 8, 2048, 2048, 3), latent=Latent(1536, 512, 128, 64, 128)), 671, 37),
        (TransformerShape("qwen3", 48, 2048, 6144, 32, 4, 128, 151936, 4096, **MODERN,
                          experts=ExpertSizes(128, 8, 768)),
         30.5, 3.3),
    ],
    ids=["v2", "v3", "qwen3"],
)  # fmt: skip
def test_mixtures_have_the_printed_parameters(
    shape: TransformerShape, total_billion: float, active_billion: float
) -> None:
    profile = shape.profile()
    assert profile.parameters / 1e9 == pytest.approx(total_billion, rel=0.003)
    assert profile.active_parameters / 1e9 == pytest.approx(active_billion, rel=0.025)


def new_gelu(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """GPT-2's activation as Transformers and minGPT write it; `wide` is what `pow` reads: fp32 under autocast."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(wide, 3.0))))


class Moved(TorchDispatchMode):
    """Counts elements that operators read and write, and the operators; views move nothing."""

    elements = operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if not func.is_view and "detach" not in str(func):
            self.operators += 1
            self.elements += sum(
                item.numel() for item in (*args, found) if isinstance(item, torch.Tensor) and item.dim()
            )
        return found


def test_an_activation_in_pieces_moves_and_keeps_what_torch_does_in_both_of_its_passes() -> None:
    """18 and 28 values for each, and 19 launches, where one fused kernel has 2 in each of three passes.

    Where the inputs of `pow` are cast to fp32, as under autocast, 14 bytes are kept for each value, where one kernel
    keeps its input, which is 2.
    """
    count = 1000
    x, gradient = torch.randn(count, requires_grad=True), torch.randn(count)
    with Moved() as forward:
        y = new_gelu(x, x)
    with Moved() as backward:
        torch.autograd.grad(y, x, gradient)
    plain, pieces = GPT3.profile().blocks[1], replace(GPT3, gelu_in_pieces=True).profile().blocks[1]
    values = GPT3.seq_len * GPT3.ffn
    assert (forward.elements, backward.elements) == (18 * count, 28 * count)
    assert 3 * (pieces.moved_elements - plain.moved_elements) == (18 + 28 - 3 * 2) * values
    assert forward.operators + backward.operators == 19 and pieces.operators - plain.operators == round((19 - 2) / 3)
    kept: dict[int, int] = {}
    half = torch.randn(count, dtype=torch.bfloat16, requires_grad=True)

    def keep(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.data_ptr()] = saved.nbytes
        return saved

    with saved_tensors_hooks(keep, lambda saved: saved):
        y = new_gelu(half, half.float())
    assert y.dtype == torch.float32 and half.data_ptr() not in kept and sum(kept.values()) == 14 * count
    assert 2 * (pieces.saved_elements - plain.saved_elements) == (14 - 2) * values


STARTS_NOTHING = ("_unsafe_view", "empty", "detach", "lift_fresh")


def _started_in_a_layer(transformers: ModuleType, name: str, narrow: bool) -> int:
    """Return the operators that write something in both passes of a layer, gradients added up.

    Weights rest in bf16 where they are `narrow`; else they are cast to it by autocast.
    """
    counts = []
    for layers in (1, 2):
        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, vocab_size=64,
        )  # fmt: skip
        model, tokens = getattr(transformers, f"{name}ForCausalLM")(config), torch.arange(16)[None]
        model = model.bfloat16() if narrow else model
        with torch.autocast("cpu", torch.bfloat16, enabled=not narrow):
            model(input_ids=tokens, labels=tokens).loss.backward()
        with Started() as both:
            with torch.autocast("cpu", torch.bfloat16, enabled=not narrow):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        counts.append(both.operators)
    return counts[1] - counts[0]


class Started(TorchDispatchMode):
    """Counts operators that write something."""

    operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split("::")[1]
        self.operators += not func.is_view and not name.startswith(STARTS_NOTHING)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("name", "head_norm", "fused"), [("Llama", False, 15), ("Qwen3", True, 17)])
def test_a_llama_of_transformers_starts_as_many_operators_as_its_modules_do(
    name: str, head_norm: bool, fused: int, narrow: bool
) -> None:
    """Twice those of fused kernels, as `unfused_launches` has it, are 90 where a layer of Llama starts 152, or 122."""
    transformers = pytest.importorskip("transformers")
    plain = TransformerShape("llama", 2, 32, 64, 4, 2, 8, 64, 16, **MODERN, head_norm=head_norm)
    modules = replace(plain, norms_in_pieces=True, narrow_weights=narrow).profile().blocks[1]
    assert plain.profile().blocks[1].operators == fused
    assert 3 * 2 * modules.operators == pytest.approx(_started_in_a_layer(transformers, name, narrow), rel=0.05)
    assert modules.moved_elements == plain.profile().blocks[1].moved_elements


def test_a_layer_keeps_the_bytes_of_korthikanti() -> None:
    # Equation 1 of arXiv:2205.05198: s b h (34 + 5 a s / h) bytes, and 34 s b h without attention's core (section 5).
    seq, hidden, heads = 2048, 12288, 96
    layer = replace(GPT3, flash=False, dropout=True).profile().blocks[1]
    assert 2 * layer.saved_elements == seq * hidden * (34 + 5 * heads * seq / hidden)
    assert 2 * layer.selective_elements == 34 * seq * hidden
    assert 2 * layer.input_elements == 2 * seq * hidden


def test_fused_attention_keeps_no_scores_and_computes_half_of_them() -> None:
    fused, unfused = GPT3.profile().blocks[1], replace(GPT3, flash=False).profile().blocks[1]
    assert unfused.attention_flops == 2 * fused.attention_flops
    assert unfused.saved_elements - fused.saved_elements == 96 * 2048 * 2048
    assert unfused.moved_elements > fused.moved_elements


def test_a_llama_is_counted_as_the_decoder_of_our_own() -> None:
    config = replace(NAMED_SIZES["llama-8b"], vocab=128256)
    ours = profile_decoder(config, 8192)
    theirs = TransformerShape("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8192, **MODERN).profile()
    assert theirs.parameters == ours.parameters
    assert theirs.forward_flops == ours.forward_flops


def test_experts_every_other_layer_and_attention_to_an_encoder() -> None:
    shape = TransformerShape("t5", 4, 64, 128, 4, 4, 16, 100, 32, positions="none", biases=False, layer_norm=False,
                             cross_attention_layers=2, experts=ExpertSizes(8, 1, 128, every=2))  # fmt: skip
    plain = replace(shape, cross_attention_layers=0, experts=None).profile()
    profile = shape.profile()
    assert [block.kind for block in profile.blocks[1:5]] == ["decoder", "experts", "decoder", "experts"]
    assert profile.parameters > plain.parameters
    crossed = replace(shape, experts=None).profile()
    assert crossed.parameters - plain.parameters == 2 * (4 * 64 * 64 + 64)


def test_compressed_attention_by_hand() -> None:
    # DeepSeek-V3: 128 heads of 128 + 64 for scores and 128 for values, from 1536 and 512 wide latents (section 2.1.1 of
    # arXiv:2412.19437).
    shape = TransformerShape("v3", 1, 7168, 18432, 128, 128, 128, 129280, 4096, **MODERN,
                             latent=Latent(1536, 512, 128, 64, 128))  # fmt: skip
    layer = shape.profile().blocks[1]
    queries, values = 128 * 192, 128 * 128
    weights = 7168 * 1536 + 1536 * queries + 7168 * (512 + 64) + 512 * (128 * 128 + values) + values * 7168
    assert layer.matmul_flops == 2 * 4096 * (weights + 3 * 7168 * 18432)
    assert layer.attention_flops == 4096**2 * (queries + values), "half of 2 s^2 for each width"
    assert layer.kv_elements == 4096 * (queries + values), "expanded: training has no cache of latents"
    latents = 2 * (1536 + 512) + 64
    kept = 4 * 7168 + queries + queries + 2 * values + latents + 3 * 18432
    assert layer.saved_elements == 4096 * kept
    uncompressed = replace(shape, latent=None, head_dim=192).profile().blocks[1]
    assert layer.parameters == uncompressed.parameters - 4 * 7168 * queries + weights + 1536 + 512


def test_a_window_shows_a_band_of_the_pairs_and_some_layers_see_all() -> None:
    shape = TransformerShape("oss", 4, 2880, 2880, 64, 8, 64, 201088, 4096, **MODERN)
    banded = replace(shape, window=128, full_every=2).profile().blocks[1:5]
    pairs = sum(min(at + 1, 128) for at in range(4096))
    whole = sum(at + 1 for at in range(4096))
    plain = shape.profile().blocks[1].attention_flops
    assert [one.attention_flops for one in banded[1::2]] == [plain, plain]
    assert banded[0].attention_flops / plain == pytest.approx(pairs / whole, rel=0.01)
    assert banded[0].attention_flops == banded[2].attention_flops
    assert replace(shape, window=8192).profile().blocks[1].attention_flops == plain, "a window longer than the sequence"
    assert replace(shape, window=128, flash=False).profile().blocks[1].attention_flops == 2 * plain


@pytest.mark.parametrize("window", [0, 64, 300])
def test_texts_in_a_row_attend_to_themselves_alone(window: int) -> None:
    shape = replace(TransformerShape("l", 1, 4096, 14336, 32, 8, 128, 128256, 4096, **MODERN), text_tokens=256)
    pairs = 16 * sum(min(at + 1, window or 256) for at in range(256))
    whole = sum(at + 1 for at in range(4096))
    one = replace(shape, text_tokens=0).profile().blocks[1]
    found = replace(shape, window=window).profile().blocks[1]
    assert found.attention_flops / one.attention_flops == pytest.approx(pairs / whole, rel=0.01)
    assert (found.matmul_flops, found.saved_elements) == (one.matmul_flops, one.saved_elements)
    assert replace(shape, text_tokens=8192).profile().blocks[1] == one, "a text longer than the row"
    unfused = replace(shape, flash=False).profile().blocks[1].attention_flops
    assert unfused == 2 * one.attention_flops, "scores of other texts are computed, and masked"


def test_experts_products_are_told_apart_from_those_of_every_token() -> None:
    shape = TransformerShape("v3", 2, 7168, 18432, 128, 128, 128, 129280, 4096, **MODERN,
                             experts=ExpertSizes(256, 8, 2048, 2048, groups=(8, 4)))  # fmt: skip
    layer = shape.profile().blocks[1]
    assert layer.routed_flops == 2 * 4096 * 8 * 3 * 7168 * 2048
    dense = 4 * 7168 * 128 * 128 + 3 * 7168 * 2048 + 7168 * 256
    assert layer.matmul_flops - layer.routed_flops == 2 * 4096 * dense
    assert layer.routed_width == pytest.approx((7168 * 2048) ** 0.5) and layer.routed_groups == (8, 4)
    assert layer.matmul_width > 2 * layer.routed_width, "attention's are the widest"


def test_queries_and_keys_that_are_normalised_are_moved_and_kept_once_more() -> None:
    shape = TransformerShape("qwen3", 1, 2048, 6144, 32, 4, 128, 151936, 4096, **MODERN)
    plain, normed = (replace(shape, head_norm=given).profile().blocks[1] for given in (False, True))
    wide = 32 * 128 + 4 * 128
    assert normed.saved_elements - plain.saved_elements == 4096 * wide
    assert normed.moved_elements - plain.moved_elements == 4096 * 2 * wide
    assert normed.parameters - plain.parameters == 2 * 128

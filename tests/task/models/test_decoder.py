"""The decoder: parts against plain formulas, the fused loss against the ordinary one, meta, compile and dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from decoders import OPERATIONS, batch, built, tiny
from rounding import assert_close

from paceline.task.models.decoder import Decoder
from paceline.task.models.init import initialise
from paceline.task.models.layers import chunks, loss
from paceline.task.models.layers.norm import RMSNorm


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1000, 7, 1])
def test_fused_loss_equals_cross_entropy_of_logits(
    tied: bool, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "loss_chunk_tokens", lambda *_: chunk_tokens)
    config = tiny(tied=tied)
    model = built(config, torch.float64)
    tokens, labels = batch(config)

    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    (expected * 0.3).backward()
    reference = gradients(model)

    loss_sum, weight = model(tokens, labels=labels)
    (loss_sum * 0.3).backward()
    assert weight == 3 * 12 - 4
    assert loss_sum.dtype == torch.float64
    torch.testing.assert_close(loss_sum, expected, rtol=1e-12, atol=0)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-14, msg=name)


def test_loss_without_gradients_and_with_a_frozen_head() -> None:
    config = tiny(tied=False)
    model = built(config)
    tokens, labels = batch(config)
    with torch.no_grad():
        quiet, _ = model(tokens, labels=labels)
    model.lm_head.weight.requires_grad_(False)
    loud, _ = model(tokens, labels=labels)
    loud.backward()
    assert quiet == loud
    assert model.lm_head.weight.grad is None
    assert model.norm.weight.grad.abs().sum() > 0


def test_a_batch_of_ignored_labels_has_no_loss_and_no_gradient() -> None:
    config = tiny()
    model = built(config)
    tokens, labels = batch(config)
    loss_sum, weight = model(tokens, labels=torch.full_like(labels, -100))
    loss_sum.backward()
    assert (loss_sum, weight) == (0, 0)
    assert all(gradient.abs().sum() == 0 for gradient in gradients(model).values())


def test_bf16_loss_is_fp32_and_close() -> None:
    config = tiny()
    tokens, labels = batch(config)
    exact, _ = built(config)(tokens, labels=labels)
    rough, _ = built(config, torch.bfloat16)(tokens, labels=labels)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=5e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs_own(dtype: torch.dtype) -> None:
    norm = RMSNorm(16, 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)

    ours = norm(x)
    ours.backward(upstream)
    got = [ours.detach(), x.grad, norm.weight.grad]
    x.grad = norm.weight.grad = None
    reference = F.rms_norm(x, (16,), norm.weight, 1e-5)
    reference.backward(upstream)
    for mine, theirs in zip(got, [reference.detach(), x.grad, norm.weight.grad], strict=True):
        assert mine.dtype == dtype
        assert_close(mine, theirs, 100)  # means over 16 features, sums over 10 tokens


def test_rms_norm_passes_gradcheck() -> None:
    norm = RMSNorm(6, 1e-5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(2))
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(norm, {"weight": weight}, x.detach()), (norm.weight,)
    )


def test_a_norms_weight_may_arrive_in_fp32_or_bf16() -> None:
    """FSDP2 hands over bf16 weights where a single device casts: both must give the same numbers."""
    norm = RMSNorm(16, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    from_fp32 = norm(x)
    assert from_fp32.dtype == torch.bfloat16
    assert torch.equal(from_fp32, norm.bfloat16()(x))


def test_attention_is_causal() -> None:
    config = tiny()
    model = built(config)
    tokens, _ = batch(config)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % config.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_a_model_from_the_meta_device_equals_one_from_the_cpu() -> None:
    config = tiny()
    with torch.device("meta"):
        model = Decoder(config)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    initialise(model, seed=1)
    tokens, _ = batch(config)
    assert torch.equal(model(tokens), built(config)(tokens))


def test_forward_runs_on_the_meta_device() -> None:
    config = tiny()
    with torch.device("meta"):
        model = Decoder(config)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    loss_sum, _ = model(tokens, labels=tokens)
    loss_sum.backward()
    assert model(tokens).shape == (2, 8, 50)
    assert model.layers[0].mlp.up_proj.weight.grad.shape == (48, 32)


def test_layers_compile_without_graph_breaks() -> None:
    config = tiny(layers=1)
    model = built(config)
    tokens, labels = batch(config)
    expected, _ = model(tokens, labels=labels)
    expected.backward()
    reference = gradients(model)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    got, _ = model(tokens, labels=labels)
    got.backward()
    assert_close(got, expected, OPERATIONS)
    for name, gradient in gradients(model).items():
        assert_close(gradient, reference[name], OPERATIONS, name)


def test_chunks_of_tokens_keep_logits_within_the_limit() -> None:
    assert chunks.loss_chunk_tokens(128_256) * 128_256 <= chunks.LOGITS_LIMIT_ELEMENTS
    assert chunks.loss_chunk_tokens(2 * chunks.LOGITS_LIMIT_ELEMENTS) == 1

"""Equality with transformers' LlamaForCausalLM in fp32, both ways, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoders import OPERATIONS, batch, built, tiny
from rounding import assert_close
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import ConfigError, StorageError
from paceline.task.models.build import load_weights
from paceline.task.models.decoder import Decoder, rotary_frequencies
from paceline.task.models.huggingface.files import INDEX, read_safetensors
from paceline.task.models.huggingface.weights import (
    export_safetensors,
    from_hf_state,
    to_hf_config,
    to_hf_state,
)
from paceline.task.models.shape import DecoderConfig, RopeScaling
from paceline.task.models.sizes import NAMED_SIZES

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=16)
CONFIGS = {
    "tied, grouped": tiny(),
    "untied, grouped": tiny(tied=False, rope_theta=500_000.0),
    "untied, one key per query": tiny(tied=False, kv_heads=4),
    "tied, one key for all, stretched": tiny(kv_heads=1, rope_scaling=SCALING, max_seq=128),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return CONFIGS[request.param]


def theirs(config: DecoderConfig) -> LlamaForCausalLM:
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**to_hf_config(config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is in the wrong place
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(3)
    return model.eval()


def assert_same_logits(ours: Decoder, other: LlamaForCausalLM) -> None:
    tokens, _ = batch(ours.config)
    with torch.no_grad():
        assert_close(ours(tokens), other(tokens).logits, OPERATIONS)


def test_export_loads_in_transformers(config: DecoderConfig, tmp_path: Path) -> None:
    ours = built(config)
    export_safetensors(ours.state_dict(), config, tmp_path)
    other = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same_logits(ours, other)
    for name, tensor in to_hf_state(ours.state_dict()).items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_saved_transformers_model_loads_here(config: DecoderConfig, tmp_path: Path) -> None:
    other = theirs(config)
    other.save_pretrained(tmp_path)
    ours = Decoder(config)
    load_weights(ours, str(tmp_path))
    assert_same_logits(ours, other)


def test_loss_and_gradients_equal_transformers(config: DecoderConfig) -> None:
    other, ours = theirs(config), Decoder(config)
    ours.load_state_dict(from_hf_state(other.state_dict(), tied=config.tied))
    tokens, labels = batch(config)
    loss_sum, weight = ours(tokens, labels=labels)
    (loss_sum / weight).backward()
    logits = other(tokens).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    reference = dict(other.named_parameters())
    for name, gradient in to_hf_state({name: p.grad for name, p in ours.named_parameters()}).items():
        assert_close(gradient, reference[name].grad, OPERATIONS, name)


def test_state_round_trip() -> None:
    state = built(tiny(tied=False)).state_dict()
    assert list(from_hf_state(to_hf_state(state))) == list(state)
    assert "lm_head.weight" in to_hf_state(state)
    assert "lm_head.weight" not in from_hf_state(to_hf_state(state), tied=True)


def test_large_exports_are_sharded(tmp_path: Path) -> None:
    config = tiny(tied=False)
    ours = built(config)
    export_safetensors(ours.state_dict(), config, tmp_path, shard_bytes=20_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert not list(tmp_path.glob("*.part"))
    assert_same_logits(ours, LlamaForCausalLM.from_pretrained(tmp_path))
    stored = read_safetensors(tmp_path)
    assert set(stored) == set(to_hf_state(ours.state_dict()))
    assert stored.shape("lm_head.weight") == (50, 32)

    files[-1].unlink()
    with pytest.raises(StorageError, match=f"names {files[-1].name}"):
        read_safetensors(tmp_path)


def test_exporting_again_replaces_a_sharded_export(tmp_path: Path) -> None:
    config = tiny()
    export_safetensors(built(config).state_dict(), config, tmp_path, shard_bytes=20_000)
    changed = built(config)
    with torch.no_grad():
        changed.norm.weight.fill_(2.0)
    export_safetensors(changed.state_dict(), config, tmp_path)
    assert not (tmp_path / INDEX).exists()
    assert_same_logits(changed, LlamaForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(read_safetensors(tmp_path)["model.norm.weight"], torch.full((32,), 2.0))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (lambda state: state.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (lambda state: state.update(extra=torch.ones(1)), "1 unexpected: extra"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(3)}),
            "1 of another shape: model.norm.weight is [3] in the file, [32] in the model",
        ),
    ],
)
def test_weights_of_another_model_are_refused(change, because: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = tiny()
    state = to_hf_state(built(config).state_dict())
    change(state)
    save_file(state, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError) as refusal:
        load_weights(Decoder(config), str(tmp_path / "weights.safetensors"))
    assert because in refusal.value.because


def test_a_tied_model_ignores_the_heads_copy_in_a_file(tmp_path: Path) -> None:
    config = tiny()
    state = to_hf_state(built(config).state_dict())
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / "w.safetensors")
    ours = Decoder(config)
    load_weights(ours, str(tmp_path / "w.safetensors"))
    assert torch.equal(ours.embed_tokens.weight, state["model.embed_tokens.weight"])


def test_a_config_json_with_another_rotary_base_is_refused(tmp_path: Path) -> None:
    config = tiny()
    export_safetensors(built(config).state_dict(), config, tmp_path)
    with pytest.raises(ConfigError, match=r"rope_theta is 10000\.0 there, 500000\.0 here"):
        load_weights(Decoder(tiny(rope_theta=500_000.0)), str(tmp_path))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_safetensors(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"holds no \.safetensors"):
        read_safetensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(StorageError, match="cannot be read as safetensors"):
        read_safetensors(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": []}))
    with pytest.raises(StorageError, match=r"index\.json cannot be read"):
        read_safetensors(tmp_path)


def test_export_to_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot export weights"):
        export_safetensors(built(tiny()).state_dict(), tiny(), tmp_path / "file")


def test_llama_31_frequencies_equal_transformers() -> None:
    for name in ("llama-1b", "llama-8b"):
        config = NAMED_SIZES[name]
        reference = LlamaRotaryEmbedding(LlamaConfig(**to_hf_config(config))).inv_freq
        torch.testing.assert_close(rotary_frequencies(config, torch.device("cpu")), reference, rtol=1e-6, atol=0)

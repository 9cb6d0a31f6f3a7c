"""Named sizes: true parameter counts, overrides, and refusals that name the way out."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.models.shape import DecoderConfig
from paceline.task.models.sizes import NAMED_SIZES, is_named, nominal_vocab, resolve_decoder

# Parameters in the published checkpoints' safetensors metadata.
PUBLISHED = {
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", [name for name in NAMED_SIZES if name.startswith("llama")])
def test_the_name_tells_the_parameter_count(name: str) -> None:
    number, unit = re.fullmatch(r"llama-(\d+)([mb])", name).groups()
    size = dataclasses.replace(NAMED_SIZES[name], vocab=nominal_vocab(NAMED_SIZES[name]))
    assert size.parameters == PUBLISHED.get(name, size.parameters)
    named = int(number) * (10**6 if unit == "m" else 10**9)
    assert size.parameters == pytest.approx(named, rel=0.03 if unit == "m" else 0.24)  # Llama-3.2-1B has 1.24 B


def test_published_experts_have_the_parameters_of_their_name() -> None:
    size = NAMED_SIZES["qwen3-30b-a3b"]
    assert size.parameters == 30_532_122_624  # the model card: 30.5 B, 3.3 B of them active
    assert size.active_parameters == pytest.approx(3.3e9, rel=0.02)
    assert resolve_decoder(ModelSpec(name="qwen3-30b-a3b"), 257, 64).head_dim == 128, "wider than hidden / heads"


def test_small_sizes_take_the_datas_vocabulary_and_length() -> None:
    config = resolve_decoder(ModelSpec(name="llama-11m"), data_vocab=257, seq_len=512)
    assert (config.vocab, config.max_seq, config.tied) == (257, 512, True)
    config = resolve_decoder(ModelSpec(name="llama-8b"), data_vocab=257, seq_len=512)
    assert (config.vocab, config.max_seq, config.tied) == (128_256, 131_072, False)


def test_overrides_replace_only_what_they_name() -> None:
    spec = ModelSpec(name="llama-11m", hidden=128, layers=2, heads=2, kv_heads=1, ffn=96, vocab=300, tied=False)
    config = resolve_decoder(spec, data_vocab=257, seq_len=64)
    assert config == DecoderConfig("llama-11m", 128, 2, 2, 1, 64, 96, vocab=300, tied=False, max_seq=64)


@pytest.mark.parametrize(
    ("spec", "data_vocab", "seq_len", "what", "fix"),
    [
        (ModelSpec(name="lama-11m"), 257, 8, "no model 'lama-11m'", "'llama-11m'"),
        (ModelSpec(name="llama-11m", hidden=100, heads=8), 257, 8, "hidden = 100 with heads = 8", "hidden = 96"),
        (ModelSpec(name="llama-11m", kv_heads=4), 257, 8, "heads = 6 with kv_heads = 4", "kv_heads = 3"),
        (ModelSpec(name="llama-11m", hidden=18), 257, 8, "heads of width 3", "even multiple"),
        (ModelSpec(name="llama-11m", vocab=100), 257, 8, "vocabulary of 100", "model.vocab = 257"),
        (ModelSpec(name="llama-11m"), 0, 8, "vocabulary of 0", "model.vocab"),
        (ModelSpec(name="llama-1b"), 257, 200_000, "samples of 200,000 tokens", "seq_len = 131072"),
        (ModelSpec(name="llama-1b", arguments={"width": 3}), 257, 8, "takes no arguments, given width", "overrides"),
    ],
)
def test_impossible_models_are_refused(spec: ModelSpec, data_vocab: int, seq_len: int, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        resolve_decoder(spec, data_vocab, seq_len)
    assert what in refusal.value.what
    assert fix in refusal.value.try_


def test_is_named() -> None:
    assert is_named("llama-1m")
    assert not is_named("my.module:build")


def test_sizes_and_analytic_profile_do_not_import_torch() -> None:
    code = "import sys, paceline.task.models.sizes, paceline.task.profile.decoder; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"

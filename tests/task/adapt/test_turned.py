"""Adapters beside transformers' Conv1D (GPT-2), whose weights lie as [in, out]: computed, spread, merged, as peft's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from model_folders import loaded, write_model
from runs import in_process, steps_of, write_corpus
from safetensors.torch import load_file
from tests_huggingface import hf_task
from tests_shared import SEQ_LEN
from tests_shared import coarse_plan as plan_of
from torch import nn

from paceline.errors import ConfigError
from paceline.run.process.world import join_world
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec
from paceline.task.adapt.fill import fill_adapters
from paceline.task.adapt.linear import TurnedLinear
from paceline.task.adapt.merge import MergedTensors
from paceline.task.adapt.peft import CONFIG, FILE, write_adapter
from paceline.task.adapt.trained import adapt, turned_layers
from paceline.task.models.build import build_model
from paceline.verify.compare.layout import compare

LORA = AdapterSpec(kind="lora", rank=3, alpha=6.0, init="random")
DORA = dataclasses.replace(LORA, kind="dora")
SPECS = [LORA, DORA]
TOKENS = torch.arange(16).view(2, 8)


def pair(spec: AdapterSpec) -> nn.Module:
    """Return two such layers with adapters, one of them as wide as it is high: its shape does not tell how it lies."""
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(5)
    model = nn.Sequential(Conv1D(6, 6), Conv1D(4, 6))
    adapt(model, Adaptation(spec))
    fill_adapters(model, 3)
    return model


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_layer_computes_what_the_papers_say_and_merges_into_it(spec: AdapterSpec) -> None:
    model, x = pair(spec), torch.randn(3, 6)
    expected = x
    for layer in model:
        assert isinstance(layer, TurnedLinear)
        whole = layer.weight.T + spec.scale * layer.lora_B.T @ layer.lora_A
        if layer.lora_magnitude_vector is not None:
            torch.testing.assert_close(layer.lora_magnitude_vector, layer.weight.norm(dim=0))
            whole = layer.lora_magnitude_vector[:, None] * whole / whole.norm(dim=1, keepdim=True)
        expected = expected @ whole.T + layer.bias
    torch.testing.assert_close(model(x), expected)
    assert turned_layers(model) == ["0", "1"]
    merged, plain = dict(MergedTensors(model.state_dict(), spec, turned_layers(model))), x
    for index, layer in enumerate(model):
        assert merged[f"{index}.weight"].shape == layer.weight.shape and merged[f"{index}.weight"].is_contiguous()
        plain = plain @ merged[f"{index}.weight"] + merged[f"{index}.bias"]
    torch.testing.assert_close(plain, expected)


def test_four_bits_are_refused_there() -> None:
    with pytest.raises(ConfigError, match="Conv1D"):
        pair(dataclasses.replace(LORA, base_dtype="nf4"))


def compared(plans: list[Plan]) -> list[CheckProof]:
    """Return GPT-2 with either adapter, with dropout of inputs, held against one device under every plan."""
    world = join_world("cpu", threads=1)
    tasks = [dataclasses.replace(hf_task("GPT2"), adapter=dataclasses.replace(spec, dropout=0.25)) for spec in SPECS]
    return [compare(task, plan, world, task.data, SEQ_LEN, 2) for plan in plans for task in tasks]


def test_every_shard_has_the_numbers_of_one_device() -> None:
    """FSDP2 cuts the inputs of such a weight, over which DoRA's norms are summed."""
    shards = plan_of(Layout(dp_shard=2), precision="fp64", recompute="full")
    copies = plan_of(Layout(dp_replicate=2), precision="fp64")
    for proof in run_ranks(compared, 2, [shards, copies])[0]:
        assert proof.equal, proof.first_difference


SPEC = """
[task]
model = "hf:{folder}"
data = {{ source = "{corpus}", seq_len = 16, tokenizer = "bytes", cache_dir = "{corpus}/../cache" }}
adapter = {{ kind = "dora", rank = 2 }}
optimizer = {{ lr = 1e-2 }}
global_batch = "8 samples"
stop = "3 steps"

[cluster]
device = "cpu"
devices = 1
probe = false

[plan]
precision = "fp32"

[run]
dir = "{run}"
evaluate_every = "none"
"""


def test_a_folder_of_gpt2_is_trained_and_given_back(tmp_path: Path) -> None:
    """The merged folder computes what the base and the written adapter do; the attention's output layer is square."""
    folder, corpus = write_model(tmp_path / "gpt2", "GPT2"), write_corpus(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC.format(folder=folder, corpus=corpus, run=tmp_path / "run"))
    done = in_process("train", tmp_path / "spec.toml")
    assert done.returncode == 0, done.stderr
    assert len(steps_of(tmp_path / "run")) == 3
    for out, more in (("adapter", []), ("merged", ["--merge"])):
        exported = in_process("export", tmp_path / "run", tmp_path / out, *more)
        assert exported.returncode == 0, exported.stderr
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert config["fan_in_fan_out"] is True
    assert config["task_type"] == "CAUSAL_LM", "though its tied head is no tensor of its own"
    base, merged = loaded(folder).state_dict(), loaded(tmp_path / "merged").state_dict()
    adapter = load_file(tmp_path / "adapter" / FILE)
    assert len(adapter) == 2 * 4 * 3
    for name in ("transformer.h.1.attn.c_proj", "transformer.h.0.mlp.c_fc"):
        thin_in, thin_out, magnitude = (
            adapter[f"base_model.model.{name}.{part}"]
            for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        )
        whole = base[f"{name}.weight"].T + 16 / 2 * thin_out @ thin_in
        by_hand = (magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)).T
        torch.testing.assert_close(merged[f"{name}.weight"], by_hand, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(base[f"{name}.weight"], by_hand, atol=1e-3), "three steps changed it"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_peft_loads_what_is_written_and_the_other_way_round(tmp_path: Path, spec: AdapterSpec) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: the format is tested by its names alone")
    folder = write_model(tmp_path / "gpt2", "GPT2")

    def ours(given: AdapterSpec) -> Any:
        return build_model(ModelSpec(name=f"hf:{folder}"), 0, 16, seed=3, adaptation=Adaptation(given)).eval()

    model = ours(spec)
    write_adapter(model.state_dict(), spec, set(), tmp_path / "out", base=str(folder), is_decoder=False, is_turned=True)
    theirs = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "out").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)
    config = peft.LoraConfig(r=3, lora_alpha=6.0, use_dora=spec.kind == "dora", init_lora_weights=False,
                             target_modules=["c_attn", "c_proj", "c_fc"], task_type="CAUSAL_LM")  # fmt: skip
    made = peft.get_peft_model(loaded(folder), config).eval()
    made.save_pretrained(tmp_path / "theirs")
    read = ours(dataclasses.replace(spec, weights=str(tmp_path / "theirs")))
    torch.testing.assert_close(read(TOKENS).logits, made(TOKENS).logits, rtol=1e-4, atol=1e-5)

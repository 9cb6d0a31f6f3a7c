"""Adapters in peft's names and files: written by Paceline and read by peft, and the other way round."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import write_model
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.errors import ConfigError
from paceline.session.verbs.adapted import write_adapters
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.adapt.peft import CONFIG, FILE, write_adapter
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.weights import export_safetensors

VOCAB, SEQ = 61, 8
MODEL = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, tied=False)
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) % VOCAB
LORA = AdapterSpec(kind="lora", rank=4, alpha=6.0, init="random")
SPECS = [LORA, dataclasses.replace(LORA, kind="rslora"), dataclasses.replace(LORA, kind="dora")]


def built(spec: AdapterSpec, *train: str, seed: int = 3) -> Any:
    return build_model(MODEL, VOCAB, SEQ, seed=seed, adaptation=Adaptation(spec, train))


def written(model: nn.Module, spec: AdapterSpec, folder: Path, trained: set[str] = frozenset()) -> Path:  # type: ignore
    write_adapter(model.state_dict(), spec, trained, folder, base="", is_decoder=True)
    return folder


def test_names_shapes_and_config_are_those_of_peft(tmp_path: Path) -> None:
    # As peft 0.21 writes them: save_pretrained of a LlamaForCausalLM with use_dora and modules_to_save = ["lm_head"].
    spec = dataclasses.replace(LORA, kind="dora", targets=("q_proj", "down_proj"))
    folder = written(built(spec, "lm_head.*"), spec, tmp_path, {"lm_head.weight"})
    assert {name: tuple(tensor.shape) for name, tensor in load_file(folder / FILE).items() if ".1." not in name} == {
        "base_model.model.lm_head.weight": (61, 32),
        "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": (4, 40),
        "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": (32, 4),
        "base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector": (32,),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 32),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": (32, 4),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (32,),
    }
    config = json.loads((folder / CONFIG).read_text())
    assert (config["peft_type"], config["task_type"], config["r"], config["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 6)
    assert config["use_dora"] and not config["use_rslora"] and config["modules_to_save"] == ["lm_head"]
    assert config["target_modules"] == [f"model.layers.{layer}.{name}" for layer in (0, 1)
                                        for name in ("mlp.down_proj", "self_attn.q_proj")]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_written_adapter_is_read_back(tmp_path: Path, spec: AdapterSpec) -> None:
    model = built(spec, "lm_head.*")
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    folder = written(model, spec, tmp_path / "adapter", {"lm_head.weight"})
    again = built(dataclasses.replace(spec, weights=str(folder)), "lm_head.*")
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 8, "kind": "dora"}, "kind is lora there, dora here; rank is 4 there, 8 here"),
        ({"targets": ("q_proj",)}, "of layers that have no adapter here"),
        ({"weights": "nowhere"}, "is no adapter in peft's format"),
    ],
)
def test_another_adapter_is_refused_with_all_differences(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = written(built(LORA), LORA, tmp_path)
    with pytest.raises(ConfigError) as found:
        built(dataclasses.replace(LORA, **{"weights": str(folder), **changes}))
    assert said in str(found.value)


def test_what_is_missing_in_the_file_or_unknown_here_is_told(tmp_path: Path) -> None:
    folder = written(built(LORA), LORA, tmp_path)
    spec = dataclasses.replace(LORA, weights=str(folder))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "bias": "all", "rank_pattern": {"q_proj": 2}}))
    with pytest.raises(ConfigError, match=r"bias = all is not known here; rank_pattern"):
        built(spec)
    for more, said in (
        ({"use_dora": True, "use_rslora": True}, "use_rslora scales its product"),
        ({"init_lora_weights": "pissa"}, "'pissa' has changed the frozen weights"),
        ({"init_lora_weights": "olora"}, "'olora' has changed the frozen weights"),
    ):
        (folder / CONFIG).write_text(json.dumps({**config, **more}))
        with pytest.raises(ConfigError, match=said):
            built(spec)
    (folder / CONFIG).write_text(json.dumps({**config, "init_lora_weights": "gaussian"}))
    built(spec)
    (folder / CONFIG).write_text(json.dumps(config))
    held = load_file(folder / FILE)
    save_file({name: tensor for name, tensor in held.items() if "layers.1.mlp" not in name}, folder / FILE)
    with pytest.raises(ConfigError, match="6 missing"):
        built(spec)


def base_of(model: nn.Module, folder: Path) -> Any:
    """Return transformers' model with the frozen weights of ours."""
    transformers = pytest.importorskip("transformers")
    plain = build_model(MODEL, VOCAB, SEQ, seed=3)
    export_safetensors(plain.state_dict(), plain.config, folder)  # type: ignore[arg-type]
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_peft_loads_what_paceline_writes_and_the_other_way_round(tmp_path: Path, spec: AdapterSpec) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: the format is tested by its names alone")
    model = built(spec, "lm_head.*")
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    folder = written(model, spec, tmp_path / "ours", {"lm_head.weight"})
    theirs = peft.PeftModel.from_pretrained(base_of(model, tmp_path / "base"), folder).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, model.eval()(TOKENS), rtol=1e-5, atol=1e-5)

    config = peft.LoraConfig(
        r=4, lora_alpha=6.0, target_modules=["q_proj", "up_proj"], use_dora=spec.kind == "dora",
        use_rslora=spec.kind == "rslora", init_lora_weights=False, modules_to_save=["lm_head"], task_type="CAUSAL_LM",
    )  # fmt: skip
    made = peft.get_peft_model(base_of(model, tmp_path / "base"), config).eval()
    made.save_pretrained(tmp_path / "theirs")
    read = dataclasses.replace(spec, weights=str(tmp_path / "theirs"), targets=("q_proj", "up_proj"))
    torch.testing.assert_close(built(read).eval()(TOKENS), made(TOKENS).logits, rtol=1e-5, atol=1e-5)


DEEPSEEK = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "qk_nope_head_dim": 8, "n_group": 1,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "topk_group": 1, "max_position_embeddings": 32, "pad_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dense_layers_beside_stacked_experts_keep_their_adapters_in_peft(tmp_path: Path, dropout: float) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**DEEPSEEK))
    base.save_pretrained(tmp_path / "base")
    spec = dataclasses.replace(LORA, dropout=dropout)
    model = ModelSpec(name=f"hf:{tmp_path / 'base'}")
    ours: Any = build_model(model, 0, SEQ, seed=3, adaptation=Adaptation(spec, ())).eval()
    write_adapters(Task(model=model, adapter=spec), "", ours.state_dict(), tmp_path / "out", is_decoder=False)
    assert any("shared_experts.down_proj.lora_B" in name for name in load_file(tmp_path / "out" / FILE))
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(found, tmp_path / "out").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert (theirs(TOKENS).logits - base.eval()(TOKENS).logits).abs().max() > 1e-3
    again = dataclasses.replace(spec, weights=str(tmp_path / "out"))
    read: Any = build_model(model, 0, SEQ, seed=3, adaptation=Adaptation(again, ())).eval()
    torch.testing.assert_close(read(TOKENS).logits, ours(TOKENS).logits, rtol=0.0, atol=0.0)
    with pytest.raises(ConfigError, match="peft would drop the adapter of"):
        turned = dataclasses.replace(spec, kind="dora")
        write_adapters(Task(model=model, adapter=turned), "", ours.state_dict(), tmp_path / "no", is_decoder=False)


def test_an_adapter_and_a_new_head_on_a_folder_go_to_peft(tmp_path: Path) -> None:
    """A classifier of a causal model's folder: its class, the head in modules_to_save, the folder as the base."""
    folder, spec = write_model(tmp_path / "m", "Llama"), AdapterSpec(kind="lora", rank=4, alpha=6.0, init="random")
    arguments = {"architecture": "LlamaForSequenceClassification", "num_labels": 3, "pad_token_id": 0}
    task = Task(
        model=ModelSpec(name=f"hf:{folder}", arguments=arguments, fresh=("score.*",)), adapter=spec, train=("score.*",)
    )
    ours: Any = build_model(task.model, 0, SEQ, seed=3, adaptation=Adaptation(spec, task.train)).eval()
    write_adapters(task, str(folder), ours.state_dict(), tmp_path / "out", is_decoder=False)
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert config["base_model_name_or_path"] == str(folder)
    stored = load_file(tmp_path / "out" / FILE)
    assert torch.equal(stored["base_model.model.score.weight"], ours.score.weight)

    peft = pytest.importorskip("peft", reason="peft is not installed: the format is tested by its names alone")
    base = {"num_labels": 3, "pad_token_id": 0}
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out", **base).eval()
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS).logits, rtol=1e-5, atol=1e-5)

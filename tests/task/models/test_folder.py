"""A folder of Hugging Face becomes the built-in decoder where every entry is computed alike, else its own class."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from model_folders import VOCAB, change_config, loaded, write_model, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import ConfigError, StorageError
from paceline.spec.load import parse_spec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.build import build_model
from paceline.task.models.decoder import Decoder
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.loaded import as_in_memory
from paceline.task.models.huggingface.names import decoder_shapes, hf_name
from paceline.task.models.huggingface.road import road_of
from paceline.task.models.huggingface.start import fit_texts, starting_weights
from paceline.task.models.huggingface.transfer import fit_decoder
from paceline.task.models.huggingface.weights import their_state
from paceline.task.models.sizes import NAMED_SIZES, resolve_decoder

SEQ = 32  # more than the original positions of the scaled Llama
BUILT_IN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Mixtral", "Qwen3Moe")
# transformers computes norms and rotary angles in fp32 in an fp64 model too, and so do routers.
CLOSE = 3e-6


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (3, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("family", [*BUILT_IN, "Gemma", "GPT2"])
def test_a_folder_computes_what_transformers_does(tmp_path: Path, family: str) -> None:
    """Loss and every gradient of the whole batch; in fp64 where transformers' kernels take it."""
    folder = write_model(tmp_path / family, family)
    routed = family in ("Mixtral", "Qwen3Moe")
    balance: dict[str, Any] = {"balance": "none"} if routed else {}  # is no part of transformers' logits
    dtype = torch.float32 if balance else torch.float64
    theirs = loaded(folder).to(dtype)
    ours = build_model(ModelSpec(name=str(folder), **balance), 0, SEQ, seed=3).to(dtype)
    assert isinstance(ours, Decoder) == (family in BUILT_IN)
    tokens, labels = batch()
    expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    if isinstance(ours, Decoder):
        loss, _ = ours(tokens, labels)
    else:
        loss = F.cross_entropy(ours(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=CLOSE, atol=0)
    wanted = gradients_of(theirs, expected)
    found = gradients_of(ours, loss)
    if isinstance(ours, Decoder):
        found = {hf_name(name): grad.flatten(1, 2) if grad.dim() == 4 else grad for name, grad in found.items()}
    assert set(found) == set(wanted)
    for name, grad in found.items():
        largest = float(wanted[name].abs().max())
        assert largest > 0 and float((grad - wanted[name]).abs().max()) < 2 * CLOSE * largest, name


def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Mistral")
    assert road_of(str(folder)).decoder is not None
    change_config(folder, hidden_act="gelu", sliding_window=8, novel_entry=3,
                  rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})  # fmt: skip
    road = road_of(str(folder))
    assert road.decoder is None and road.chosen == "transformers' MistralForCausalLM"
    for part in ("hidden_act = 'gelu'", "sliding_window = 8", "novel_entry = 3", "the kind 'yarn'"):
        assert part in road.because


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"sliding_window": 64}, True),  # no shorter than any sequence
        ({"sliding_window": 63}, False),
        ({"attention_dropout": 0.1}, False),
        ({"quantization_config": {"bits": 4}}, False),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": None}, True),  # as release 4 wrote it
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"architectures": ["MistralForSequenceClassification"]}, False),
        ({"hidden_size": None}, False),
    ],
)
def test_what_counts_as_alike(tmp_path: Path, changes: dict[str, Any], alike: bool) -> None:
    folder = change_config(write_model(tmp_path / "m", "Mistral"), **changes)
    assert (road_of(str(folder)).decoder is not None) == alike


def test_gemma_says_why_and_hf_asks_for_its_own_class(tmp_path: Path) -> None:
    gemma = road_of(str(write_model(tmp_path / "gemma", "Gemma")))
    assert len(gemma.differences) == 3 and "1 + weight" in gemma.because
    llama = write_model(tmp_path / "llama", "Llama")
    assert road_of(f"hf:{llama}").decoder is None
    assert type(build_model(ModelSpec(name=f"hf:{llama}"), 0, SEQ, 3)).__name__ == "LlamaForCausalLM"


def test_names_and_shapes_of_every_size_are_the_decoders() -> None:
    for name in NAMED_SIZES:
        config = resolve_decoder(ModelSpec(name=name), 300, 16)
        model = build_model(ModelSpec(name=name), 300, 16, 0, device="meta")
        built = {hf_name(own): tuple(parameter.shape) for own, parameter in model.named_parameters()}
        assert decoder_shapes(config) == built, name


def test_files_that_do_not_fit_are_told_at_once_from_headers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Qwen2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        del tensors[f"model.layers.{layer}.self_attn.q_proj.bias"]
    tensors["model.norm.weight"] = torch.ones(31)
    tensors["extra.weight"] = torch.ones(1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of older files, which follows
    save_file(tensors, file)
    decoder = road_of(str(folder)).decoder
    assert decoder is not None
    with pytest.raises(ConfigError) as refusal:
        fit_decoder(decoder, str(folder))
    assert refusal.value.because == (
        "2 missing: model.layers.*.self_attn.q_proj.bias (2); 1 unexpected: extra.weight; "
        "1 of another shape: model.norm.weight is [31] in the file, [32] in the model"
    )
    assert "fresh" not in refusal.value.try_, "what differs within blocks is another model"


@pytest.mark.parametrize("kind", ["absent", "no architecture", "not a table", "another format", "of its own code"])
def test_folders_that_are_none(tmp_path: Path, kind: str) -> None:
    folder = write_model(tmp_path / "m", "Llama")
    if kind == "absent":
        with pytest.raises(ConfigError, match="there is no model at"):
            road_of(str(tmp_path / "other"))
    elif kind == "no architecture":
        with pytest.raises(ConfigError, match="does not say which model"):
            road_of(str(change_config(folder, architectures=None)))
    elif kind == "not a table":
        (folder / "config.json").write_text("[]")
        with pytest.raises(StorageError, match="cannot be read"):
            road_of(str(folder))
    elif kind == "another format":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"no weights in") as refusal:
            starting_weights(str(folder))
        assert "pytorch_model.bin" in refusal.value.because
    else:
        change_config(folder, auto_map={"AutoModel": "modeling.Mine"})
        with pytest.raises(ConfigError, match="not part of transformers"):
            build_model(ModelSpec(name=str(folder)), 0, SEQ, 3)


def test_older_files_of_gpt2_have_no_prefix(tmp_path: Path) -> None:
    """The hub's GPT-2 names its tensors without `transformer.`, and holds masks that the class computes."""
    folder = write_model(tmp_path / "m", "GPT2")
    before = build_model(ModelSpec(name=str(folder)), 0, SEQ, 3).state_dict()
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, folder / "model.safetensors")
    after = build_model(ModelSpec(name=str(folder)), 0, SEQ, 3).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("config", "head", "older"), [
    (transformers.GPTNeoXConfig, "CausalLM", {"lm_head.": "embed_out."}),
    (transformers.BertConfig, "MaskedLM", {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),
])  # fmt: skip
def test_names_that_transformers_has_changed_since_are_those_of_now(
    tmp_path: Path, config: Any, head: str, older: dict[str, str]
) -> None:
    """The hub's bert-base-uncased has LayerNorm.gamma, GPT-NeoX embed_out: files of before the names were changed."""
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2}  # fmt: skip
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config(**shape))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for now, before in older.items():
        tensors = {name.replace(now, before): tensor for name, tensor in tensors.items()}
    assert any(before in name for name in tensors for before in older.values())
    save_file(tensors, tmp_path / "model.safetensors")
    read = build_model(ModelSpec(name=str(tmp_path)), 0, SEQ, 3).state_dict()
    assert set(read) >= {name for name, _ in model.named_parameters()}
    assert all(torch.equal(read[name], parameter) for name, parameter in model.named_parameters())


def test_older_names_of_a_sharded_model_are_those_of_now() -> None:
    """FSDP2 renames the class by which transformers finds the changes: Pythia's folders could not be sharded."""
    config = transformers.GPTNeoXConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2)  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    before = dict(model.named_parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert type(model).__name__ == "FSDPGPTNeoXForCausalLM"
        older: Any = {name.replace("lm_head.", "embed_out."): value for name, value in before.items()}
        assert set(as_in_memory(model, older)) == set(before) != set(older)
    finally:
        dist.destroy_process_group()


def test_experts_of_its_own_class_are_stacked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Mixtral")
    own, theirs = build_model(ModelSpec(name=f"hf:{folder}"), 0, SEQ, 3).state_dict(), loaded(folder).state_dict()
    assert set(own) == set(theirs) and all(torch.equal(own[name], theirs[name]) for name in own)


def test_a_fresh_start_of_the_folders_architecture(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Llama")
    spec = ModelSpec(name=str(folder), weights="none")
    assert spec.starts_from == "" and ModelSpec(name=str(folder)).starts_from == str(folder)
    fresh = build_model(spec, 0, SEQ, 3).state_dict()["embed_tokens.weight"]
    assert not torch.equal(fresh, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_the_folders_tokenizer_is_the_datas(tmp_path: Path) -> None:
    plain, folder = write_model(tmp_path / "a", "Llama"), write_tokenizer(write_model(tmp_path / "b", "Llama"))
    assert Task(model=str(plain)).data.tokenizer == "bytes"
    assert Task(model=str(folder)).data.tokenizer == str(folder / "tokenizer.json")
    assert Task(model=str(folder), data=DataSpec(source="stdlib", tokenizer="bytes")).data.tokenizer == "bytes"
    text = f'[task]\nmodel = "{folder}"\ndata = {{ seq_len = 32 }}\n'
    assert parse_spec(text).task.data.tokenizer == str(folder / "tokenizer.json")
    assert parse_spec(text.replace("seq_len = 32", 'seq_len = 32, tokenizer = "bytes"')).task.data.tokenizer == "bytes"


def test_a_bare_name_is_never_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to be called as a size does not take its place; a path has a slash."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "llama-1m", "Llama")
    write_model(tmp_path / "mine", "Llama")
    assert resolve_decoder(ModelSpec(name="llama-1m"), 300, 16).hidden == 128
    assert resolve_decoder(ModelSpec(name="./llama-1m"), 257, 16).hidden == 32
    with pytest.raises(ConfigError) as refusal:
        resolve_decoder(ModelSpec(name="mine"), 300, 16)
    assert "./mine" in refusal.value.try_


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Llama", shards="20KB")
    before = starting_weights(str(folder))
    assert before.files > 1 and before.tensors == 20
    file = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert starting_weights(str(folder)).fingerprint != before.fingerprint


def test_a_longer_vocabulary_goes_on_with_the_mean(tmp_path: Path) -> None:
    """Old rows are read, new ones are the mean of those, in the embedding and in the head; and told."""
    folder = write_model(tmp_path / "m", "Qwen2")
    spec = ModelSpec(name=str(folder), vocab=VOCAB + 9)
    state = build_model(spec, 0, SEQ, 3).state_dict()
    stored = load_file(folder / "model.safetensors")
    for ours, theirs in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        assert torch.equal(state[ours][:VOCAB], stored[theirs])
        mean = stored[theirs].double().mean(dim=0).float()
        torch.testing.assert_close(state[ours][VOCAB:], mean.expand(9, -1), rtol=1e-6, atol=1e-8)
    (embedding, head) = fit_texts(spec)
    assert embedding.startswith(f"model.embed_tokens.weight has {VOCAB} rows in the weights; each row after") and head
    shorter = ModelSpec(name=str(folder), vocab=VOCAB - 1)
    with pytest.raises(ConfigError, match="not this model's") as refusal:
        build_model(shorter, 0, SEQ, 3)
    assert 'task.model.fresh = ["model.embed_tokens.*", "lm_head.*"]' in refusal.value.try_
    drawn = dataclasses.replace(shorter, fresh=("model.embed_tokens.*", "lm_head.*"))  # as it says
    state = build_model(drawn, 0, SEQ, 3).state_dict()
    assert state["embed_tokens.weight"].shape[0] == VOCAB - 1
    assert torch.equal(state["norm.weight"], stored["model.norm.weight"])


def test_another_head_starts_fresh(tmp_path: Path) -> None:
    """A classifier of a causal model's folder: its body is read, its head is drawn, the same each time."""
    folder = write_model(tmp_path / "m", "GPT2")
    arguments = {"architecture": "GPT2ForSequenceClassification", "num_labels": 3}
    with pytest.raises(ConfigError) as refusal:
        build_model(ModelSpec(name=f"hf:{folder}", arguments=arguments), 0, SEQ, 3)
    assert "1 missing: score.weight" in refusal.value.because
    assert 'task.model.fresh = ["score.*"]' in refusal.value.try_
    spec = ModelSpec(name=f"hf:{folder}", arguments=arguments, fresh=("score.*",))
    first, again = (build_model(spec, 0, SEQ, seed=3).state_dict() for _ in range(2))
    assert first["score.weight"].shape == (3, 32) and float(first["score.weight"].std()) > 0
    body = loaded(folder).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name] if name == "score.weight" else body[name]), name
    with pytest.raises(ConfigError, match="'scores"):
        build_model(ModelSpec(name=f"hf:{folder}", arguments=arguments, fresh=("score.*", "scores.*")), 0, SEQ, 3)


def test_a_fresh_part_of_the_decoder_is_told_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Qwen2")
    spec = ModelSpec(name=str(folder), fresh=("lm_head.*", "layers.1.mlp.*"))
    state, stored = build_model(spec, 0, SEQ, 3).state_dict(), load_file(folder / "model.safetensors")
    before = {name: stored[name if name == "lm_head.weight" else f"model.{name}"] for name in state}
    changed = {name for name in state if not torch.equal(state[name], before[name])}
    assert changed == {"lm_head.weight", *(f"layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))}
    (text,) = fit_texts(spec)
    assert text.startswith("starts fresh: model.layers.1.mlp.gate_proj.weight, ")


def test_a_named_size_in_another_shape_starts_from_weights_of_that_shape(tmp_path: Path) -> None:
    """What a run of such a model has exported was told to be of another model, before it began."""
    folder = write_model(tmp_path / "m", "Llama")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()  # whose rotations are another's
    spec = ModelSpec(
        "llama-1m", hidden=told["hidden_size"], layers=told["num_hidden_layers"], heads=told["num_attention_heads"],
        kv_heads=told["num_key_value_heads"], ffn=told["intermediate_size"], tied=told["tie_word_embeddings"],
        weights=str(folder),
    )  # fmt: skip
    assert fit_texts(spec) == []
    stored, state = load_file(folder / "model.safetensors"), build_model(spec, VOCAB, SEQ, 3).state_dict()
    assert torch.equal(state["norm.weight"], stored["model.norm.weight"])
    with pytest.raises(ConfigError, match="not this model's"):
        fit_texts(dataclasses.replace(spec, ffn=told["intermediate_size"] + 8))


@pytest.mark.parametrize("family", ["Jamba", "Lfm2Moe"])
def test_experts_in_another_module_are_read_and_written(tmp_path: Path, family: str) -> None:
    """Files hold them one by one in `feed_forward`: they were missing and unexpected at once."""
    folder = write_model(tmp_path, family)
    model = loaded(folder)
    files, held = read_safetensors(folder), as_in_memory(model, read_safetensors(folder))
    state = {name: value for name, value in model.state_dict().items() if name in held}
    stacked = [name for name in state if name.endswith("feed_forward.experts.gate_up_proj")]
    assert stacked and all(torch.equal(held[name], value) for name, value in state.items())
    written = their_state(state, ModelSpec(name=f"hf:{folder}"))
    assert set(written) == set(files)
    assert all(torch.equal(written[name], files[name]) for name in files)

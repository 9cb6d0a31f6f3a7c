"""Names in files and in memory differ for some classes of transformers: a folder is read by either, written by its own.

Transformers 5 has renamed the layers of ViT, Swin and DINOv2, the head of GPT-NeoX and the parts of picture and text
models in memory, and its save_pretrained writes the names of before: other programs know those alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_folders import SHAPE, VOCAB
from safetensors.torch import load_file

from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.interface import why_unshared
from paceline.task.models.huggingface.weights import their_state

SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
PICTURES = {**SMALL, "image_size": 8, "patch_size": 4}
WINDOWS = {"embed_dim": 4, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 8, "patch_size": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "n_routed_experts": 4}  # fmt: skip
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}  # fmt: skip
# A class, and what its config has.
CASES: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": PICTURES,
    "Dinov2ForImageClassification": {**PICTURES, "mlp_ratio": 2},
    "SwinForImageClassification": WINDOWS,
    "GPTNeoXForCausalLM": {**SMALL, "vocab_size": VOCAB},
    "GptOssForCausalLM": {**SHAPE, **EXPERTS, "head_dim": 8},  # experts are stacked in its files too
    "Qwen2MoeForCausalLM": {**SHAPE, **EXPERTS, "shared_expert_intermediate_size": 16},
    "PhimoeForCausalLM": {**SHAPE, **EXPERTS},
    "DeepseekV3ForCausalLM": {**SHAPE, **EXPERTS, **LATENT, "num_key_value_heads": 4},
    "LlavaForConditionalGeneration": {
        "text_config": transformers.LlamaConfig(**SHAPE),
        "vision_config": transformers.CLIPVisionConfig(**PICTURES),
    },
}


def write(folder: Path, architecture: str) -> Path:
    kind = getattr(transformers, architecture)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        kind(kind.config_class(**CASES[architecture])).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", CASES)
def test_a_folder_is_read_and_written_under_the_names_of_its_files(tmp_path: Path, architecture: str) -> None:
    spec = ModelSpec(name=f"hf:{write(tmp_path, architecture)}")
    model = build_model(spec, 0, 16, 3)
    wanted = getattr(transformers, architecture).from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    state = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    assert set(state) == set(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)
    stored, written = load_file(tmp_path / "model.safetensors"), their_state(state, spec)
    assert set(written) >= set(stored), "what is tied stands twice in a state"
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_a_mask_that_looks_into_the_batch_closes_the_axis_in_words() -> None:
    """Llama 4 attends in chunks, by a mask made of tensors of the batch: it had no answer, and a raw traceback."""
    config = transformers.Llama4TextConfig(**{**SHAPE, **EXPERTS}, head_dim=8, intermediate_size_mlp=48,
                                           attention_chunk_size=8)  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    assert "mask is not the causal one" in why_unshared(model, 16) or "chunk" in why_unshared(model, 16)

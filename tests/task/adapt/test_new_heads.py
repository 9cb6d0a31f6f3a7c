"""A folder of a model of masked tokens, or of images of other classes, gets a head as `from_pretrained` gives one."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_folders import write_tokenizer
from runs import in_process, steps_of
from safetensors.torch import load_file

from paceline.spec.load import load_spec
from paceline.task.models.build import build_model
from paceline.task.models.huggingface.new_heads import HEADS, new_head
from paceline.task.settled import settle

TEXT: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DISTIL: dict[str, Any] = {
    "vocab_size": 263,
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 2,
    "n_heads": 2,
    "pad_token_id": 0,
}
XLNET: dict[str, Any] = {"vocab_size": 263, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
TEXTS: list[tuple[str, str, dict[str, Any]]] = [
    ("Bert", "ForMaskedLM", TEXT), ("Bert", "ForPreTraining", TEXT), ("Roberta", "ForMaskedLM", TEXT),
    ("Roberta", "ForTokenClassification", TEXT), ("DistilBert", "ForMaskedLM", DISTIL),
    ("DistilBert", "ForQuestionAnswering", DISTIL), ("Albert", "ForMaskedLM", {**TEXT, "embedding_size": 8}),
    ("Electra", "ForMaskedLM", TEXT), ("DebertaV2", "ForMaskedLM", TEXT), ("XLNet", "LMHeadModel", XLNET),
    ("ModernBert", "ForMaskedLM", TEXT), ("MobileBert", "ForMaskedLM", {**TEXT, "embedding_size": 8}),
    ("XLMRoberta", "ForMaskedLM", TEXT), ("MPNet", "ForMaskedLM", TEXT), ("Camembert", "ForMaskedLM", TEXT),
]  # fmt: skip
SMALL: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "intermediate_size": 24,
                         "num_hidden_layers": 2, "num_attention_heads": 2}  # fmt: skip
CONVNEXT: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
IMAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("ViT", "ForImageClassification", SMALL), ("DeiT", "ForImageClassificationWithTeacher", SMALL),
    ("ConvNext", "ForImageClassification", CONVNEXT), ("Beit", "ForImageClassification", SMALL),
    ("Dinov2", "ForImageClassification", SMALL),
    ("ResNet", "ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}),
    ("Swin", "ForImageClassification", {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}),
]  # fmt: skip


def names_of(family: str, ending: str, given: dict[str, Any], **changes: Any) -> tuple[str, dict[str, Any]]:
    """Return the type of a family's model, and the shapes of what a class of it keeps in files."""
    config = getattr(transformers, f"{family}Config")(**given, **changes)
    with torch.device("meta"):
        model = getattr(transformers, family + ending)(config)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return config.model_type, {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}


def matched(patterns: tuple[str, ...], names: Any) -> set[str]:
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@pytest.mark.parametrize(("family", "ending", "given"), TEXTS, ids=lambda each: each if isinstance(each, str) else "")
def test_all_that_the_files_lack_is_drawn_and_nothing_else(family: str, ending: str, given: dict[str, Any]) -> None:
    kind, stored = names_of(family, ending, given)
    _, wanted = names_of(family, "ForSequenceClassification", given, num_labels=3)
    patterns = new_head(kind, f"{family}ForSequenceClassification", list(stored), is_other_class=True)
    unlike = {name for name, shape in wanted.items() if stored.get(name) != shape}
    assert matched(patterns, wanted) == unlike, "what is missing there, or of another shape"
    assert matched(patterns, stored) >= set(stored) - set(wanted), "what the head before had is left out"
    assert all(matched((each,), [*wanted, *stored]) for each in patterns), "a pattern that matches nothing is an error"
    outside = {name for name in unlike if ".pooler." not in name}
    assert matched(tuple(set(patterns) & HEADS), wanted) >= outside, "it is trained too beside adapters"


@pytest.mark.parametrize(("family", "ending", "given"), IMAGES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_head_for_other_classes_is_what_has_another_shape(family: str, ending: str, given: dict[str, Any]) -> None:
    kind, stored = names_of(family, ending, given, num_labels=5)
    _, wanted = names_of(family, ending, given, num_labels=3)
    patterns = new_head(kind, family + ending, list(stored), is_other_class=False)
    assert matched(patterns, wanted) == {name for name, shape in wanted.items() if stored[name] != shape}


SPEC = """
[task]
model = "{model}"
data = {data}
global_batch = "8 samples"
stop = "2 steps"
{more}

[cluster]
device = "cpu"
devices = 1
probe = false

[run]
dir = "{run}"
"""


def trained(folder: Path, model: Path, data: str, more: str = "") -> Path:
    """Train a folder's model for two steps, give it back, and return the folder that was written."""
    spec = folder / "spec.toml"
    spec.write_text(SPEC.format(model=model, data=data, more=more, run=folder / "run"))
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    assert len(steps_of(folder / "run")) == 2
    out = in_process("export", folder / "run", folder / "out", *(["--merge"] if more else []))
    assert out.returncode == 0, out.stderr
    return folder / "out"


@pytest.mark.parametrize("more", ["", 'adapter = { kind = "lora", rank = 2, targets = ["q_lin"] }'])
def test_distilbert_becomes_a_classifier_in_one_line(tmp_path: Path, more: str) -> None:
    model = tmp_path / "distilbert"
    transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**DISTIL)).save_pretrained(model)
    write_tokenizer(model)
    rows = "".join(f"{at} plus {at} is,{('even', 'odd', 'none')[at % 3]}\n" for at in range(40))
    (tmp_path / "t.csv").write_text("text,label\n" + rows)
    data = f'{{ source = "{tmp_path / "t.csv"}", seq_len = 16, cache_dir = "{tmp_path / "cache"}" }}'
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(trained(tmp_path, model, data, more))
    assert type(loaded).__name__ == "DistilBertForSequenceClassification"
    assert loaded.config.id2label == {0: "even", 1: "none", 2: "odd"}
    before, after = load_file(model / "model.safetensors"), loaded.state_dict()
    body = "distilbert.transformer.layer.0.ffn.lin1.weight"
    assert torch.allclose(before[body], after[body], atol=0.01) and torch.equal(before[body], after[body]) == bool(more)
    task = settle(load_spec(tmp_path / "spec.toml")).spec.task
    assert task.train == (("pre_classifier.*", "classifier.*") if more else ())


@pytest.mark.parametrize(("labels", "problem"), [
    ('["a", "b"]', "multi_label_classification"), ("0.25", "regression"), ('"a"', None),
])  # fmt: skip
def test_the_folder_says_what_its_outputs_are(tmp_path: Path, labels: str, problem: str | None) -> None:
    """A pipeline of transformers made chances that add up to one of several classes that may all be true."""
    model, table = tmp_path / "m", tmp_path / "t.jsonl"
    transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**DISTIL)).save_pretrained(model)
    write_tokenizer(model)
    others = {'["a", "b"]': '["b"]', "0.25": "1.5", '"a"': '"b"'}
    rows = [f'{{"text": "{at} plus", "label": {(labels, others[labels])[at % 2]}}}\n' for at in range(20)]
    table.write_text("".join(rows))
    spec = tmp_path / "spec.toml"
    data = f'{{ source = "{table}", seq_len = 16, cache_dir = "{tmp_path / "cache"}" }}'
    spec.write_text(SPEC.format(model=model, data=data, more="", run=tmp_path / "run"))
    task = settle(load_spec(spec)).spec.task
    assert task.model.arguments.get("problem_type") == problem
    built = build_model(task.model, 0, 16, 3)
    assert built.config.problem_type == problem


def test_images_of_other_classes_get_a_head_for_them(tmp_path: Path) -> None:
    """A head of a thousand outputs was trained on two classes without a word."""
    image = pytest.importorskip("PIL.Image")
    model = tmp_path / "vit"
    transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, num_labels=1000)).save_pretrained(model)
    for at in range(24):
        folder = tmp_path / "pictures" / ("cat", "dog")[at % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (32, 32), (at * 9, 250 * (at % 2), 90)).save(folder / f"{at}.png")
    data = f'{{ source = "{tmp_path / "pictures"}", image_size = 32 }}'
    loaded = transformers.AutoModelForImageClassification.from_pretrained(trained(tmp_path, model, data))
    assert loaded.config.id2label == {0: "cat", 1: "dog"} and loaded.classifier.weight.shape[0] == 2

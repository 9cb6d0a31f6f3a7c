"""What a table decides of a task: its objective, its head, its batch; what contradicts a table is refused, and a text
is never taken for labels, nor a table for prose."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.spec.load import Spec, load_spec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.sources.tables.store import open_table
from paceline.task.head import PAIRS as SOURCES
from paceline.task.settled import POOLED, settle

LABELLED = "text,label\n" + "".join(f"text {at},{'abc'[at % 3]}\n" for at in range(30))
NUMBERS = "text,label\n" + "".join(f"text {at},{at / 7:.3f}\n" for at in range(30))
TALKS = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n"
PAIRS = json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n"
BOTH = "".join(json.dumps({"text": f"text {at}", "label": at % 2}) + "\n" for at in range(10))


def spec_of(tmp_path: Path, name: str, content: str, *more: str) -> Spec:
    """Return a spec of a table in a file."""
    (tmp_path / name).write_text(content)
    data = [f"task.data.source={tmp_path / name}", f"task.data.cache_dir={tmp_path / 'cache'}"]
    return load_spec(None, [*data, "task.model=llama-1m", *more])


@pytest.mark.parametrize(("name", "content", "objective", "outputs"), [
    ("a.csv", LABELLED, "classification", 3),
    ("a.csv", NUMBERS, "regression", 1),
    ("a.jsonl", BOTH, "classification", 2),
])  # fmt: skip
def test_labels_decide_the_objective_and_the_head(
    tmp_path: Path, name: str, content: str, objective: str, outputs: int
) -> None:
    found = settle(spec_of(tmp_path, name, content, "task.model.hidden=32"))
    task = found.spec.task
    assert task.objective == objective and str(task.global_batch) == "32 samples"
    assert task.model.name == POOLED
    assert task.model.arguments == {"size": "llama-1m", "outputs": outputs, "vocab": 257, "hidden": 32}
    decided = [record.what for record in found.decisions]
    options = ["data.source", "data.labels", "objective", "model", "global_batch"]
    assert decided == [f"task.{name}" for name in options]
    assert all(record.because and found.spec.provenance[record.what] for record in found.decisions)
    again = settle(found.spec)
    assert again.spec is found.spec and not again.decisions


@pytest.mark.parametrize(("labels", "of_one"), [("auto", "x"), ("classification", "x"), ("multi_label", "x|x")])
def test_one_class_alone_leaves_nothing_to_train_on(tmp_path: Path, labels: str, of_one: str) -> None:
    more = [f"task.data.labels={labels}", "task.data.validation_fraction=0"]
    spec = spec_of(tmp_path, "one.csv", f"text,label\na,x\nb,{of_one}\n", *more)
    with pytest.raises(DataError, match="of one class only"):
        settle(spec)


@pytest.mark.parametrize(("content", "rows"), [(TALKS, "packed"), (PAIRS, "packed")])
def test_conversations_are_packed_apart_for_our_own_model(tmp_path: Path, content: str, rows: str) -> None:
    task = settle(spec_of(tmp_path, "a.jsonl", content)).spec.task
    assert (task.data.rows, task.data.cross_documents, task.objective) == (rows, False, "auto")
    other = settle(spec_of(tmp_path, "a.jsonl", content, "task.model=some_module:factory")).spec.task
    assert other.data.rows == "padded"
    asked = settle(spec_of(tmp_path, "a.jsonl", content, "task.data.rows=padded")).spec.task
    assert asked.data.rows == "padded"


@pytest.mark.parametrize(("source", "more"), [("", ["task.objective=next_token"]), ("text:", [])])
def test_a_text_beside_labels_is_learnt_where_that_is_asked_for(tmp_path: Path, source: str, more: list[str]) -> None:
    spec = spec_of(tmp_path, "a.jsonl", BOTH, *more, f"task.data.source={source}{tmp_path / 'a.jsonl'}")
    assert settle(spec).spec is spec  # a corpus of documents, as without labels


def test_the_text_of_a_csv_is_learnt_as_documents_where_no_label_is_meant(tmp_path: Path) -> None:
    from paceline.task.data.facts import data_facts

    for content, more in ((LABELLED, ["task.objective=next_token"]), ("text,other\nabcdef,1\nghijkl,2\n", [])):
        settled = settle(spec_of(tmp_path, "a.csv", content, "task.data.seq_len=4", *more)).spec
        facts = data_facts(settled.task.data)
        assert facts.unit == "tokens" and "texts of a.csv" in facts.description
        assert settled.task.model.name == "llama-1m"


@pytest.mark.parametrize(("name", "content", "more", "said"), [
    ("a.txt", "a plain text " * 40, ["task.objective=classification"], "data that have no labels"),
    ("a.jsonl", '{"text": "abc"}\n' * 9, ["task.objective=regression"], "no column of labels"),
    ("a.csv", LABELLED, ["task.objective=regression"], "no numbers"),
    ("a.csv", LABELLED, ["task.objective=regression", "task.data.labels=multi_label"], "with task.data.labels"),
    ("a.csv", LABELLED, ["task.global_batch=4096 tokens"], "of labelled texts"),
    ("a.csv", LABELLED, ["task.data.label_field=lable"], "no column 'lable'"),
    ("a.csv", LABELLED, ["task.data.text_field=body"], "which column holds its text is not clear"),
    ("a.csv", LABELLED, ["task.model=moe-2m", "task.model.weights=somewhere"], "task.model.weights"),
])  # fmt: skip
def test_what_contradicts_a_table_is_refused(
    tmp_path: Path, name: str, content: str, more: list[str], said: str
) -> None:
    with pytest.raises(PacelineError) as raised:
        settle(spec_of(tmp_path, name, content, *more))
    assert isinstance(raised.value, ConfigError | DataError)
    assert said in f"{raised.value.what} {raised.value.because}" and raised.value.try_


def test_a_head_that_was_made_for_other_classes_is_refused(tmp_path: Path) -> None:
    settled = settle(spec_of(tmp_path, "a.csv", LABELLED)).spec
    (tmp_path / "a.csv").write_text(LABELLED + "more,d\n")
    with pytest.raises(ConfigError, match="head of 3 outputs, and the labels need 4"):
        settle(settled)


def test_a_folder_of_hugging_face_needs_a_head_as_wide_as_the_labels(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()

    def settled(**config: Any) -> Spec:
        (folder / "config.json").write_text(json.dumps(config))
        return settle(spec_of(tmp_path, "a.csv", LABELLED, f"task.model.name=hf:{folder}")).spec

    head = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "x", "1": "y", "2": "z"}}
    assert settled(**head).task.model.name == f"hf:{folder}"
    with pytest.raises(ConfigError, match="head of 2 outputs, and the labels need 3"):
        settled(architectures=["BertForSequenceClassification"], model_type="bert")
    with pytest.raises(ConfigError, match="no head for whole texts"):
        settled(architectures=["BertModel"], model_type="bert")


NAMES = {
    "names of none": ({}, True, "LABEL_0, LABEL_1, LABEL_2"),
    "other names": ({"0": "x", "1": "y", "2": "z"}, True, "are x, y, z by its config.json"),
    "another order": ({"0": "C", "1": "B", "2": "A"}, True, "in another order than the head has learned them"),
    "the same": ({"0": "a", "1": "b", "2": "c"}, False, ""),
}


@pytest.mark.parametrize("case", NAMES)
def test_outputs_of_a_head_that_is_kept_are_called_as_the_classes_are(tmp_path: Path, case: str) -> None:
    own, named, said = NAMES[case]
    (tmp_path / "model").mkdir()
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": 3, **({"id2label": own} if own else {})}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    table = "text,label\n" + "".join(f"row {at},{'abc'[at % 3]}\n" for at in range(12))
    settled = settle(spec_of(tmp_path, "a.csv", table, f"task.model.name=hf:{tmp_path / 'model'}"))
    arguments = settled.spec.task.model.arguments
    assert arguments.get("id2label") == ({"0": "a", "1": "b", "2": "c"} if named else None)
    assert any(said in record.because for record in settled.decisions if record.what == "task.model") or not named
    assert settle(settled.spec).spec == settled.spec


def test_classes_that_are_numbers_leave_the_names_of_a_head(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "NEGATIVE", "1": "POSITIVE"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    table = "text,label\n" + "".join(f"row {at},{at % 2}\n" for at in range(12))
    settled = settle(spec_of(tmp_path, "a.csv", table, f"task.model.name=hf:{tmp_path / 'model'}"))
    assert "id2label" not in settled.spec.task.model.arguments


def causal_folder(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """Return a folder of a causal model whose head is a weight of its own."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "llama"}))
    held = {name: torch.zeros(2, 2) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(held, folder / "model.safetensors")
    return folder


def test_a_causal_folder_gets_a_head_for_the_labels(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path / "model")
    spec = settle(spec_of(tmp_path, "a.csv", LABELLED, f"task.model.name={folder}")).spec
    model = spec.task.model
    assert model.name == f"hf:{folder}" and model.fresh == ("score.*", "lm_head.*") and spec.task.train == ()
    assert model.arguments["architecture"] == "LlamaForSequenceClassification"
    assert model.arguments["num_labels"] == 3 and list(model.arguments["id2label"]) == ["0", "1", "2"]
    assert model.arguments["pad_token_id"] == open_table(spec.task.data).pad
    assert settle(spec).spec == spec
    (tmp_path / "a.csv").write_text(LABELLED + "more,d\n")
    with pytest.raises(ConfigError, match=r"head of 3 outputs, and the labels need 4"):
        settle(spec)


def test_a_new_head_is_trained_beside_adapters(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path / "model")
    given = (f"task.model.name={folder}", "task.adapter.kind=lora")
    assert settle(spec_of(tmp_path, "a.csv", LABELLED, *given)).spec.task.train == ("score.*",)


def test_what_fills_rows_up_is_what_the_head_leaves_out(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path / "model", "LlamaForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_labels": 3, "pad_token_id": 5}))
    settled = settle(spec_of(tmp_path, "a.csv", LABELLED, f"task.model.name={folder}"))
    pad = open_table(settled.spec.task.data).pad
    assert pad != 5 and settled.spec.task.model.arguments["pad_token_id"] == pad
    assert any("the token 5" in record.because for record in settled.decisions)


def test_pairs_of_preferences_are_left_to_who_reads_them(tmp_path: Path) -> None:
    row: dict[str, Any] = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "a"}
    spec = spec_of(tmp_path, "a.jsonl", json.dumps(row) + "\n")
    assert settle(spec).spec is spec


@pytest.mark.parametrize(("config", "said"), [
    ({"architectures": ["BertForMaskedLM"]}, "sees the whole text"),
    ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "writes a target"),
    ({"architectures": ["BertForSequenceClassification"]}, "for another task"),
])  # fmt: skip
def test_a_folder_of_a_model_that_does_not_say_the_next_token_is_refused_for_texts(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    """BERT learnt "the next token" of a text that it sees whole; T5 ended where it was traced."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in {"a.txt": "some text\n" * 9, "a.jsonl": TALKS}.items():
        spec = spec_of(tmp_path, name, content, f"task.model={tmp_path}")
        with pytest.raises(ConfigError, match="does not learn the next token") as caught:
            settle(spec)
        assert said in caught.value.because
        settle(spec_of(tmp_path, name, content, f"task.model={tmp_path}", "task.objective=own:objective"))


def test_a_table_of_sources_and_targets_for_an_encoder_decoder_says_how(tmp_path: Path) -> None:
    """The column `target` is taken for labels, and a head for whole texts was all that was advised."""
    config = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "model_type": "t5"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = "source,target\n" + "".join(f"a text of number {number},word {number % 3}\n" for number in range(30))
    with pytest.raises(ConfigError) as caught:
        settle(spec_of(tmp_path, "a.csv", rows, f"task.model={tmp_path}"))
    assert 'objective = "seq2seq"' in str(caught.value) and "sequence_pairs:sequence_pairs" in str(caught.value)


@pytest.mark.parametrize("columns", ["source,target", "document,summary", "prompt,completion", "article,highlights"])
def test_sources_and_targets_that_are_named_as_a_table_say_how(tmp_path: Path, columns: str) -> None:
    """A batch without "source" was what the model failed on, or a column that holds the text was asked for."""
    folder = tmp_path / "t5"
    folder.mkdir()
    config = {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "model_type": "t5"}
    (folder / "config.json").write_text(json.dumps(config))
    rows = f"{columns}\n" + "".join(f"a text of number {number},word {number % 3}\n" for number in range(30))
    with pytest.raises(ConfigError) as caught:
        settle(spec_of(tmp_path, "a.csv", rows, f"task.model=hf:{folder}", "task.objective=seq2seq"))
    assert caught.value.what.startswith("the objective seq2seq on the table")
    for word in ("sequence_pairs:sequence_pairs", f'path = "{tmp_path / "a.csv"}"', f'model = "{folder}"'):
        assert word in str(caught.value)


VISION = {"num_channels": 3, "image_size": 30}


@pytest.mark.parametrize(("config", "what", "instead"), [
    ({"architectures": ["ViTModel"], **VISION}, "reads images", 'architecture = "ViTForImageClassification"'),
    ({"architectures": ["ViTForImageClassification"], **VISION}, "reads images", '"images:FOLDER"'),
    ({"architectures": ["CLIPModel"], "text_config": {}, "vision_config": VISION, "projection_dim": 8},
     "reads texts and images side by side", 'architecture = "CLIPForImageClassification"'),
    ({"architectures": ["ClapModel"], "text_config": {}, "audio_config": {}}, "texts and sound", "module:factory"),
    ({"architectures": ["Wav2Vec2ForCTC"], "vocab_size": 32}, "reads sound", "module:function"),
    ({"architectures": ["BertModel"], "vocab_size": 61}, "says no token", 'architecture = "BertForCausalLM"'),
])  # fmt: skip
def test_a_folder_of_a_model_that_reads_no_text_says_what_it_is_and_what_to_write(
    tmp_path: Path, config: dict[str, Any], what: str, instead: str
) -> None:
    """It was traced with tokens, and "cannot be traced" told of shapes in the depth of its forward pass."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of(tmp_path, "a.txt", "some text\n" * 9, f"task.model=hf:{tmp_path}")
    with pytest.raises(ConfigError, match=what) as caught:
        settle(spec)
    assert instead in caught.value.try_
    settle(spec_of(tmp_path, "a.txt", "some text\n" * 9, f"task.model=hf:{tmp_path}", "task.objective=own:objective"))


def test_a_folder_of_a_model_of_images_is_left_to_data_that_are_images(tmp_path: Path) -> None:
    config = {"architectures": ["ViTForImageClassification"], "id2label": {"0": "black", "1": "white"}, **VISION}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("black", "white"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "0.png").write_bytes(b"")
    model = f"task.model=hf:{tmp_path}"
    for source in (f"images:{tmp_path / 'pictures'}", str(tmp_path / "pictures"), "own:images"):
        found = settle(spec_of(tmp_path, "a.txt", "some text", model, f"task.data.source={source}"))
        assert found.spec.task.model.name == f"hf:{tmp_path}" and found.decisions == (), "two classes, as it has"
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "cat", "1": "dog"}}))
    found = settle(spec_of(tmp_path, "a.txt", "some text", model, f"task.data.source={tmp_path / 'pictures'}"))
    assert found.spec.task.model.arguments["id2label"] == config["id2label"] and not found.spec.task.model.fresh
    assert "are cat, dog by its config.json" in found.decisions[0].because


@pytest.mark.parametrize("config", [
    {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}, "vision_config": VISION},
    {"architectures": ["JambaForCausalLM"], "mamba_d_conv": 4},
    {"architectures": ["Mamba2ForCausalLM"], "conv_kernel": 4, "vocab_size": 61},
])  # fmt: skip
def test_models_that_read_texts_among_others_are_left_to_be_traced(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = settle(spec_of(tmp_path, "a.txt", "some text\n" * 9, f"task.model=hf:{tmp_path}"))
    assert found.spec.task.model.name == f"hf:{tmp_path}" and found.decisions == ()


def test_another_head_is_asked_for_by_arguments(tmp_path: Path) -> None:
    """The guide's way to put a head on a folder; it was refused, since config.json alone was looked at."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    model = [f"task.model=hf:{tmp_path}", "task.model.arguments.architecture=BertForSequenceClassification"]
    found = settle(spec_of(tmp_path, "a.csv", LABELLED, *model, "task.model.arguments.num_labels=3"))
    assert found.spec.task.objective == "classification"
    with pytest.raises(ConfigError, match="a head of 2 outputs"):
        settle(spec_of(tmp_path, "a.csv", LABELLED, *model))
    with pytest.raises(ConfigError, match="no head for whole texts") as caught:
        settle(spec_of(tmp_path, "a.csv", LABELLED, model[0]))
    assert "num_labels = 3" in caught.value.try_


HALF, CLIPS = [0.5, 0.5, 0.5], [0.48145466, 0.4578275, 0.40821073]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


@pytest.mark.parametrize(("told", "stated", "found"), [
    ({"image_mean": HALF, "image_std": HALF, "size": {"height": 30, "width": 30}}, "", ("half", 30)),
    ({**IMAGENET, "size": {"shortest_edge": 40}, "crop_size": 32, "do_center_crop": True}, "", ("imagenet", 32)),
    ({**IMAGENET, "do_normalize": False, "size": 30}, "", ("none", 30)),
    ({"image_mean": HALF, "image_std": HALF, "size": 30}, 'normalise = "imagenet"\nimage_size = 16', ("imagenet", 16)),
    ({"image_mean": CLIPS, "image_std": HALF}, 'normalise = "none"', ("none", 224)),
    ({"image_mean": CLIPS, "image_std": HALF}, "", None),
    ({}, "", ("none", 224)),
])  # fmt: skip
def test_pixels_are_as_the_model_of_a_folder_has_seen_them(
    tmp_path: Path, told: dict[str, Any], stated: str, found: tuple[str, int] | None
) -> None:
    """An export kept the folder's mean and deviation, with which it was then read; training had left pixels in 0..1."""
    image = pytest.importorskip("PIL.Image")
    for at, name in enumerate(("cat", "dog")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        image.new("RGB", (8, 8), (at, at, at)).save(tmp_path / "pictures" / name / "0.png")
    model = tmp_path / "vit"
    model.mkdir()
    config = {"architectures": ["ViTForImageClassification"], "model_type": "vit", **VISION}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text("{}")  # as CLIP's has one: what is unstated stays so beside it
    if told:
        (model / "preprocessor_config.json").write_text(json.dumps(told))
    spec = tmp_path / "spec.toml"
    spec.write_text(f'[task]\nmodel = {{ name = "{model}", weights = "none" }}\n[task.data]\n'
                    f'source = "{tmp_path / "pictures"}"\n{stated}\n')  # fmt: skip
    if found is None:
        with pytest.raises(ConfigError, match="has no word for it"):
            settle(load_spec(spec))
        return
    once = settle(load_spec(spec)).spec
    assert (once.task.data.normalise, once.task.data.image_size) == found
    assert settle(once).spec.task == once.task


def test_pairs_are_in_the_tokens_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("source,target\na,b\n")
    for name, tokens in (("one", "ab"), ("same", "ab"), ("other", "ba")):
        (tmp_path / name).mkdir()
        config = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        vocab = {token: at for at, token in enumerate(tokens)}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    for name in ("one", "same", "other"):
        data = DataSpec(SOURCES, arguments={"path": str(tmp_path / "t.csv"), "model": str(tmp_path / name)})
        task = Task(model=ModelSpec(str(tmp_path / "one"), weights="none"), data=data, objective="seq2seq")
        with pytest.raises(ConfigError, match="pairs in the tokens of") if name == "other" else nullcontext():
            settle(Spec(task=task))

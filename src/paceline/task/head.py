"""Which model a folder of Hugging Face becomes for texts with labels: its own head, or a new one on its body.

transformers' classes with a head for whole texts read the last token that is not `pad_token_id`, so that is what fills
rows of the table up. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.spec.model_folder import CONFIG, THEIRS, folder_of
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.theirs import ARCHITECTURE

if TYPE_CHECKING:
    from paceline.task.data.sources.tables.store import TextTable

SEQUENCE_HEAD = "ForSequenceClassification"  # how transformers' classes with a head for whole texts end
OF_TOKENS = ("ForCausalLM", "LMHeadModel")  # how its classes that predict the next token do
HEAD, TOKEN_HEAD = "score", "lm_head"  # their names there
PAD = "pad_token_id"
MASKED_HEADS = ("ForMaskedLM", "ForPreTraining")
OTHER_HEADS = (SEQUENCE_HEAD, "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")

IMAGE_HEADS = ("ForImageClassification", "ForObjectDetection", "ForSemanticSegmentation", "ForMaskedImageModeling",
               "ForUniversalSegmentation", "ForInstanceSegmentation", "ForDepthEstimation", "ForVideoClassification",
               "ForImageClassificationWithTeacher")  # fmt: skip
SOUND_HEADS = ("ForAudioClassification", "ForAudioFrameClassification", "ForCTC", "ForXVector")
# Entries of the config.json of models that read something else than texts, or a text and something else.
PIXELS, SOUNDS, VOCABULARY = "num_channels", {"num_mel_bins", "feat_extract_norm"}, "vocab_size"
TEXT_TOWER, TOWERS = "text_config", {"vision_config": "images", "audio_config": "sound"}
WITHIN_TEXT = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")  # it reads both as one


def with_head(model: ModelSpec, folder: Path, table: TextTable) -> tuple[ModelSpec, str] | None:
    """Return the model with a head for a table's labels and why it is so, None where the folder's own does.

    Raises ConfigError for a head of another width, and for a class that neither has nor can be given one.
    """
    config = config_of(model, folder)
    if not config:
        return None  # who builds the model says what is wrong with it
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture.endswith(SEQUENCE_HEAD):
        return _new_head(model, folder, table, architecture)
    _check_width(config, folder, table)
    if config.get(PAD) == table.pad:
        return None
    told = "none" if config.get(PAD) is None else f"the token {config[PAD]}"
    because = f"rows are filled up with the token {table.pad}, and the config.json has {told} for it"
    return replace(model, arguments={**model.arguments, PAD: table.pad}), because


def is_new_head(model: ModelSpec) -> bool:
    """Return whether a model has a head for whole texts that its folder has no weights of."""
    return str(model.arguments.get(ARCHITECTURE, "")).endswith(SEQUENCE_HEAD) and f"{HEAD}.*" in model.fresh


def _new_head(model: ModelSpec, folder: Path, table: TextTable, architecture: str) -> tuple[ModelSpec, str]:
    labels = table.labels
    assert labels is not None
    ending = next((end for end in OF_TOKENS if architecture.endswith(end)), None)
    if ending is None:
        raise ConfigError(
            f"the model in '{folder}' has no head for whole texts", f"it is of the class {architecture}, and the data "
            "are texts with labels",
            f"name = \"hf:{folder}\", its class with such a head, and a head that starts fresh: arguments = "
            f"{{ architecture = \"...{SEQUENCE_HEAD}\", num_labels = {labels.outputs} }}, fresh = [\"score.*\"]",
        )  # fmt: skip
    arguments: dict[str, object] = {
        **model.arguments, ARCHITECTURE: architecture.removesuffix(ending) + SEQUENCE_HEAD,
        "num_labels": labels.outputs, PAD: table.pad,
    }  # fmt: skip
    if labels.classes:
        arguments["id2label"] = {str(number): name for number, name in enumerate(labels.classes)}
        arguments["label2id"] = {name: number for number, name in enumerate(labels.classes)}
    fresh = list(model.fresh)
    if model.starts_from:
        has_tokens = any(name.startswith(f"{TOKEN_HEAD}.") for name in read_safetensors(model.starts_from))
        fresh += [f"{HEAD}.*", *([f"{TOKEN_HEAD}.*"] if has_tokens else [])]
    name = model.name if model.name.startswith(THEIRS) else THEIRS + model.name
    because = f"the folder's {architecture} gets a head for {labels.outputs} outputs on a text's last token, drawn anew"
    return replace(model, name=name, arguments=arguments, fresh=tuple(dict.fromkeys(fresh))), because


def _check_width(config: dict[str, Any], folder: Path, table: TextTable) -> None:
    labels = table.labels
    assert labels is not None
    found = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))
    if found != labels.outputs:
        raise ConfigError(
            f"the model in '{folder}' has a head of {found} outputs, and the labels need {labels.outputs}",
            "its config.json, or task.model.arguments, says so (id2label, num_labels)",
            f"arguments = {{ num_labels = {labels.outputs} }}, and fresh with the parameters of the head: "
            '["classifier.*"]',
        )  # fmt: skip


def config_of(model: ModelSpec, folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder of Hugging Face with what the task changes; nothing where there is none."""
    try:
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # who builds the model says what is wrong with it
    if not isinstance(found, dict):
        return {}
    changes = dict(model.arguments)
    if "num_labels" in changes:
        found.pop("id2label", None)  # of the head before
    named = {"architectures": [changes.pop("architecture")]} if "architecture" in changes else {}
    return {**found, **changes, **named}


def check_next_token(task: Task, *, of_text: bool) -> None:
    """Raise ConfigError for a folder of Hugging Face whose model is not made to say the next token of a text.

    `of_text` says whether the data are known to be texts.
    """
    model = task.model
    if not isinstance(model, ModelSpec) or task.objective not in ("auto", "next_token") or task.turns:
        return
    folder = folder_of(model.name)
    config = config_of(model, folder) if folder is not None else {}
    architecture = str((config.get("architectures") or [""])[0])
    if of_text and (found := _no_tokens(config, architecture, folder)):
        what, why, instead = found
        raise ConfigError(f"the model in '{folder}' {what}", f"it is of the class {architecture}: {why}", instead)
    if config.get("is_encoder_decoder"):
        why = "it reads a source and writes a target, and a text is none of both"
    elif architecture.endswith(MASKED_HEADS):
        why = "it sees the whole text, and so the token that it would say"
    elif architecture.endswith(OTHER_HEADS):
        why = "its head is for another task"
    else:
        return
    raise ConfigError(
        f"the model in '{folder}' does not learn the next token", f"it is of the class {architecture}: {why}",
'an objective and batches of your own (objective = "module:function", data.source = "module:factory"), or a table '
        'of texts with labels and a head for them (arguments = { architecture = "...", num_labels = 2 })',
    )  # fmt: skip


def _no_tokens(config: dict[str, object], architecture: str, folder: Path | None) -> tuple[str, str, str] | None:
    """Return (what a class is, why it gets no text, what to write instead), None for one that may read texts."""
    if architecture.endswith(OF_TOKENS):
        return None
    own = f'model = "hf:{folder}" with an objective and batches of your own (objective = "module:function", data.source'
    own += ' = "module:factory"), whose keys are the arguments of its forward pass'
    base = next((architecture.removesuffix(end) for end in (*IMAGE_HEADS, "Model") if architecture.endswith(end)), "")
    other = next((what for entry, what in TOWERS.items() if entry in config), "")
    if other and TEXT_TOWER in config and architecture.endswith("Model") and not set(WITHIN_TEXT) & set(config):
        why = f"it has a tower for texts and one for {other}, learns which of them belong together, and says no token"
        alone = f"{_images(folder, base)}; for pairs of both, " if other == "images" else ""
        return f"reads texts and {other} side by side", why, alone + own
    if architecture.endswith(IMAGE_HEADS) or (PIXELS in config and VOCABULARY not in config):
        return "reads images, and the data are text", "its forward pass takes pixels", _images(folder, base)
    if architecture.endswith(SOUND_HEADS) or SOUNDS & set(config):
        return "reads sound, and the data are text", "its forward pass takes waves or their spectra", own
    if architecture.endswith("Model") and not config.get("is_encoder_decoder"):
        why = "it has no head, and returns hidden states"
        head = f'a class of transformers with a head: arguments = {{ architecture = "{base}ForCausalLM" }}, where there'
        head += f' is one, and fresh = ["{TOKEN_HEAD}.*"] for what the folder has no weights of; or {own}'
        return "says no token", why, head
    return None


def _images(folder: Path | None, base: str) -> str:
    """Return what a spec says of a model of this class that is to learn classes of images."""
    return (
        f'images in a folder for each class: data.source = "images:FOLDER", and a class with a head for them: name ='
        f' "hf:{folder}", arguments = {{ architecture = "{base}{IMAGE_HEADS[0]}", num_labels = 2 }}'
    )

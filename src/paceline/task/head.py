"""Which model a folder of Hugging Face becomes for labels of texts or images: the folder's own head, or a new head.

transformers' classes with a head for whole texts read the last token that is not `pad_token_id`, so that is what fills
rows of the table up. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.spec.model_folder import CONFIG, THEIRS, folder_of
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.sources.images.normals import NORMALS
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.new_heads import CAUSAL, HEADS, NAMED, OF_TOKENS, new_head
from paceline.task.models.huggingface.theirs import ARCHITECTURE

if TYPE_CHECKING:
    from paceline.task.data.sources.tables.store import TextTable

SEQUENCE_HEAD = "ForSequenceClassification"  # how transformers' classes with a head for whole texts end
TOKEN_HEAD = "lm_head"
PAD = "pad_token_id"
PREPROCESSOR = "preprocessor_config.json"
SAME_PIXELS = 1e-3
SEQ2SEQ, PAIRS = "seq2seq", "paceline.task.data.sequence_pairs:sequence_pairs"
# What transformers makes of a head's outputs by itself: without the word they are classes, of which one is true.
PROBLEM, PROBLEMS = "problem_type", {"multi_label": "multi_label_classification", "regression": "regression"}
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
    """Return the model with a head for a table's labels and why it is so, None where the folder's own does as it is.

    Raises ConfigError for a head of another width, and for a class that neither has nor can be given one.
    """
    config = config_of(model, folder)
    if not config:
        return None  # who builds the model says what is wrong with it
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture.endswith(SEQUENCE_HEAD):
        return _new_head(model, folder, table, architecture)
    _check_width(config, folder, table)
    because, changed = [], dict[str, object]()
    if config.get(PAD) != table.pad:
        told = "none" if config.get(PAD) is None else f"the token {config[PAD]}"
        because.append(f"rows are filled up with the token {table.pad}, and the config.json has {told} for it")
        changed[PAD] = table.pad
    assert table.labels is not None
    problem = PROBLEMS.get(table.labels.kind)
    if problem and config.get(PROBLEM) != problem:
        because.append(f"the labels are of the kind '{table.labels.kind}', and the config.json has another one or none")
        changed[PROBLEM] = problem
    if "id2label" not in model.arguments and (others := _other_names(config, table.labels.classes)):
        because.append(others)
        changed |= _named(table.labels.classes)
    return (replace(model, arguments={**model.arguments, **changed}), "; ".join(because)) if changed else None


def new_head_of(model: ModelSpec) -> tuple[str, ...]:
    """Return the patterns of the parameters of a head that is drawn anew; none where a model's head is its folder's."""
    return tuple(pattern for pattern in model.fresh if pattern in HEADS)


def with_image_head(
    model: ModelSpec, folder: Path, classes_of: Callable[[], Sequence[str]]
) -> tuple[ModelSpec, str] | None:
    """Return the model with a head for classes of images and why it is so, None where the folder's does as it is.

    What the task itself says of the head stays. The images are listed where it matters which classes there are.
    """
    config, asked = config_of(model, folder), {"num_labels", "id2label", ARCHITECTURE} & set(model.arguments)
    architecture = str((config.get("architectures") or [""])[0])
    if asked or IMAGE_HEADS[0] not in architecture:
        return None
    classes, found = classes_of(), _width(config)
    if found == len(classes):
        others = _other_names(config, classes)
        return (replace(model, arguments={**model.arguments, **_named(classes)}), others) if others else None
    stored = list(read_safetensors(model.starts_from)) if model.starts_from else []
    fresh = new_head(str(config.get("model_type")), architecture, stored, is_other_class=False) if stored else ()
    arguments = {**model.arguments, "num_labels": len(classes), **_named(classes)}
    because = f"the folder's head has {found} outputs, and the images are of {len(classes)} classes: it is drawn anew"
    return replace(model, arguments=arguments, fresh=tuple(dict.fromkeys((*model.fresh, *fresh)))), because


def pixels_of(folder: Path, *, need_word: bool) -> dict[str, object]:
    """Return what of task.data a folder's preprocessor_config.json says: `normalise` and `image_size`, where it does.

    Raises ConfigError for a mean and a deviation that `normalise` has no word for, where one is needed.
    """
    told = _table_in(folder / PREPROCESSOR)
    mean, deviation = told.get("image_mean"), told.get("image_std")
    found: dict[str, object] = {}
    if told.get("do_normalize", True) and isinstance(mean, list) and isinstance(deviation, list):
        found["normalise"] = next((name for name, both in NORMALS.items() if _near((mean, deviation), both)), "")
        if need_word and not found["normalise"]:
            raise ConfigError(
                f"the model in '{folder}' reads images of the mean {mean} and the deviation {deviation}",
                f"its {PREPROCESSOR} says so, and task.data.normalise has no word for it",
                f"task.data.normalise, stated: the nearest is one of {', '.join(map(repr, NORMALS))}",
            )
    elif told.get("do_normalize") is False:
        found["normalise"] = "none"
    size = told.get("crop_size") if told.get("do_center_crop") else None
    size = told.get("size") if size is None else size
    sides = set(size.values()) if isinstance(size, Mapping) else {size}
    if len(sides) == 1 and isinstance(side := sides.pop(), int) and side > 0:
        found["image_size"] = side
    return found


def _near(given: tuple[list[float], list[float]], known: tuple[Sequence[float], Sequence[float]]) -> bool:
    return all(
        len(some) == len(others)
        and all(abs(one - other) < SAME_PIXELS for one, other in zip(some, others, strict=True))
        for some, others in zip(given, known, strict=True)
    )


def _named(classes: Sequence[str]) -> dict[str, object]:
    """Return the entries of a config.json that name a head's outputs."""
    return {"id2label": {str(number): name for number, name in enumerate(classes)},
            "label2id": {name: number for number, name in enumerate(classes)}}  # fmt: skip


def _other_names(config: dict[str, Any], classes: Sequence[str]) -> str:
    """Return why the outputs of a folder's head are named anew, "" where they are called as the classes are.

    Classes that are called by their numbers alone leave the head's names.
    """
    told = config.get("id2label") or {}
    own = [str(told.get(str(number), f"LABEL_{number}")) for number in range(len(classes))]
    if own == list(classes) or list(classes) == list(map(str, range(len(classes)))):
        return ""
    said = f"the head's outputs are {_shown(own)} by its config.json, and the classes of the data are {_shown(classes)}"
    alike = sorted(name.lower() for name in own) == sorted(name.lower() for name in classes)
    moved = [name.lower() for name in own] != [name.lower() for name in classes]
    return f"{said}: in another order than the head has learned them, which it unlearns" if alike and moved else said


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _new_head(model: ModelSpec, folder: Path, table: TextTable, architecture: str) -> tuple[ModelSpec, str]:
    labels = table.labels
    assert labels is not None
    config = config_of(model, folder)
    kind = str(config.get("model_type"))
    endings = (*OF_TOKENS, *MASKED_HEADS, *OTHER_HEADS[1:])
    ending = next((end for end in endings if architecture.endswith(end)), "")
    causal = ending in OF_TOKENS and kind not in NAMED
    if not ending:
        pairs = f"{_pairs(folder)}; or, for labels, " if config.get("is_encoder_decoder") else ""
        raise ConfigError(
            f"the model in '{folder}' has no head for whole texts", f"it is of the class {architecture}, and the data "
            "are texts with labels",
            f"{pairs}name = \"hf:{folder}\", its class with such a head, and a head that starts fresh: arguments = "
            f"{{ architecture = \"...{SEQUENCE_HEAD}\", num_labels = {labels.outputs} }}, fresh = [\"classifier.*\"]",
        )  # fmt: skip
    arguments: dict[str, object] = {
        **model.arguments, ARCHITECTURE: architecture.removesuffix(ending) + SEQUENCE_HEAD,
        "num_labels": labels.outputs, PAD: table.pad,
    }  # fmt: skip
    if labels.classes:
        arguments |= _named(labels.classes)
    if labels.kind in PROBLEMS:
        arguments[PROBLEM] = PROBLEMS[labels.kind]
    fresh = list(model.fresh)
    if model.starts_from:
        stored = list(read_safetensors(model.starts_from))
        if causal:
            has_tokens = any(name.startswith(f"{TOKEN_HEAD}.") for name in stored)
            fresh += [*CAUSAL, *([f"{TOKEN_HEAD}.*"] if has_tokens else [])]
        else:
            fresh += new_head(kind, str(arguments[ARCHITECTURE]), stored, is_other_class=True)
    name = model.name if model.name.startswith(THEIRS) else THEIRS + model.name
    where = " on a text's last token" if causal else ""
    because = f"the folder's {architecture} gets a head for {labels.outputs} outputs{where}, drawn anew"
    return replace(model, name=name, arguments=arguments, fresh=tuple(dict.fromkeys(fresh))), because


def _check_width(config: dict[str, Any], folder: Path, table: TextTable) -> None:
    labels = table.labels
    assert labels is not None
    found = _width(config)
    if found != labels.outputs:
        raise ConfigError(
            f"the model in '{folder}' has a head of {found} outputs, and the labels need {labels.outputs}",
            "its config.json, or task.model.arguments, says so (id2label, num_labels)",
            f"arguments = {{ num_labels = {labels.outputs} }}, and fresh with the parameters of the head: "
            '["classifier.*"]',
        )  # fmt: skip


def _width(config: dict[str, Any]) -> int:
    """Return how many outputs a head has by its config.json; transformers' default is two."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels", 2))


def config_of(model: ModelSpec, folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder of Hugging Face with what the task changes; nothing where there is none."""
    if not (found := _table_in(folder / CONFIG)):
        return {}  # who builds the model says what is wrong with it
    changes = dict(model.arguments)
    if "num_labels" in changes:
        found.pop("id2label", None)  # of the head before
    named = {"architectures": [changes.pop("architecture")]} if "architecture" in changes else {}
    return {**found, **changes, **named}


def _table_in(file: Path) -> dict[str, Any]:
    """Return what a file of JSON holds; nothing where there is none, or no table in it."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
        raise ConfigError(
            f"the model in '{folder}' does not learn the next token",
            f"it is of the class {architecture}: it reads a source and writes a target, and a text is none of both",
            _pairs(folder),
        )
    if architecture.endswith(MASKED_HEADS):
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


def _pairs(folder: Path | None) -> str:
    """Return what a spec says of an encoder-decoder."""
    return (
        f'for sources with their targets: objective = "seq2seq", data.source = "{PAIRS}",'
        f' data.arguments = {{ path = "TABLE", model = "{folder}" }}'
    )


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

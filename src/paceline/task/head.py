"""Which model a folder of Hugging Face becomes for texts with labels: its own head, or a new one on its body.

transformers' classes with a head for whole texts read the last token that is not `pad_token_id`, so that is what fills
rows of the table up. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.model_folder import CONFIG, THEIRS
from paceline.spec.task import ModelSpec
from paceline.task.data.sources.tables.store import TextTable
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.theirs import ARCHITECTURE

SEQUENCE_HEAD = "ForSequenceClassification"  # how transformers' classes with a head for whole texts end
OF_TOKENS = ("ForCausalLM", "LMHeadModel")  # how its classes that predict the next token do
HEAD, TOKEN_HEAD = "score", "lm_head"  # their names there
PAD = "pad_token_id"


def with_head(model: ModelSpec, folder: Path, table: TextTable) -> tuple[ModelSpec, str] | None:
    """Return the model with a head for a table's labels and why it is so, None where the folder's own does.

    Raises ConfigError for a head of another width, and for a class that neither has nor can be given one.
    """
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return None  # who builds the model says what is wrong with it
    architecture = str((config.get("architectures") or [""])[0])
    asked = str(model.arguments.get(ARCHITECTURE, architecture))
    if not asked.endswith(SEQUENCE_HEAD):
        return _new_head(model, folder, table, asked)
    config |= {name: value for name, value in model.arguments.items() if name != ARCHITECTURE}
    _check_width(config, folder, table, is_own=asked == architecture and "num_labels" not in model.arguments)
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
            "are texts with labels", f"a model of a class that ends in {SEQUENCE_HEAD}, {' or '.join(OF_TOKENS)}",
        )  # fmt: skip
    arguments: dict[str, Any] = {
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


def _check_width(config: dict[str, Any], folder: Path, table: TextTable, is_own: bool) -> None:
    labels = table.labels
    assert labels is not None
    found = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))
    if found != labels.outputs:
        raise ConfigError(
            f"the model in '{folder}' has a head of {found} outputs, and the labels need {labels.outputs}",
            f"{'its config.json' if is_own else 'task.model.arguments'} says so (id2label, num_labels)",
            f'"num_labels": {labels.outputs} there, with weights of that head',
        )  # fmt: skip

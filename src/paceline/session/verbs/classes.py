"""What names the predictions of exported weights: the classes of a run's data, and how their texts became tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.durable import make_folder, write_text
from paceline.errors import StorageError
from paceline.spec.import_paths import names_object
from paceline.spec.load import spec_from_dict
from paceline.spec.model_folder import TOKENIZER
from paceline.spec.task import DataSpec
from paceline.task.data.sources.tokenizer import OWN

CLASSES = "classes.json"


def write_classes(kept: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the classes that a checkpoint keeps of its data beside exported weights; return the files, if any.

    `classes.json` says too what the outputs are, the model with its arguments, how long a text may be, and whether it
    ends with the end-of-document token. A tokenizer other than bytes lies beside it. Raises StorageError where `out`
    cannot be written.
    """
    classes = kept.get("data", {}).get("classes")
    task = spec_from_dict(kept["spec"], origin="the checkpoint").task
    if not isinstance(task.data, DataSpec):
        return []
    if classes is None and (task.objective != "regression" or names_object(task.data.source)):
        return []  # numbers for rows of a program's own, of which nobody else knows what they are made of
    told = {
        "objective": task.objective,
        "classes": classes or [],
        "model": kept["spec"]["task"]["model"],
        "seq_len": task.data.seq_len,
        "tokenizer": "bytes" if task.data.tokenizer == "bytes" else TOKENIZER,
        "keeps_end": task.data.tokenizer in OWN,
    }
    texts = {CLASSES: json.dumps(told, indent=1)}
    if task.data.source.startswith("table:") and task.data.tokenizer != "bytes":
        from paceline.task.data.sources.tables.store import open_table

        texts[TOKENIZER] = open_table(task.data).corpus.open_tokenizer().to_json()
    try:
        make_folder(out)
        for name, text in texts.items():
            write_text(out / name, text)
    except OSError as error:
        raise StorageError(f"cannot write to {out}", str(error), "a folder with room to write") from error
    return [out / name for name in texts]

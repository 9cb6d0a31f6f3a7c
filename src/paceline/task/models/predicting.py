"""Predictions of an exported text model, by the names of its classes: for a look, not for serving.

labelled = predictor("exported")
labelled(["what a film"])  ->  [{"good": 0.93, "bad": 0.07}]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.spec.task import ModelSpec
from paceline.task.data.sources.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from paceline.task.models.build import build_model, evaluating

Predictor = Callable[[Sequence[str]], list[dict[str, float]]]


def predictor(folder: str | Path) -> Predictor:
    """Return what gives each text its classes with their chances, or its number, from a folder of `paceline export`.

    Chances of several labels at once are each their own. Raises ConfigError for a folder without classes.json.
    """
    folder = Path(folder)
    try:
        told = json.loads((folder / "classes.json").read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"'{folder}' names no classes", f"classes.json: {error.strerror}",
            "paceline export RUN OUT, of a run on labelled texts",
        ) from error  # fmt: skip
    spec = ModelSpec(**{**told["model"], "weights": str(folder / "model.safetensors")})
    model = build_model(spec, 0, told["seq_len"], seed=0)
    tokenizer: Tokenizer = ByteTokenizer() if told["tokenizer"] == "bytes" else load_tokenizer(str(folder))
    names = told["classes"] or ["value"]

    def predict(texts: Sequence[str]) -> list[dict[str, float]]:
        found = []
        with evaluating(model), torch.no_grad():
            for text in texts:
                ids = _ids(tokenizer, text.encode(), told.get("keeps_end"), told["seq_len"])
                tokens = torch.from_numpy(ids.astype(np.int64))[None]
                output = model(tokens, attention_mask=torch.ones_like(tokens))
                outputs = getattr(output, "logits", output)[0].float()
                if told["objective"] == "classification":
                    outputs = outputs.softmax(-1)
                elif told["objective"] == "multi_label":
                    outputs = outputs.sigmoid()
                found.append(dict(zip(names, outputs.tolist(), strict=True)))
        return found

    return predict


def _ids(tokenizer: Tokenizer, text: bytes, keeps_end: bool | None, most: int) -> np.ndarray:
    """Return a text's tokens, so many at most, as a table of labelled texts has them.

    Folders of earlier releases do not say whether it keeps an end; it did where nothing else ended a text.
    """
    if isinstance(tokenizer, FileTokenizer) and not (not tokenizer.around if keeps_end is None else keeps_end):
        ids = tokenizer.encode_around([text])[0]
        if len(ids) > most:  # what ends a text stays
            behind = min(tokenizer.behind(), most - 1)
            ids = np.concatenate([ids[: most - behind], ids[len(ids) - behind :]])
        return ids if len(ids) else np.array([tokenizer.end_of_document])
    return np.append(tokenizer.encode([text])[0].astype(np.int64), tokenizer.end_of_document)[:most]

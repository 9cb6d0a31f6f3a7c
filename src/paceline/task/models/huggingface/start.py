"""What a model starts from: how the folder was read, the weights, their fingerprint, and the line that tells of it."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import StorageError
from paceline.spec.import_paths import names_object
from paceline.spec.model_folder import CONFIG, TOKENIZER, folder_of
from paceline.spec.task import DataSpec, ModelSpec
from paceline.task.data.sources.named import kind_of_source
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.names import EMBEDDINGS
from paceline.task.models.huggingface.road import road_of
from paceline.task.models.huggingface.theirs import ARCHITECTURE
from paceline.task.models.huggingface.transfer import fit_decoder
from paceline.task.models.sizes import base_of, resolve_decoder
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.spec.journal.kinds import DecisionRecord

OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
BLOCK_BYTES = 2**16  # read at each place of a file for its fingerprint
PLACES = 16  # evenly spaced over a file


@dataclass(frozen=True)
class StartingWeights:
    """Files of weights that a model starts from."""

    path: Path
    tensors: int
    files: int
    bytes: int
    fingerprint: str  # of lengths, headers, and values at some places: see `fingerprint_of`

    def __str__(self) -> str:
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"{self.tensors:,} tensors of {format_bytes(self.bytes)} in {files}, fingerprint {self.fingerprint}"


def starting_weights(path: str) -> StartingWeights:
    """Return what is in a file or folder of weights. Reads headers, and a few blocks. Raises as `read_safetensors`."""
    stored = read_safetensors(path)
    files = stored.files
    size = sum(file.stat().st_size for file in files)
    place = Path(path).expanduser()
    beside = [place / CONFIG] if (place / CONFIG).is_file() else []
    return StartingWeights(place, len(stored), len(files), size, fingerprint_of([*beside, *files]))


def fingerprint_of(files: list[Path]) -> str:
    """Return 16 hex digits that tell files of weights apart: of names, lengths, and blocks of bytes.

    The first block holds a file's header, or the beginning of it, the last one its end; 14 lie between. Two files that
    differ between those blocks alone have the same fingerprint: it names a download, and is no checksum of it.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for place in range(PLACES):
                    opened.seek(max(0, size - BLOCK_BYTES) * place // (PLACES - 1))
                    digest.update(opened.read(BLOCK_BYTES))
        except OSError as error:
            raise StorageError(f"{file} cannot be read", str(error), "a fresh copy of the file") from error
    return digest.hexdigest()[:16]


def start_lines(model: object, data: object) -> list[str]:
    """Return what is told of a model's folder and of the weights it starts from, a sentence each; none of others."""
    if not isinstance(model, ModelSpec):
        return []
    lines = []
    folder = folder_of(model.name)
    if folder is not None:
        road, asked = road_of(model.name), model.arguments.get(ARCHITECTURE)
        own = f"{road.architecture} as {road.chosen}: {road.because}"
        lines.append(f"the {road.architecture} of the folder as transformers' {asked}" if asked else own)
    if model.starts_from:
        lines.append(f"starts from {starting_weights(model.starts_from)}")
        lines += fit_texts(model)
    if folder is not None and isinstance(data, DataSpec) and kind_of_source(data.source)[0] != "images":
        lines.append(_tokenizer_text(folder, data))
    return lines


def fit_texts(model: ModelSpec) -> list[str]:
    """Return what of a model is not simply read: by name for the built-in decoder, else as the spec says it."""
    base = base_of(model.name)
    if base is not None:
        shape = dataclasses.replace(model, arguments={})
        config = resolve_decoder(shape, 1 if model.vocab or base.vocab else _rows_of(model.starts_from), 1)
        return fit_decoder(config, model.starts_from, model.fresh).texts()
    return [f"starts fresh, and is left out of the weights: {', '.join(model.fresh)}"] if model.fresh else []


def _rows_of(weights: str) -> int:
    """Return the vocabulary of weights, for a size whose vocabulary is the data's; 1 where they have no embedding."""
    stored, name = read_safetensors(weights), EMBEDDINGS[0]
    return stored.shape(name)[0] if name in stored else 1


def _tokenizer_text(folder: Path, data: DataSpec) -> str:
    if names_object(data.source):
        own = data.arguments.get("tokenizer")
        return f"which tokenizer is taken is up to {data.source}{f', which is given {own!r}' if own else ''}"
    if not (folder / TOKENIZER).is_file():
        return f"the folder has no {TOKENIZER}: the data's tokenizer is '{data.tokenizer}'{_tokenizer_hint(folder)}"
    if data.tokenizer == str(folder / TOKENIZER):
        return f"the tokenizer is the folder's {TOKENIZER}"
    return f"the tokenizer is '{data.tokenizer}', not the folder's {TOKENIZER}: its ids may mean other text"


def _tokenizer_hint(folder: Path) -> str:
    """Return how a tokenizer of another format becomes one that is read, "" where there is none."""
    other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), "")
    if not other:
        return ""
    write = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    return f". Its {other} is not read; transformers writes {TOKENIZER} beside it: {write}"


def start_decision(model: object) -> DecisionRecord | None:
    """Return which model was built for a folder and why, with its weights and all differences as evidence."""
    if not isinstance(model, ModelSpec) or not (folder_of(model.name) or model.starts_from):
        return None
    from paceline.spec.journal.kinds import DecisionRecord

    weights = starting_weights(model.starts_from) if model.starts_from else None
    evidence: dict[str, object] = {"weights": None, "changed": fit_texts(model) if weights is not None else []}
    if weights is not None:
        evidence["weights"] = {
            "path": str(weights.path), "tensors": weights.tensors, "files": weights.files, "bytes": weights.bytes,
            "fingerprint": weights.fingerprint,
        }  # fmt: skip
    if folder_of(model.name) is None:
        return DecisionRecord("model", model.name, model.name, "weights are given beside it", evidence)
    road = road_of(model.name)
    evidence["differences"] = list(road.differences)
    return DecisionRecord("model", road.architecture, road.chosen, road.because, evidence)

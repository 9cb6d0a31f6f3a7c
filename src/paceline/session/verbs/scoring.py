"""Scores of documents by the model of a run: a pass that writes a number beside each text, for a later selection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.durable import publish
from paceline.errors import ConfigError, DataError, StorageError
from paceline.spec.data.labels import IGNORED
from paceline.spec.load import spec_from_dict
from paceline.spec.task import DataSpec, Task
from paceline.task.data.sources.documents import Damaged, read_documents

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.task.data.sources.tokenizer import Tokenizer

LOSS, UNCERTAINTY, CORE = "loss", "uncertainty", "core"
CORE_SHARE = 0.1  # of the documents, that are put in order
PASS_TOKENS = 8192  # in one forward pass
SaysProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class CoreSetFound:
    """How many documents a core set has, and the largest distance of another document from the nearest of the set.

    `radius_of_one` is that of the most central document alone.
    """

    documents: int
    radius: float
    radius_of_one: float


@dataclass(frozen=True)
class ScoredDocuments:
    """Documents that were scored into a file, and how their scores lie."""

    out: Path
    checkpoint: Path
    step: int
    by: str
    documents: int
    quantiles: dict[str, float]
    core: CoreSetFound | None = None  # of scores that are places in a core set
    left_out: int = 0  # documents that could not be read
    left_out_first: str = ""


def score_documents(
    run_dir: Path,
    data: DataSpec,
    out: Path,
    by: str = LOSS,
    progress: SaysProgress = lambda what, share: None,
    share: float = CORE_SHARE,
) -> ScoredDocuments:
    """Write each document of `data` with its score by a run's newest checkpoint as a line of JSONL.

    The score is the mean over a document's tokens of the next-token loss, or of the entropy of what the model expects,
    in nats; or its place in a core set of `share` of the documents, over their number, and 1 outside of it. A document
    longer than a sample is read in pieces. Raises as `choose_checkpoint`; ConfigError where the run's model reads no
    text, DataError for documents that cannot be read or none, StorageError where `out` cannot be written.
    """
    from paceline.session.verbs.weights import choose_checkpoint

    chosen = choose_checkpoint(run_dir)
    task = spec_from_dict(chosen.manifest.extra["spec"], origin="the checkpoint").task
    tokenizer, seq_len = _tokenizer_of(task), task.data.seq_len
    model, core, damaged = _model_of(task, chosen.path, tokenizer.vocab, seq_len), None, Damaged(data.on_bad == "skip")
    if by == CORE:
        places, core = _core_set(model, tokenizer, data, seq_len, share, progress)
        coming = iter(places)

    def of(texts: Sequence[bytes]) -> list[float]:
        if by == CORE:
            return [next(coming) for _ in texts]
        means = _means(model, tokenizer, texts, seq_len, lambda tokens: _of_tokens(model, tokens, by))
        return [float(mean) for mean in means]

    scores = _write(data, out, of, progress, damaged)
    left = damaged.count, damaged.first
    return ScoredDocuments(out, chosen.path, chosen.manifest.step, by, len(scores), _quantiles(scores), core, *left)


def _write(
    data: DataSpec, out: Path, of: Callable[[Sequence[bytes]], list[float]], progress: SaysProgress, damaged: Damaged
) -> list[float]:
    """Write every document with its score, and return the scores; `damaged` counts what is left out."""
    scores, unfinished = list[float](), out.with_name(f".{out.name}.part")
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            for texts, done in _texts(data, damaged):
                for text, score in zip(texts, of(texts), strict=True):
                    stream.write(json.dumps({"text": text.decode(), "score": score}, ensure_ascii=False) + "\n")
                    scores.append(score)
                progress("scoring", done)
        if not scores:
            raise _no_text(data)
        publish(unfinished, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "a folder with room to write") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return scores


def _no_text(data: DataSpec) -> DataError:
    return DataError(f"'{data.source}' holds no text", "nothing was read to be scored", "name other data")


def _quantiles(scores: Sequence[float]) -> dict[str, float]:
    import numpy as np

    names = {"lowest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "highest": 1.0}
    return {name: float(np.quantile(scores, part)) for name, part in names.items()}


def _core_set(
    model: nn.Module, tokenizer: Tokenizer, data: DataSpec, seq_len: int, share: float, progress: SaysProgress
) -> tuple[list[float], CoreSetFound]:
    """Return each document's place in a core set over their number, 1 of those outside, and what the set is like.

    A document stands where its tokens' last hidden states do in the mean. Keeps those of all documents, in fp32.
    """
    import numpy as np

    from paceline.task.data.prepare.core_set import greedy_k_center

    hidden, found = _HiddenStates(model), list[Any]()
    for texts, done in _texts(data):
        means = _means(model, tokenizer, texts, seq_len, hidden.of)
        found.append(np.stack([mean.astype(np.float32) for mean in means]))
        progress("reading", done)
    if not found:
        raise _no_text(data)
    points = np.concatenate(found)
    wanted = max(1, round(share * len(points)))
    core = greedy_k_center(points, wanted, lambda part: progress("choosing", part))
    places = np.ones(len(points))
    places[core.order] = np.arange(len(core.order)) / len(points)
    radii = core.radii
    return places.tolist(), CoreSetFound(len(core.order), float(radii[-1]), float(radii[0]))


def _texts(data: DataSpec, damaged: Damaged | None = None) -> Iterator[tuple[list[bytes], float]]:
    """Yield documents, some at a time, and the share of all files' bytes that were read by then."""
    from paceline.task.data.sources.files import list_undivided

    listing = list_undivided(data)
    whole, done = sum(file.size for file in listing.files) or 1, 0
    texts, size = list[bytes](), 0
    for document in read_documents(data, listing, damaged):
        texts.append(document.text)
        size += len(document.text)
        if size >= 4 * PASS_TOKENS:
            done += size
            yield texts, min(1.0, done / whole)
            texts, size = [], 0
    if texts:
        yield texts, 1.0


def _tokenizer_of(task: Task) -> Tokenizer:
    """Return the tokenizer of a run's text. Raises ConfigError where its data are none."""
    from paceline.task.data.source import is_text
    from paceline.task.data.sources.cache import open_corpus

    first = task.data.parts()[0] if isinstance(task.data, DataSpec) else None
    if first is None or not is_text(first.source):
        raise ConfigError(
            "the run was trained on data that are no text",
            "documents are scored with the tokenizer of the run's own documents",
            "a run whose task.data.source is text",
        )
    return open_corpus(first).open_tokenizer()


def _model_of(task: Task, checkpoint: Path, vocab: int, seq_len: int) -> nn.Module:
    """Return a run's model with a checkpoint's weights, on the accelerator if there is one."""
    import torch

    from paceline.checkpoint import WholeTensors
    from paceline.task.models.build import build_model

    model = build_model(task.model, vocab, seq_len, task.seed, adaptation=task.adaptation)
    tensors = WholeTensors(checkpoint)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in tensors:
                tensor.copy_(tensors[name])
            elif isinstance(tensor, torch.nn.Parameter):
                raise ConfigError(
                    f"{checkpoint} does not hold '{name}'",
                    "its model is not the one that the run's spec names",
                    "the code of the run",
                )
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _means(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[bytes],
    seq_len: int,
    of: Callable[[Tensor], Tensor],
) -> list[Any]:
    """Return the mean over each text's tokens of what `of` gives for them, [rows, seq - 1] or with a width behind.

    Pieces of about one length are read together, and their tokens added up by text.
    """
    import torch

    sums, counts = list[Any]([0.0] * len(texts)), [0] * len(texts)
    pieces = list(_pieces(tokenizer, texts, seq_len))
    pieces.sort(key=lambda piece: len(piece[1]))
    rows = list[tuple[int, Any]]()
    device = next(model.parameters()).device
    with torch.no_grad():
        for at, piece in enumerate(pieces):
            rows.append(piece)
            if at + 1 == len(pieces) or (len(rows) + 1) * len(pieces[at + 1][1]) > PASS_TOKENS:
                tokens = torch.nn.utils.rnn.pad_sequence(
                    [torch.as_tensor(ids) for _, ids in rows], batch_first=True, padding_value=IGNORED
                ).to(device)
                real = tokens[:, 1:] != IGNORED
                values = of(tokens.clamp(min=0))
                by_row = (values * real.reshape(*real.shape, *[1] * (values.dim() - 2))).sum(1).cpu().numpy()
                for (text, _), total, count in zip(rows, by_row, real.sum(1).tolist(), strict=True):
                    sums[text], counts[text] = sums[text] + total, counts[text] + count
                rows = []
    return [total / count for total, count in zip(sums, counts, strict=True)]


class _HiddenStates:
    """What a model's head reads: its last hidden states, in fp64. Raises ConfigError where no head is known."""

    def __init__(self, model: nn.Module) -> None:
        from paceline.task.models.decoder import Decoder

        self._model = model
        self._seen: list[Any] = []
        embeddings: Any = getattr(model, "get_output_embeddings", None)
        head = embeddings() if embeddings is not None else None
        if isinstance(model, Decoder):
            model.norm.register_forward_hook(lambda module, args, output: self._seen.append(output))
        elif head is not None:
            head.register_forward_pre_hook(lambda module, args: self._seen.append(args[0]))
        else:
            raise ConfigError(
                f"the hidden states of {type(model).__name__} are not known",
                "documents are told apart by what the model's head reads",
                "a built-in model, or one of transformers",
            )

    def of(self, tokens: Tensor) -> Tensor:
        """Return the states of the tokens but the last: [rows, seq - 1, width]."""
        self._seen.clear()
        self._model(tokens[:, :-1])
        states: Tensor = self._seen[-1].double()
        return states


def _of_tokens(model: nn.Module, tokens: Tensor, by: str) -> Tensor:
    """Return the loss of each token after the first, or the entropy of what was expected there: [rows, seq - 1].

    Padding stands behind the tokens, which see only what is before them.
    """
    import torch

    output = model(tokens[:, :-1])
    log_probability = torch.log_softmax(getattr(output, "logits", output).double(), -1)
    if by == UNCERTAINTY:
        return -(log_probability.exp() * log_probability).sum(-1)
    return -log_probability.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _pieces(tokenizer: Tokenizer, texts: Sequence[bytes], seq_len: int) -> Iterator[tuple[int, Any]]:
    """Yield (number of the text, its tokens): between two end-of-document tokens, at most seq_len of them predicted."""
    import numpy as np

    from paceline.task.data.sources.tokenizer import opened

    end = np.array([tokenizer.end_of_document], dtype=np.int64)
    for number, ids in enumerate(tokenizer.encode(texts)):
        whole = np.concatenate([end, np.asarray(opened(tokenizer, ids), dtype=np.int64), end])
        for at in range(0, len(whole) - 1, seq_len):
            yield number, whole[at : at + seq_len + 1]

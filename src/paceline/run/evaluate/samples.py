"""Texts that a language model continues while it is trained, on any layout.

Simple before fast: for each new token all ranks pass the whole rows forward as in an evaluation, under whatever plan,
and the ranks that hold the logits of the last token tell the others which one comes next. Rows are as long as samples;
what stands behind the last token is seen by no token before it. Tokens that are drawn are a function of the seed, the
step, the prompt and the place, so every layout draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.run.evaluate.held_out_metrics import Sums, pass_logits
from paceline.run.loop.loader import MicroBatch, to_device
from paceline.run.loop.step import Stepper
from paceline.spec.data.labels import IGNORED
from paceline.spec.watch.samples import SamplesSpec
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import InOrder
from paceline.task.data.sources.manifest import TOKENIZER
from paceline.task.data.sources.tokenizer import Tokenizer, from_json, opened
from paceline.task.metrics.metric import LossTotal, Totals
from paceline.task.metrics.metric_inputs import predictions_of
from paceline.task.models.build import evaluating
from paceline.task.objective import next_token


@dataclass(frozen=True)
class SampleWriter:
    """Continues prompts. Every rank has one."""

    spec: SamplesSpec
    tokenizer: Tokenizer
    prompts: tuple[tuple[int, ...], ...]
    seq_len: int
    seed: int

    def write(self, stepper: Stepper, step: int) -> list[str]:
        """Return what the model writes behind each prompt after a step. Every rank calls it."""
        rows = np.zeros((len(self.prompts), self.seq_len), dtype=np.int64)
        ends = np.array([len(prompt) for prompt in self.prompts])
        for row, prompt in zip(rows, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        going = np.ones(len(rows), dtype=bool)
        with evaluating(stepper.model), torch.no_grad():
            for _ in range(self.spec.tokens):
                going &= ends < self.seq_len
                if not going.any():
                    break
                found = self._next(stepper, step, rows, ends)
                rows[going, ends[going]] = found[going]
                ends[going] += 1
                going &= found != self.tokenizer.end_of_document
        return [self.tokenizer.decode(row[len(prompt) : end]) for row, prompt, end in
                zip(rows, self.prompts, ends, strict=True)]  # fmt: skip

    def _next(self, stepper: Stepper, step: int, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the token that comes after each row's last one."""
        labels = np.full_like(rows, IGNORED)
        labels[np.arange(len(rows)), ends - 1] = np.arange(len(rows))  # the row's number, where it goes on
        data = {"tokens": torch.from_numpy(rows.copy()), "labels": torch.from_numpy(labels)}
        batch = MicroBatch(to_device(data, stepper.world.device), np.arange(len(rows)), 0)
        metric = _NextTokens(len(rows), self.spec.temperature, [self._draw(step, row, int(end))
                             for row, end in enumerate(ends)])  # fmt: skip
        sums, layout, rank = Sums([metric]), stepper.plan.layout, stepper.world.rank
        pass_logits(stepper, [batch], lambda seen: sums.add(seen, None))
        first = not layout.coordinates(rank)["tp"] and layout.data_rank(rank) == 0
        (totals,) = sums.over(stepper.world, first)
        return totals["token"].astype(np.int64)

    def _draw(self, step: int, row: int, place: int) -> float:
        """Return a number in [0, 1) for a token."""
        named = f"{self.seed} {step} {row} {place}".encode()
        return int.from_bytes(hashlib.blake2b(named, digest_size=6).digest(), "big") / 2**48


@dataclass(frozen=True)
class _NextTokens:
    """Chooses the next token of the rows whose last one this rank holds: numbers that add up over ranks."""

    rows: int
    temperature: float
    draws: Sequence[float]
    reads_outputs: bool = True

    def measure(self, outputs: object, batch: Any) -> Mapping[str, Tensor]:
        """Return the token of each row [rows], 0 for a row that ends on another rank."""
        logits, labels = predictions_of(outputs, "samples"), batch["labels"]
        chosen = torch.zeros(self.rows, dtype=torch.float64)
        here = labels != IGNORED
        for of_row, row in zip(logits[here].double().cpu(), labels[here].tolist(), strict=True):
            if self.temperature:
                whole = torch.softmax(of_row / self.temperature, 0).cumsum(0)
                token = int((whole < self.draws[row] * whole[-1]).sum())
            else:
                token = int(of_row.argmax())
            chosen[row] = token
        return {"token": chosen}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return nothing: tokens are no metric."""
        return {}


def sample_writer(spec: SamplesSpec, source: Source, objective: object, seed: int) -> SampleWriter | None:
    """Return what continues the prompts of a task, None where it has none.

    Raises ConfigError for a task that predicts no next token of text tokenised here, and for prompts that are too long.
    """
    if not spec.prompts:
        return None
    source = source.inner if isinstance(source, InOrder) else source
    folder = getattr(getattr(source, "split", None), "folder", None)
    file = Path(folder) / TOKENIZER if folder else None
    if objective is not next_token or file is None or not file.is_file():
        raise ConfigError(
            "task.samples.prompts: nothing continues them here",
            "samples are written by a model of the objective 'next_token', on text that is tokenised here",
            "task.samples.prompts = []",
        )
    tokenizer = from_json(file.read_text(encoding="utf-8"), TOKENIZER)
    texts = tokenizer.encode([prompt.encode() for prompt in spec.prompts])
    prompts = tuple(tuple(map(int, opened(tokenizer, ids))) for ids in texts)
    if (longest := max(map(len, prompts))) + spec.tokens > source.items_per_sample:
        raise ConfigError(
            f"task.samples: {longest} tokens of a prompt and {spec.tokens} more do not fit",
            f"a sample has {source.items_per_sample} tokens, and the model was trained on no longer ones",
            "shorter prompts, or task.samples.tokens",
        )
    return SampleWriter(spec, tokenizer, prompts, source.items_per_sample, seed)

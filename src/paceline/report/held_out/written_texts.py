"""Texts that the model wrote while it was trained: the first and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.history.records import Records
from paceline.spec.journal.kinds import WrittenRecord


@dataclass(frozen=True)
class WrittenTexts:
    """What was written behind each prompt after a step."""

    step: int
    texts: tuple[tuple[str, str], ...]  # (prompt, text)


def written_of(records: Records) -> tuple[WrittenTexts, ...]:
    """Return the first texts and the last."""
    found = [
        WrittenTexts(record.step, tuple(zip(record.prompts, record.texts, strict=False)))
        for record in records.of(WrittenRecord)
        if record.step is not None
    ]
    return tuple(found[:1] + found[1:][-1:])


def written_rows(written: Sequence[WrittenTexts]) -> list[tuple[str, str]]:
    """Return (after which step, prompt and text) for a listing."""
    return [(f"after step {each.step:,}", f"{prompt} → {text}") for each in written for prompt, text in each.texts]

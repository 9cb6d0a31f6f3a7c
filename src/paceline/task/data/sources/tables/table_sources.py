"""The sources of a table, as a task's data ask for them."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.spec.task import DataSpec
from paceline.task.data.protocol import Pair, Source
from paceline.task.data.sources.tables.source import LabelledSource, PackedDialogue, PaddedDialogue
from paceline.task.data.sources.tables.store import TextTable
from paceline.task.data.sources.tokens import TokenSplit


def table_sources(table: TextTable, data: DataSpec) -> Pair:
    """Return the samples of a table: (train, validation or None). Raises DataError where there are none to train on."""
    held_out = table.corpus.validation

    def of(split: TokenSplit) -> Source:
        if table.labels is not None:
            return LabelledSource(table, split, data.seq_len)
        if data.rows == "padded":
            return PaddedDialogue(table, split, data.seq_len)
        if data.rows == "windows":
            raise ConfigError(
                "task.data.rows = 'windows' of a table of conversations", "a window would begin in the middle of one",
                'task.data.rows = "packed" or "padded"',
            )  # fmt: skip
        return PackedDialogue(table, split, data.seq_len, data.cross_documents)

    return of(table.corpus.train), of(held_out) if held_out.documents else None

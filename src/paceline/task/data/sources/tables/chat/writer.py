"""Writes rows of prompts with completions, and of conversations, as parts of text of which some counts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import DamagedData
from paceline.spec.task import DataSpec
from paceline.task.data.sources.tables.chat.messages import (
    LEAVE_OUT,
    TOOLS_FIELD,
    Conversation,
    cell_text,
    completed_messages,
    messages_of,
    turn_messages,
    without_nulls,
)
from paceline.task.data.sources.tables.chat.own_template import of_tokenizer, own_templates
from paceline.task.data.sources.tables.chat.parts import TextPart
from paceline.task.data.sources.tables.chat.templates import TEMPLATES, Template, TemplateRefusal
from paceline.task.data.sources.tables.columns import TableColumns

OTHER_TEMPLATE = f'another template, such as "chatml", or {LEAVE_OUT}'


@dataclass(frozen=True)
class RowWriter:
    """Writes a row of prompts and completions, or of messages, as segments. `told` says how, for people."""

    columns: TableColumns
    template: Template
    told: str

    def segments(self, values: Mapping[str, object], where: str, filled: bool = False) -> list[TextPart]:
        """Return the segments of a row. Raises DamagedData where it holds no text, or nothing that counts.

        `filled` says that fields a row does not have stand there as nothing, as Arrow has them.
        """
        names = self.columns.names
        if self.columns.kind == "completion":
            prompt, completion = (without_nulls(values.get(name)) if filled else values.get(name) for name in names)
            if isinstance(completion, list):
                return self._written(completed_messages(prompt, completion, where, values.get(TOOLS_FIELD)), where)
            asked, answer = cell_text(prompt, where, names[0]), cell_text(completion, where, names[1])
            return [TextPart(asked, False), TextPart(answer, True)]
        if len(names) > 1:
            return self._written(turn_messages(values, names, where), where)
        told, tools = (values.get(name) for name in (names[0], TOOLS_FIELD))
        if filled:
            told, tools = without_nulls(told), without_nulls(tools)
        return self._written(messages_of(told, where, names[0], tools), where)

    def _written(self, conversation: Conversation, where: str) -> list[TextPart]:
        try:
            return self.template(conversation)
        except TemplateRefusal as error:
            what = f"{where} does not fit the template"
            raise DamagedData(what, str(error), OTHER_TEMPLATE) from error


def writer_of(data: DataSpec, columns: TableColumns) -> RowWriter:
    """Return what writes the rows of a table. Raises DataError for a template that cannot be had."""
    name = data.template
    if name == "auto":
        name = "tokenizer" if own_templates(data.tokenizer) else "plain"
    if columns.kind == "completion":  # whose rows may be messages, and mostly are not
        return RowWriter(columns, _made_when_asked(name, data.tokenizer),
                         "a prompt, then its completion, whose tokens count")  # fmt: skip
    if name == "tokenizer":
        return RowWriter(columns, of_tokenizer(data.tokenizer), "conversations by the tokenizer's own chat template")
    return RowWriter(columns, TEMPLATES[name], f"conversations by the template '{name}'")


def _made_when_asked(name: str, tokenizer: str) -> Template:
    made = functools.cache(lambda: of_tokenizer(tokenizer) if name == "tokenizer" else TEMPLATES[name])
    return lambda conversation: made()(conversation)

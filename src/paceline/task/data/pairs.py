"""Preference pairs from a JSONL file: a prompt, the answer that was chosen, and the one that was rejected.

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", "content": "4"}], ...}

Messages are written by a template; `chosen` and `rejected` may be whole conversations, with or without a prompt beside
them. The last message is the answer.

A sample is the two rows of a pair, [2, seq_len]. Prompts and padding do not count. A row that is too long loses the
beginning of its prompt, and an answer that is too long alone its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import ConfigError, DamagedData, DataError, suggestion
from paceline.spec.data.labels import IGNORED
from paceline.task.data.sources.tables.chat.messages import (
    LEARNT_ROLE,
    TOOLS_FIELD,
    Conversation,
    messages_of,
)
from paceline.task.data.sources.tables.chat.own_template import of_tokenizer, own_templates
from paceline.task.data.sources.tables.chat.parts import encode_segments
from paceline.task.data.sources.tables.chat.templates import TEMPLATES, Template, TemplateRefusal, plain
from paceline.task.data.sources.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, opened

FIELDS = ("prompt", "chosen", "rejected")
FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages'
WRITTEN_BY = ("auto", "tokenizer", *TEMPLATES)


@dataclass(frozen=True)
class ChatPair:
    """Two conversations that end in the answers; `where` says which line they are of."""

    conversations: tuple[Conversation, Conversation]
    where: str


AnswerPair = tuple[str, str, str] | ChatPair


class PreferencePairs:
    """A map-style data set of pairs; `vocab` is the tokenizer's, a sample has `items_per_sample` positions."""

    unit = "tokens"

    def __init__(
        self, pairs: Sequence[AnswerPair], seq_len: int, tokenizer: Tokenizer, template: Template = plain
    ) -> None:
        self._pairs, self._seq_len, self._tokenizer, self._template = pairs, seq_len, tokenizer, template
        self.vocab, self.items_per_sample = tokenizer.vocab, seq_len

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pair = self._pairs[index]
        if isinstance(pair, ChatPair):
            rows = [self._row(*told) for told in self._written(pair)]
        else:
            prompt, *answers = self._tokenizer.encode([text.encode() for text in pair])
            rows = [self._row(opened(self._tokenizer, prompt).tolist(), answer.tolist()) for answer in answers]
        tokens, labels = (torch.tensor(side) for side in zip(*rows, strict=True))
        return {"tokens": tokens, "labels": labels}

    def _written(self, pair: ChatPair) -> list[tuple[list[int], list[int]]]:
        """Return the tokens before each answer, and those of the answer: the last of the assistant's that count."""
        try:
            segments = [self._template(each) for each in pair.conversations]
        except TemplateRefusal as error:
            raise DataError(f"{pair.where} does not fit the template", str(error),
                            'another template, such as "chatml"') from error  # fmt: skip
        found = []
        for tokens, counted in encode_segments(self._tokenizer, segments):
            end = int(counted.nonzero()[0][-1]) + 1
            start = end - int(counted[:end][::-1].argmin() if not counted[:end].all() else end)
            found.append((tokens[:start].tolist(), tokens[start:end].tolist()))
        return found

    def _row(self, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens and the labels of a row, both of `seq_len`."""
        end = self._tokenizer.end_of_document
        answer = [*answer, end][: self._seq_len]
        kept = (prompt or [end])[-(self._seq_len + 1 - len(answer)) :]
        row = [*kept, *answer]
        labels = [IGNORED] * (len(kept) - 1) + answer
        missing = self._seq_len - len(labels)
        return [*row[:-1], *[end] * missing], [*labels, *[IGNORED] * missing]


def preference_pairs(
    path: str, seq_len: int, tokenizer: str = "bytes", held_out: int = 0, template: str = "auto"
) -> PreferencePairs | tuple[PreferencePairs, PreferencePairs]:
    """Return the pairs of a JSONL file, and with `held_out` the last so many of them apart, for evaluation.

    `tokenizer` is 'bytes' or the path of a tokenizer.json or its folder. `template` writes messages: "auto" is the
    tokenizer's own where it has one and "plain" else, or it is "plain", "chatml" or "llama3". Raises DataError with the
    line that holds no pair.
    """
    if template not in WRITTEN_BY:
        raise ConfigError(f"there is no template '{template}'", "", suggestion(template, list(WRITTEN_BY)))
    pairs = read_pairs(Path(path).expanduser())
    tokens: Tokenizer = ByteTokenizer() if tokenizer == "bytes" else load_tokenizer(tokenizer)
    if held_out >= len(pairs):
        raise DataError(f"held_out = {held_out} of {len(pairs)} pairs", "none would be left to train on", "fewer")
    # Texts alone need none, and no library that a tokenizer's own may need.
    writes = _template_of(template, tokenizer) if any(isinstance(pair, ChatPair) for pair in pairs) else plain
    if not held_out:
        return PreferencePairs(pairs, seq_len, tokens, writes)
    parts = pairs[:-held_out], pairs[-held_out:]
    return PreferencePairs(parts[0], seq_len, tokens, writes), PreferencePairs(parts[1], seq_len, tokens, writes)


def _template_of(name: str, tokenizer: str) -> Template:
    if name == "auto":
        name = "tokenizer" if tokenizer != "bytes" and own_templates(tokenizer) else "plain"
    return of_tokenizer(tokenizer) if name == "tokenizer" else TEMPLATES[name]


def read_pairs(path: Path) -> list[AnswerPair]:
    """Return the pair of every line of a file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # others than line feeds may stand in a text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}' cannot be read", str(error), "a file of JSON lines in UTF-8") from error
    pairs = [_pair(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not pairs:
        raise DataError(f"'{path}' holds no pairs", "it is empty", FORM)
    return pairs


def _pair(path: Path, number: int, line: str) -> AnswerPair:
    where = f"{path}:{number}"
    try:
        record: object = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON", str(error), "one JSON object a line") from error
    given = [record.get(field) if isinstance(record, Mapping) else None for field in FIELDS]
    prompt, chosen, rejected = given
    tools = record.get(TOOLS_FIELD) if isinstance(record, Mapping) else None
    if isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, str | list | None):
        first, second = (_conversation(where, prompt, *side, tools)
                         for side in (("chosen", chosen), ("rejected", rejected)))  # fmt: skip
        return ChatPair((first, second), where)
    if wrong := [field for field, text in zip(FIELDS, given, strict=True) if not isinstance(text, str)]:
        kinds = " and messages under others" if any(isinstance(each, list) for each in given) else ""
        raise DataError(f"{where} is no preference pair", f"it has no text under {', '.join(wrong)}{kinds}", FORM)
    return str(prompt), str(chosen), str(rejected)


def _conversation(where: str, prompt: object, field: str, answer: list[object], tools: object) -> Conversation:
    """Return the messages up to the answer: the prompt's, unless those of the answer hold them already."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])  # type: ignore[call-overload]
    holds_it = len(answer) > 1 and (isinstance(prompt, str) or answer[: len(before)] == before)
    try:
        found = messages_of(answer if holds_it else [*before, *answer], where, field, tools)
        if holds_it and isinstance(prompt, str) and all(one["role"] == LEARNT_ROLE for one in found.messages):
            found = messages_of([*before, *answer], where, field, tools)
    except DamagedData as error:
        raise DataError(error.what, error.because, FORM) from error
    last = found.messages[-1]["role"]
    if last != LEARNT_ROLE:
        raise DataError(f"{where} has no answer", f"the last message under {field} is of '{last}'",
                        f"a message of the role '{LEARNT_ROLE}' at the end")  # fmt: skip
    if not found.is_learnt(len(found.messages) - 1):  # an earlier one would be compared
        raise DataError(f"{where} has an answer that is not to be learnt", f"the last message under {field} has the"
                        " weight 0", "no weight for the answers of a pair")  # fmt: skip
    return found

"""Conversations and completions as text of which some counts: what a template writes, and how tokens are made of it.

A template's own marks (`<|im_start|>`) become the special tokens that they are where the tokenizer knows them. What
stands in a message never does: a message that spells out a special token stays plain text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData, DataError, MissingExtra
from paceline.spec.task import DataSpec
from paceline.task.data.sources.tables.columns import TableColumns
from paceline.task.data.sources.tables.messages import A_TEXT, LEARNT_ROLE, LEAVE_OUT, messages_of, turn_messages
from paceline.task.data.sources.tokenizer import Tokenizer, Tokens, is_own

CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"


class TextPart(NamedTuple):
    """A part of a row: its text, whether its tokens count in the loss, and whether it is a template's own mark."""

    text: str
    counted: bool
    mark: bool = False


class TemplateRefusal(Exception):
    """Says why a tokenizer's template does not write a conversation, in its own words or in Python's."""


Messages = Sequence[Mapping[str, str]]
Template = Callable[[Messages], list[TextPart]]


@dataclass(frozen=True)
class RowWriter:
    """Writes a row of prompts and completions, or of messages, as segments. `told` says how, for people."""

    columns: TableColumns
    template: Template
    told: str

    def segments(self, values: Mapping[str, object], where: str) -> list[TextPart]:
        """Return the segments of a row. Raises DamagedData where it holds no text, or nothing that counts."""
        if self.columns.kind == "completion":
            prompt, completion = (_text(values.get(name), where, name) for name in self.columns.names)
            return [TextPart(prompt, False), TextPart(completion, True)]
        names = self.columns.names
        if len(names) > 1:
            return self._written(turn_messages(values, names, where), where)
        return self._written(messages_of(values.get(names[0]), where, names[0]), where)

    def _written(self, messages: Messages, where: str) -> list[TextPart]:
        try:
            return self.template(messages)
        except TemplateRefusal as error:
            raise DamagedData(f"{where} does not fit the tokenizer's template", str(error),
                              f'another template, such as "chatml", or {LEAVE_OUT}') from error  # fmt: skip


def writer_of(data: DataSpec, columns: TableColumns) -> RowWriter:
    """Return what writes the rows of a table. Raises DataError for a template that cannot be had."""
    if columns.kind == "completion":
        return RowWriter(columns, plain, "a prompt, then its completion, whose tokens count")
    name = data.template
    if name == "auto":
        name = "tokenizer" if own_template(data.tokenizer) else "plain"
    if name == "tokenizer":
        return RowWriter(columns, of_tokenizer(data.tokenizer), "conversations by the tokenizer's own chat template")
    return RowWriter(columns, TEMPLATES[name], f"conversations by the template '{name}'")


def plain(messages: Messages) -> list[TextPart]:
    """Return messages as lines: the role and a colon before each."""
    found = []
    for message in messages:
        counted = message["role"] == LEARNT_ROLE
        found += [TextPart(f"{message['role']}: ", False), TextPart(f"{message['content']}\n", counted)]
    return found


def chatml(messages: Messages) -> list[TextPart]:
    """Return messages in ChatML: <|im_start|>role, the content, <|im_end|>."""
    found = []
    for message in messages:
        counted = message["role"] == LEARNT_ROLE
        found += [
            TextPart("<|im_start|>", False, mark=True), TextPart(f"{message['role']}\n", False),
            TextPart(message["content"], counted), TextPart("<|im_end|>", counted, mark=True), TextPart("\n", False),
        ]  # fmt: skip
    return found


def llama3(messages: Messages) -> list[TextPart]:
    """Return messages as Llama 3 writes them, from <|begin_of_text|> on."""
    found = [TextPart("<|begin_of_text|>", False, mark=True)]
    for message in messages:
        counted = message["role"] == LEARNT_ROLE
        found += [
            TextPart("<|start_header_id|>", False, mark=True), TextPart(message["role"], False),
            TextPart("<|end_header_id|>", False, mark=True), TextPart("\n\n", False),
            TextPart(message["content"], counted), TextPart("<|eot_id|>", counted, mark=True),
        ]  # fmt: skip
    return found


TEMPLATES: dict[str, Template] = {"plain": plain, "chatml": chatml, "llama3": llama3}


def own_template(tokenizer: str) -> str:
    """Return the chat template that lies in a tokenizer's folder, "" where there is none."""
    if is_own(tokenizer):
        return ""
    path = Path(tokenizer).expanduser()
    folder = path if path.is_dir() else path.parent
    try:
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    except OSError:
        found = tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((each.get("template") for each in found if each.get("name") == "default"), "")
    return found if isinstance(found, str) else ""


def tokenizer_config(folder: Path) -> dict[str, object]:
    """Return what lies beside a tokenizer.json about it; nothing where nothing does."""
    try:
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def of_tokenizer(tokenizer: str) -> Template:
    """Return the template of a tokenizer's folder. Needs jinja2, which runs it in a sandbox.

    What counts of an assistant's message is what the template writes after the prompt for it. Raises DataError where
    the folder has no template.
    """
    source = own_template(tokenizer)
    if not source:
        raise DataError(
            f"the tokenizer '{tokenizer}' has no chat template",
            f"neither {TEMPLATE_FILE} nor chat_template in {CONFIG} lies beside it",
            "template = \"chatml\", \"llama3\" or \"plain\"",
        )  # fmt: skip
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtra("jinja2", "huggingface", "the tokenizer's own chat template") from error
    path = Path(tokenizer).expanduser()
    special = _special_tokens(tokenizer_config(path if path.is_dir() else path.parent))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        compiled = environment.from_string(source)
    except TemplateSyntaxError as error:
        because = f"{error.message}, in its line {error.lineno}"
        raise DataError(f"the chat template of the tokenizer '{tokenizer}' is no template", because,
                        "template = \"chatml\", \"llama3\" or \"plain\"") from error  # fmt: skip

    def render(messages: Messages, prompt: bool) -> str:
        try:
            given = [dict(one) for one in messages]
            return str(compiled.render(messages=given, add_generation_prompt=prompt, **special))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateRefusal(str(error)) from error

    def segments(messages: Messages) -> list[TextPart]:
        found, done = [], ""
        for at, message in enumerate(messages):
            if message["role"] != LEARNT_ROLE:
                continue
            prompt, whole = render(messages[:at], True), render(messages[: at + 1], False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise DataError(
                    "the tokenizer's chat template rewrites what it wrote before",
                    "which tokens are the assistant's cannot be told from it",
                    'template = "chatml", "llama3" or "plain"',
                )
            found += [*_marked(prompt[len(done) :], False, messages), *_marked(whole[len(prompt) :], True, messages)]
            done = whole
        return found

    return segments


def _marked(text: str, counted: bool, messages: Messages) -> Iterator[TextPart]:
    """Yield what a template wrote: the messages' contents as text, what is around them as marks."""
    for message in messages:
        content = message["content"].strip()
        at = text.find(content) if content else -1
        if at >= 0:
            yield TextPart(text[:at], counted, mark=True)
            yield TextPart(content, counted)
            text = text[at + len(content) :]
    if text:
        yield TextPart(text, counted, mark=True)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return bos_token and the like, which templates use by name."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[name] = text
    return found


def encode_segments(
    tokenizer: Tokenizer, rows: Sequence[Sequence[TextPart]]
) -> list[tuple[Tokens, npt.NDArray[np.uint8]]]:
    """Return each row's token ids, and 1 for those that count. Every segment is encoded by itself."""
    flat = [segment for row in rows for segment in row if segment.text]
    texts = [segment.text.encode() for segment in flat]
    marks = [at for at, segment in enumerate(flat) if segment.mark]
    ids = tokenizer.encode(texts)
    for at, marked in zip(marks, encode_marks(tokenizer, [texts[at] for at in marks]), strict=True):
        ids[at] = marked
    given = iter(zip(flat, ids, strict=True))
    found = []
    for row in rows:
        parts = [next(given) for segment in row if segment.text]
        tokens = [np.asarray(part, dtype=np.uint32) for _, part in parts]
        counted = [np.full(len(part), segment.counted, dtype=np.uint8) for segment, part in parts]
        empty = np.zeros(0, dtype=np.uint32)
        found.append((np.concatenate([empty, *tokens]), np.concatenate([empty.astype(np.uint8), *counted])))
    return found


def encode_marks(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[Tokens]:
    """Return the ids of a template's marks: special tokens where the tokenizer knows them."""
    special = getattr(tokenizer, "encode_special", None)
    return list(special(texts)) if special is not None else tokenizer.encode(texts)


def _text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DamagedData(f"{where}: '{field}' is not text", f"it is {json.dumps(value, default=str)[:40]}",
                          A_TEXT)  # fmt: skip
    return value

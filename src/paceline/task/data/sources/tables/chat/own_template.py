"""The chat template of a tokenizer's folder: run by jinja2 in a sandbox, as transformers runs it.

What it writes is made into tokens as one text, as transformers does. What of it counts is what stands in its
`{% generation %}` blocks, or else what `spans` finds. A special token that a message or a schema spells out stands
between two characters that no text has while the template runs, and is plain text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.errors import DataError, MissingExtra
from paceline.task.data.sources.tables.chat.messages import LEARNT_ROLE, Conversation, Messages, Plain
from paceline.task.data.sources.tables.chat.parts import TextPart
from paceline.task.data.sources.tables.chat.spans import Spans, said_by_assistant
from paceline.task.data.sources.tables.chat.templates import Template, TemplateRefusal
from paceline.task.data.sources.tokenizer import is_own, special_tokens_of

CONFIG = "tokenizer_config.json"
TEMPLATE_FILE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
MAIN, TOOL_USE = "default", "tool_use"
OTHERS = 'template = "chatml", "llama3" or "plain"'
# Unicode has these for programs' own use: no text holds them.
SPELT, SPELT_END, SAID, SAID_END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
DATE = date(2026, 1, 1)  # for a template that will not do without one: what a row is must not change from day to day
OWN_USE = re.compile("[\ufdd0-\ufdd3]")


def own_templates(tokenizer: str) -> dict[str, str]:
    """Return the chat templates that lie in a tokenizer's folder by name, `default` first; none where there are none.

    One more that some folders have is `tool_use`, for conversations with tools.
    """
    if is_own(tokenizer):
        return {}
    folder = _folder(tokenizer)
    found: object = tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
    else:
        named = {MAIN: found}
    for name in (MAIN, TOOL_USE):
        path = folder / TEMPLATE_FILE if name == MAIN else folder / MORE_TEMPLATES / f"{name}.jinja"
        with contextlib.suppress(OSError):
            named[name] = path.read_text("utf-8")
    return {name: text for name in (MAIN, TOOL_USE) if isinstance(text := named.get(name), str) and text}


def writing_identity(tokenizer: str) -> list[object]:
    """Return what, with a tokenizer itself, decides how its folder writes conversations, as plain data."""
    templates = own_templates(tokenizer)
    return [templates, _special_tokens(tokenizer_config(_folder(tokenizer)))] if templates else []


def tokenizer_config(folder: Path) -> dict[str, object]:
    """Return what lies beside a tokenizer.json about it; nothing where nothing does."""
    try:
        found = json.loads((folder / CONFIG).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _folder(tokenizer: str) -> Path:
    path = Path(tokenizer).expanduser()
    return path if path.is_dir() else path.parent


def of_tokenizer(tokenizer: str) -> Template:
    """Return the template of a tokenizer's folder. Needs jinja2. Raises DataError where the folder has no template."""
    sources = own_templates(tokenizer)
    if not sources:
        raise DataError(
            f"the tokenizer '{tokenizer}' has no chat template",
            f"neither {TEMPLATE_FILE} nor chat_template in {CONFIG} lies beside it", OTHERS,
        )  # fmt: skip
    renders = {name: _compiled(source, tokenizer) for name, source in sources.items()}
    marked = {name for name, source in sources.items() if re.search(r"\{%-?\s*generation\s*-?%\}", source)}
    spelt = _spelt(special_tokens_of(tokenizer))

    def segments(conversation: Conversation) -> list[TextPart]:
        try:
            return written(conversation)
        except TemplateRefusal:
            if not conversation.calls():
                raise
            try:
                return written(conversation.with_arguments_as_text())  # as DeepSeek V3 takes them
            except TemplateRefusal:
                pass
            raise

    def written(conversation: Conversation) -> list[TextPart]:
        messages, tools = spelt(list(conversation.messages)), spelt(list(conversation.tools)) or None
        name = TOOL_USE if tools and TOOL_USE in renders else next(iter(renders))
        render = renders[name]
        while messages[-1]["role"] != LEARNT_ROLE:  # nothing is learnt of what follows the last answer
            messages.pop()

        def rendered(some: Messages, prompt: bool) -> str:
            return render([dict(one) for one in some], tools, prompt)

        text, spans = _said(rendered(messages, False)) if name in marked else said_by_assistant(rendered, messages)
        if tools and text == _said_or_nothing(lambda: render(messages, None, False)):
            raise TemplateRefusal("it writes no tools, so the column 'tools' would have no effect")
        uncalled = [{name: each for name, each in one.items() if name != "tool_calls"} for one in messages]
        if conversation.calls() and text == _said_or_nothing(lambda: render(uncalled, tools, False)):
            raise TemplateRefusal("it writes no calls of tools")
        return list(_parts(text, _learnt(spans, conversation)))

    return segments


def _compiled(source: str, tokenizer: str) -> Callable[[object, object, bool], str]:
    """Return what renders messages and tools, and the beginning of an answer behind them where that is asked for."""
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
    except ImportError as error:
        raise MissingExtra("jinja2", "huggingface", "the tokenizer's own chat template") from error
    special = _special_tokens(tokenizer_config(_folder(tokenizer)))
    environment = _environment()
    if "strftime_now is defined" not in source:
        environment.globals["strftime_now"] = DATE.strftime
    try:
        compiled = environment.from_string(source)
    except TemplateSyntaxError as error:
        because = f"{error.message}, in its line {error.lineno}"
        raise DataError(f"the chat template of the tokenizer '{tokenizer}' is no template", because,
                        OTHERS) from error  # fmt: skip

    def render(messages: object, tools: object, prompt: bool) -> str:
        try:
            return str(compiled.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
                                       **special))  # fmt: skip
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise TemplateRefusal(str(error)) from error

    return render


def _environment() -> Any:
    """Return the sandbox: what transformers gives to templates but today's date, with which rows would change."""
    from jinja2 import nodes
    from jinja2.ext import Extension, LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class SaidBlocks(Extension):
        """Marks what a template says is the assistant's: `{% generation %} ... {% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012  # jinja2 declares a set

        def parse(self, parser: Any) -> Any:
            """Return a block that calls `_said`."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Callable[[], str]) -> str:
            return f"{SAID}{caller()}{SAID_END}"

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[SaidBlocks, LoopControlExtension]
    )
    found.globals["raise_exception"] = _refuse
    found.filters["tojson"] = _to_json
    return found


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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


def _spelt(special: list[str]) -> Callable[[Plain], Plain]:
    """Return what puts the special tokens that plain data spell out between two characters of our own."""
    longest_first = sorted(special, key=len, reverse=True)
    token = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelt(value: Plain) -> Plain:
        if isinstance(value, str):
            if OWN_USE.search(value):
                raise TemplateRefusal(
                    "it holds a character that Unicode keeps for programs' own use (U+FDD0 to U+FDD3)"
                )
            return token.sub(rf"{SPELT}\g<0>{SPELT_END}", value)
        if isinstance(value, Mapping):
            return {spelt(key): spelt(each) for key, each in value.items()}
        return [spelt(each) for each in value] if isinstance(value, list) else value

    return spelt


def _said(text: str) -> tuple[str, Spans]:
    """Return a text without the marks of what is the assistant's, and where that is."""
    found: list[str] = []
    spans, length, begun, depth = [], 0, 0, 0
    for piece in re.split(f"([{SAID}{SAID_END}])", text):
        if piece == SAID:
            begun, depth = (length if not depth else begun), depth + 1
        elif piece == SAID_END:
            depth -= 1
            if not depth:
                spans.append((begun, length))
        else:
            found.append(piece)
            length += len(piece)
    return "".join(found), spans


def _learnt(spans: Spans, conversation: Conversation) -> Spans:
    """Return those of what the assistant says that are learnt."""
    said = [at for at, message in enumerate(conversation.messages) if message["role"] == LEARNT_ROLE]
    if conversation.left_out.isdisjoint(said):
        return spans
    if len(spans) != len(said):
        raise TemplateRefusal("its generation blocks are not one for each of the assistant's messages, some of which "
                              "are not to be learnt")  # fmt: skip
    return [span for span, at in zip(spans, said, strict=True) if conversation.is_learnt(at)]


def _parts(text: str, spans: Spans) -> Iterator[TextPart]:
    """Yield a text's parts: those that count and those that do not, and special tokens that a message spells out."""
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    counted = {start for start, stop in spans if start < stop}
    plain, goes_on = False, False
    for start, stop in pairwise(edges):
        for piece in re.split(f"([{SPELT}{SPELT_END}])", text[start:stop]):
            if piece in (SPELT, SPELT_END):
                plain, goes_on = piece == SPELT, False
            elif piece:
                yield TextPart(piece, start in counted, mark=not plain, goes_on=goes_on and not plain)
                goes_on = not plain


def _said_or_nothing(render: Callable[[], str]) -> str | None:
    """Return what a template writes, None where it refuses to."""
    try:
        return _said(render())[0]
    except TemplateRefusal:
        return None

"""Built-in ways of writing a conversation: as lines, in ChatML, or as Llama 3 does.

ChatML writes tools and their calls as Hermes and Qwen 2.5 do; the others write none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from paceline.task.data.sources.tables.chat.messages import TOOL_ROLE, ChatMessage, Conversation
from paceline.task.data.sources.tables.chat.parts import TextPart

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class TemplateRefusal(Exception):
    """Says why a template does not write a conversation, in words of its own or in Python's."""


Template = Callable[[Conversation], list[TextPart]]


def plain(conversation: Conversation) -> list[TextPart]:
    """Return messages as lines: the role and a colon before each."""
    _refuse_tools(conversation, "plain")
    found = []
    for at, message in enumerate(conversation.messages):
        counted = conversation.is_learnt(at)
        found += [TextPart(f"{message['role']}: ", False), TextPart(f"{message['content']}\n", counted)]
    return found


def llama3(conversation: Conversation) -> list[TextPart]:
    """Return messages as Llama 3 writes them, from <|begin_of_text|> on."""
    _refuse_tools(conversation, "llama3")
    found = [TextPart("<|begin_of_text|>", False, mark=True)]
    for at, message in enumerate(conversation.messages):
        counted = conversation.is_learnt(at)
        found += [
            TextPart("<|start_header_id|>", False, mark=True), TextPart(message["role"], False),
            TextPart("<|end_header_id|>", False, mark=True), TextPart("\n\n", False),
            TextPart(message["content"], counted), TextPart("<|eot_id|>", counted, mark=True),
        ]  # fmt: skip
    return found


def chatml(conversation: Conversation) -> list[TextPart]:
    """Return messages in ChatML: <|im_start|>role, the content and the calls, <|im_end|>."""
    found = []
    for role, text, counted in _turns(conversation):
        found += [
            TextPart("<|im_start|>", False, mark=True), TextPart(f"{role}\n", False),
            TextPart(text, counted), TextPart("<|im_end|>", counted, mark=True), TextPart("\n", False),
        ]  # fmt: skip
    return found


def _turns(conversation: Conversation) -> Iterator[tuple[str, str, bool]]:
    """Yield roles and texts of ChatML, and whether they count.

    Tools stand beside what the system says, and answers of tools together, as the user's.
    """
    messages = list(enumerate(conversation.messages))
    if conversation.tools:
        system = messages.pop(0)[1]["content"] if messages[0][1]["role"] == "system" else ""
        told = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
        yield "system", f"{system}\n\n".lstrip("\n") + TOOLS_BEFORE + told + TOOLS_AFTER, False
    answers: list[str] = []
    for at, message in messages:
        if message["role"] == TOOL_ROLE:
            answers.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if answers:
            yield "user", "\n".join(answers), False
            answers = []
        text = "\n".join([*filter(None, [message.get("content")]), *map(_call, _calls(message))])
        yield message["role"], text, conversation.is_learnt(at)
    if answers:
        yield "user", "\n".join(answers), False


def _calls(message: ChatMessage) -> list[dict[str, object]]:
    return [call["function"] for call in message.get("tool_calls", ())]


def _call(function: dict[str, object]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'


def _refuse_tools(conversation: Conversation, name: str) -> None:
    what = "calls of tools" if conversation.calls() else "tools" if conversation.tools else ""
    if what:
        raise TemplateRefusal(f"the template '{name}' writes no {what}")


TEMPLATES: dict[str, Template] = {"plain": plain, "chatml": chatml, "llama3": llama3}

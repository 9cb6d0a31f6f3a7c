"""Messages of a row, whatever way of writing them was taken: OpenAI's, ShareGPT's, or columns of a single turn.

A message is a role and its content; an assistant's may call tools, in OpenAI's way whatever way they were written in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import DamagedData

LEARNT_ROLE = "assistant"
TOOL_ROLE = "tool"
CALL_ROLE = "function_call"  # ShareGPT's: what the assistant calls, as JSON
# As ShareGPT calls them, and OpenAI once did.
ROLES = {"human": "user", "gpt": LEARNT_ROLE, "chatgpt": LEARNT_ROLE, "bot": LEARNT_ROLE, "observation": TOOL_ROLE,
         "function": TOOL_ROLE, "function_response": TOOL_ROLE}  # fmt: skip
KEYS = (("role", "content"), ("from", "value"))  # OpenAI's, ShareGPT's
TOOLS_FIELD = "tools"
BESIDE = ("name", "tool_call_id")  # what a template may read of a message
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read, gpt-oss's the second
_FORM = 'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
LEAVE_OUT = 'on_bad = "skip", which leaves such rows out and counts them'
_CALL_FORM = '{"function": {"name": "...", "arguments": {...}}} for each call'
_TOOLS_FORM = 'a list such as [{"type": "function", "function": {"name": "...", "parameters": {...}}}]'
A_TEXT = f"a text in every row, or {LEAVE_OUT}"

Plain = Any  # plain data, as JSON has them
ChatMessage = Mapping[str, Plain]
Schema = Mapping[str, Plain]
Messages = Sequence[ChatMessage]


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and the tools that its assistant may call, as JSON schemas.

    `left_out` are the places of the assistant's messages of which nothing is learnt.
    """

    messages: Messages
    tools: Sequence[Schema] = ()
    left_out: frozenset[int] = frozenset()

    def is_learnt(self, at: int) -> bool:
        """Return whether the message at a place is one of the assistant's that is learnt."""
        return self.messages[at]["role"] == LEARNT_ROLE and at not in self.left_out

    def calls(self) -> list[str]:
        """Return the names of the functions that are called, in order."""
        return [call["function"]["name"] for message in self.messages for call in message.get("tool_calls", ())]

    def with_arguments_as_text(self) -> Conversation:
        """Return the same conversation, whose calls have their arguments as JSON."""
        messages: list[ChatMessage] = []
        for message in self.messages:
            found = dict(message)
            if calls := message.get("tool_calls"):
                texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
                found["tool_calls"] = [{**call, "function": {**call["function"], "arguments": text}}
                                       for call, text in zip(calls, texts, strict=True)]  # fmt: skip
            messages.append(found)
        return Conversation(messages, self.tools, self.left_out)


def turn_messages(values: Mapping[str, object], names: Sequence[str], where: str) -> Conversation:
    """Return columns of a single turn as messages: what is asked, perhaps with what it is about, and the answer."""
    asked, *about, answered = names
    told = [cell_text(values.get(name), where, name) for name in (asked, answered)]
    context = [cell_text(values.get(name) or "", where, name) for name in about]  # it may be missing
    question = "\n\n".join(part for part in (told[0], *context) if part)
    messages: list[ChatMessage] = [{"role": "user", "content": question}, {"role": LEARNT_ROLE, "content": told[1]}]
    return _with_something_to_learn(Conversation(messages), where)


def messages_of(value: object, where: str, field: str, tools: object = None, begins: int = 0) -> Conversation:
    """Return a row's messages, and its tools. Raises DamagedData where they are none, or no assistant speaks.

    Of the messages before the one at `begins` nothing is learnt, nor of those whose `weight` is 0.
    """
    value = _from_json(value, where, field, _FORM)
    if not isinstance(value, list) or not value:
        raise DamagedData(f"{where} has no messages", f"'{field}' holds {json.dumps(value, default=str)[:40]}", _FORM)
    messages = [_message(each, where) for each in value]
    left_out = frozenset(at for at, each in enumerate(value) if at < begins or not _counts(each, where))
    return _with_something_to_learn(Conversation(messages, _tools(tools, where), left_out), where)


def completed_messages(prompt: object, completion: list[object], where: str, tools: object = None) -> Conversation:
    """Return a prompt's messages and those that complete them, of which alone is learnt; a text is the user's."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(before, list):
        raise DamagedData(f"{where} has messages that complete nothing",
                          f"its prompt is {json.dumps(prompt, default=str)[:40]}", _FORM)  # fmt: skip
    return messages_of([*before, *completion], where, "completion", tools, len(before))


def _counts(given: object, where: str) -> bool:
    """Return whether a message's `weight`, which OpenAI has for the assistant's, is not 0."""
    weight = given.get("weight") if isinstance(given, Mapping) else None
    if weight not in (None, 0, 1):
        raise DamagedData(f"{where} holds a message of the weight {json.dumps(weight, default=str)[:20]}",
                          "a message is learnt or it is not", "a weight of 0 or of 1")  # fmt: skip
    return weight != 0


def _from_json(value: object, where: str, field: str, form: str) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DamagedData(f"{where}: '{field}' is not JSON", str(error), form) from error


def _message(given: object, where: str) -> ChatMessage:
    """Return a message as its role, its content and its calls."""
    if isinstance(given, Mapping):
        for role_key, content_key in KEYS:
            role = given.get(role_key)
            if not isinstance(role, str):
                continue
            if role == CALL_ROLE:  # the content is the call
                return {"role": LEARNT_ROLE, "content": "",
                        "tool_calls": _calls(given.get(content_key), where)}  # fmt: skip
            content = _content(given.get(content_key), where)
            called = given.get("tool_calls") or given.get("function_call")
            if content is not None or (called and ROLES.get(role, role) == LEARNT_ROLE):
                found: dict[str, object] = {"role": ROLES.get(role, role)}
                found |= {} if content is None else {"content": content}
                found |= {"tool_calls": _calls(called, where)} if called else {}
                return found | _beside(given)
    raise DamagedData(
        f"{where} holds a message without role and content", f"it is {json.dumps(given, default=str)[:60]}", _FORM
    )


def _beside(given: Mapping[str, object]) -> dict[str, str]:
    found = {name: value for name in BESIDE if isinstance(value := given.get(name), str)}
    thought = next((value for name in REASONING if isinstance(value := given.get(name), str)), None)
    return found if thought is None else {**found, **dict.fromkeys(REASONING[:2], thought)}


def _calls(given: object, where: str) -> list[ChatMessage]:
    """Return calls of tools as OpenAI writes them, with arguments that are read from JSON."""
    given = _from_json(given, where, "tool_calls", _CALL_FORM)
    found: list[ChatMessage] = []
    for each in given if isinstance(given, list) else [given]:
        inner = each.get("function") if isinstance(each, Mapping) else None
        function = inner if isinstance(inner, Mapping) else each
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            raise DamagedData(f"{where} calls a tool without a name", f"it is {json.dumps(each, default=str)[:60]}",
                              _CALL_FORM)  # fmt: skip
        arguments = _from_json(function.get("arguments") or {}, where, f"arguments of {name}", _CALL_FORM)
        if not isinstance(arguments, Mapping):
            raise DamagedData(f"{where} calls '{name}' with arguments that have no names",
                              f"they are {json.dumps(arguments, default=str)[:40]}", _CALL_FORM)  # fmt: skip
        number = each.get("id") if isinstance(each, Mapping) else None
        call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        found.append({"id": number, **call} if isinstance(number, str) else call)
    return found


def _tools(given: object, where: str) -> Sequence[Schema]:
    """Return the tools of a row: none, a list of schemas, or such a list as JSON."""
    given = _from_json(given or [], where, TOOLS_FIELD, _TOOLS_FORM)
    if not isinstance(given, list) or not all(isinstance(each, Mapping) and name_of_tool(each) for each in given):
        told = f"'{TOOLS_FIELD}' holds {json.dumps(given, default=str)[:60]}"
        raise DamagedData(f"{where} has tools that are no list of schemas", told, _TOOLS_FORM)
    return given


def name_of_tool(schema: Schema) -> str:
    """Return what a tool is called by, "" where its schema does not say."""
    inner = schema.get("function")
    name = (inner if isinstance(inner, Mapping) else schema).get("name")
    return name if isinstance(name, str) else ""


def without_nulls(value: Plain) -> Plain:
    """Return plain data without fields that hold nothing: Arrow writes them where other rows have such a field."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _content(given: object, where: str) -> str | None:
    """Return a message's content as text, None where it is none. Raises DamagedData for parts that are no text."""
    if not isinstance(given, list) or not given:
        return given if isinstance(given, str) else None
    for part in given:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            told = f"it is of the type '{kind}'" if kind else json.dumps(part, default=str)[:40]
            raise DamagedData(f"{where} holds a message with a part that is no text", told, LEAVE_OUT)
    return "".join(part["text"] for part in given)


def _with_something_to_learn(found: Conversation, where: str) -> Conversation:
    learnt = [message for at, message in enumerate(found.messages) if found.is_learnt(at)]
    if not any(message.get("content") or message.get("tool_calls") for message in learnt):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in found.messages))
        because = f"no message is the {LEARNT_ROLE}'s: roles are {roles}"
        if LEARNT_ROLE in roles:
            because = f"what the {LEARNT_ROLE} says is empty" + (", or is not to be learnt" if found.left_out else "")
        raise DamagedData(f"{where} has nothing to learn", because, _FORM)
    return found


def cell_text(value: object, where: str, name: str) -> str:
    """Return a column of a row as text. Raises DamagedData where it is none."""
    if not isinstance(value, str):
        raise DamagedData(f"{where}: '{name}' is not text", f"it is {json.dumps(value, default=str)[:40]}",
                          A_TEXT)  # fmt: skip
    return value

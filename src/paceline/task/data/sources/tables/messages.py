"""Messages of a row, whatever way of writing them was taken: OpenAI's, ShareGPT's, or columns of a single turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from paceline.errors import DamagedData

LEARNT_ROLE = "assistant"
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}  # as ShareGPT calls them
KEYS = (("role", "content"), ("from", "value"))  # OpenAI's, ShareGPT's
_FORM = 'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
LEAVE_OUT = 'on_bad = "skip", which leaves such rows out and counts them'
TOOLS = f"calls written out as the model is to write them, in the message's content; or {LEAVE_OUT}"
A_TEXT = f"a text in every row, or {LEAVE_OUT}"


def turn_messages(values: Mapping[str, object], names: Sequence[str], where: str) -> list[dict[str, str]]:
    """Return columns of a single turn as messages: what is asked, perhaps with what it is about, and the answer."""
    asked, *about, answered = names
    told = [_cell(values.get(name), where, name) for name in (asked, answered)]
    context = [_cell(values.get(name) or "", where, name) for name in about]  # it may be missing
    question = "\n\n".join(part for part in (told[0], *context) if part)
    return _with_something_to_learn(
        [{"role": "user", "content": question}, {"role": LEARNT_ROLE, "content": told[1]}], where
    )


def messages_of(value: object, where: str, field: str) -> list[dict[str, str]]:
    """Return a row's messages. Raises DamagedData where they are none, or no assistant speaks."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DamagedData(f"{where}: '{field}' is not JSON", str(error), _FORM) from error
    if not isinstance(value, list) or not value:
        raise DamagedData(f"{where} has no messages", f"'{field}' holds {json.dumps(value, default=str)[:40]}", _FORM)
    return _with_something_to_learn([_message(each, where) for each in value], where)


def _message(given: object, where: str) -> dict[str, str]:
    """Return a message as its role and its content."""
    if isinstance(given, Mapping):
        for role_key, content_key in KEYS:
            role, content = given.get(role_key), _content(given.get(content_key), where)
            if isinstance(role, str) and content is not None:
                return {"role": ROLES.get(role, role), "content": content}
        if given.get("tool_calls") or given.get("function_call"):
            raise DamagedData(f"{where} calls a tool", "no template here writes calls", TOOLS)
    raise DamagedData(
        f"{where} holds a message without role and content", f"it is {json.dumps(given, default=str)[:60]}", _FORM
    )


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


def _with_something_to_learn(messages: list[dict[str, str]], where: str) -> list[dict[str, str]]:
    if not any(message["role"] == LEARNT_ROLE and message["content"] for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        because = f"no message is the {LEARNT_ROLE}'s: roles are {roles}"
        if LEARNT_ROLE in roles:
            because = f"what the {LEARNT_ROLE} says is empty"
        raise DamagedData(f"{where} has nothing to learn", because, _FORM)
    return messages


def _cell(value: object, where: str, name: str) -> str:
    """Return a column of a turn as text. Raises DamagedData where it is none."""
    if not isinstance(value, str):
        raise DamagedData(f"{where}: '{name}' is not text", f"it is {json.dumps(value, default=str)[:40]}",
                          A_TEXT)  # fmt: skip
    return value

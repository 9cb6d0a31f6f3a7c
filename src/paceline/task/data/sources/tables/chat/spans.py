"""What of a rendered conversation the assistant says, where a template does not mark it itself.

A template is asked to write what stands before each of the assistant's messages, and then that message too: what is
new is the assistant's. What it writes of a message may be less once others follow it (Qwen 3 leaves thoughts out), so
each is looked for behind the one before it, from where on it is still as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from paceline.task.data.sources.tables.chat.messages import LEARNT_ROLE, REASONING, ChatMessage, Messages
from paceline.task.data.sources.tables.chat.templates import TemplateRefusal

Render = Callable[[Messages, bool], str]  # the messages, and whether the beginning of an answer follows them
Spans = list[tuple[int, int]]
NOT_SAID = "\ufdd4"  # one more that Unicode has for programs' own use


def said_by_assistant(render: Render, messages: Messages) -> tuple[str, Spans]:
    """Return what a template writes up to the assistant's last message, and what of it is the assistant's.

    Raises TemplateRefusal where that cannot be told.
    """
    gaps: list[str] = []  # before each of the assistant's messages
    tails: list[str] = []  # each of them, as it is written as the last one
    keys: list[str] = []  # what must be left of it when others follow
    text = ""
    for at, message in enumerate(messages):
        if message["role"] != LEARNT_ROLE:
            continue
        prompt, text = render(messages[:at], True), render(messages[: at + 1], False)
        done = _found(prompt, gaps, tails, keys)
        end = done[-1][1] if done else 0
        begun = _as_far_as_alike(prompt, text)  # an answer may begin before the end of what asks for it
        if begun != prompt:
            begun = _as_far_as_alike(begun, _of_other_words(render, messages[:at], message, begun))
            if len(begun) <= end or not begun.startswith(render(messages[:at], False)):
                raise _rewritten()
        gaps.append(begun[end:])
        tails.append(text[len(begun) :])
        keys.append(_last_words(message))
    return text, _found(text, gaps, tails, keys)


def _found(text: str, gaps: Sequence[str], tails: Sequence[str], keys: Sequence[str]) -> Spans:
    """Return where the assistant's messages are in a text. Raises TemplateRefusal where one is not to be found."""
    spans, at = [], 0
    for gap, tail, key in zip(gaps, tails, keys, strict=True):
        if not text.startswith(gap, at):
            raise _rewritten()
        at += len(gap)
        last = max(tail.rfind(key), 0)
        head = text[at : at + len(tail) - last]  # of what is left at least
        begins = tail.find(head)
        while 0 <= begins <= last and not text.startswith(tail[begins:], at):
            begins = tail.find(head, begins + 1)
        if not 0 <= begins <= last:
            raise _rewritten()
        spans.append((at, at := at + len(tail) - begins))
    return spans


def _as_far_as_alike(one: str, other: str) -> str:
    if other.startswith(one):
        return one
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _of_other_words(render: Render, before: Messages, message: ChatMessage, otherwise: str) -> str:
    """Return what is written where the message says something else, or `otherwise` where the template refuses to.

    Where what asks for an answer goes on with `<think>`, an answer that begins with `<b>` shares a character with that.
    """
    other = {"role": LEARNT_ROLE, "content": NOT_SAID}
    other |= dict.fromkeys((name for name in REASONING if message.get(name)), NOT_SAID)
    try:
        return render([*before, other], False)
    except TemplateRefusal:
        return otherwise


def _last_words(message: ChatMessage) -> str:
    """Return the last word of what a message says: the name of the last call, else of its content."""
    if calls := message.get("tool_calls"):
        return str(calls[-1]["function"]["name"])
    return (str(message.get("content") or "").split() or [""])[-1]


def _rewritten() -> TemplateRefusal:
    return TemplateRefusal("it rewrites what it wrote before, so which tokens are the assistant's cannot be told")

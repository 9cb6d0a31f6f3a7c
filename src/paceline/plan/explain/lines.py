"""Lines of at most 100 columns, for people."""

from __future__ import annotations

import textwrap

WIDTH = 100


def wrap(head: str, text: str, hanging: int | None = None) -> list[str]:
    """Return `head` and `text` in lines of at most 100 columns; nothing is cut off.

    Lines after the first are indented by `hanging`, None for the width of `head`.
    """
    indent = " " * (len(head) if hanging is None else hanging)
    wrapped = textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return wrapped or [head.rstrip()]

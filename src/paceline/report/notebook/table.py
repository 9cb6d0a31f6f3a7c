"""A run's result where a notebook shows it: a small table in plain HTML, that needs no style sheet and no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

CELL = 'style="text-align:left;padding:2px 12px 2px 0"'


def inline_html(title: str, lines: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a title, lines of text and a table, every word of them escaped."""
    parts = [f"<b>{escape(title)}</b>", *(f"<div>{escape(line)}</div>" for line in lines)]
    if rows:
        cells = [_row("th", head), *(_row("td", row) for row in rows)]
        parts.append(f'<table style="border-collapse:collapse">{"".join(cells)}</table>')
    return f'<div style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag} {CELL}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

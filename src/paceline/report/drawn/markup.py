"""Pieces of HTML that a run's page and the live page are made of. Every value is escaped here, in `esc`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from paceline.report.format import quantity, signed_percent


def esc(value: object) -> str:
    """Return the value as escaped text."""
    return escape(str(value), quote=True)


def tag(words: str) -> str:
    """Return a small tag, such as a figure's source; nothing for no words."""
    return f'<span class="tag">{esc(words)}</span>' if words else ""


def note_html(words: str) -> str:
    """Return a remark in small print; nothing for no words."""
    return f'<div class="note">{esc(words)}</div>' if words else ""


def pill(style: str, words: str) -> str:
    """Return a coloured word."""
    return f'<span class="pill {style}">{esc(words)}</span>'


def section(title: str, *parts: str) -> str:
    """Return a titled section, or nothing where all parts are empty."""
    body = "".join(parts)
    return f"<section><h2>{esc(title)}</h2>{body}</section>" if body else ""


def listing(rows: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of escaped rows, without those that say nothing."""
    items = "".join(f"<dt>{esc(name)}</dt><dd>{esc(value)}</dd>" for name, value in rows if value)
    return f"<dl>{items}</dl>" if items else ""


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Return a table of cells that are HTML already; `numeric` columns are aligned right."""
    if not rows:
        return ""
    style = [' class="n"' if index in numeric else "" for index in range(len(head))]
    top = "".join(f'<th scope="col"{style[i]}>{esc(cell)}</th>' for i, cell in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{style[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def shown(value: object) -> str:
    """Return a journal value for people: text as it is, an object as its pairs, the rest as JSON, numbers short."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(item) or 'none'}" for name, item in value.items())
    return "" if value is None else json.dumps(_shortened(value), ensure_ascii=False)


def _shortened(value: object) -> object:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.4g}")
    return value


def known(value: float | None, unit: str) -> str:
    """Return a quantity for a table; a dash where there is none."""
    return "–" if value is None else quantity(value, unit)


def difference(error: float | None) -> str:
    """Return a relative difference for a table; a dash where there is none."""
    return "–" if error is None else signed_percent(error)

"""Pictures as SVG text: elements, words and whole pictures, escaped, without a script or an outside resource.

Attributes are keywords: `text_anchor` is text-anchor, `style` is the element's class; empty ones are left out.
Fractions are written with one decimal: a tenth of a pixel is less than an eye tells apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Value = float | str


def element(tag: str, inside: str = "", **attributes: Value) -> str:
    """Return an element: `inside` is SVG already, attributes are plain words and pixels."""
    written = [f' {_NAMES.get(name, name)}="{escape(_plain(value))}"' for name, value in attributes.items()
               if value != ""]  # fmt: skip
    return f"<{tag}{''.join(written)}" + (f">{inside}</{tag}>" if inside else "/>")


_NAMES = {"style": "class", "text_anchor": "text-anchor"}


def _plain(value: Value) -> str:
    return f"{value:.1f}" if isinstance(value, float) else f"{value}"


def tip(words: str) -> str:
    """Return what shows when the element around it is hovered; nothing for no words."""
    return f"<title>{escape(words)}</title>" if words else ""


def text(x: Value, y: Value, words: str, style: str = "", anchor: str = "") -> str:
    """Return words that begin at x, or end or have their middle there as `anchor` says; y is their base line."""
    return element("text", escape(words), x=x, y=y, style=style, text_anchor=anchor)


def rule(x1: Value, y1: Value, x2: Value, y2: Value, style: str) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, style=style)


def box(x: Value, y: Value, width: Value, height: Value, style: str = "", words: str = "", **more: Value) -> str:
    """Return a rectangle with what it says when hovered."""
    return element("rect", tip(words), x=x, y=y, width=width, height=height, **more, style=style)


def dot(x: Value, y: Value, radius: Value, style: str, words: str = "") -> str:
    """Return a circle with what it says when hovered."""
    return element("circle", tip(words), cx=x, cy=y, r=radius, style=style)


def curve(points: Iterable[tuple[float, float]], style: str) -> str:
    """Return straight lines from point to point."""
    return element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), style=style)


def picture(
    width: float,
    height: float,
    label: str,
    parts: Iterable[str],
    *,
    name: str = "",
    rules: str = "",
    alone: bool = True,
    fixed: bool = False,
) -> str:
    """Return a picture of so many pixels that says in words, `label`, what it shows.

    `rules` are its style sheet and `name` its class. A file that stands `alone` needs the format's name space, a
    picture inside a page does not; a `fixed` picture is not stretched to the width of what holds it.
    """
    space = ' xmlns="http://www.w3.org/2000/svg"' if alone else ""
    shown = f' width="{width:g}"' if fixed else ""
    named = f' class="{name}"' if name else ""
    sheet = f"<style>{rules}</style>" if rules else ""
    return (
        f'<svg{space} viewBox="0 0 {width:g} {height:.0f}"{shown}{named} role="img" aria-label="{escape(label)}">'
        f"{sheet}{''.join(parts)}</svg>"
    )

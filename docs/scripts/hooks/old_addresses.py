"""Keeps addresses of the site that pages have had before: a hook of mkdocs, called when the site is built.

The guide's pages had one folder until 2026-11-27. Whoever has kept a link to one is led to where the page is now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

GUIDE = Path(__file__).parents[2] / "guide"
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{to}">
<meta http-equiv="refresh" content="0; url={to}">
<p>This page is <a href="{to}">here</a> now.</p>
"""


def moved() -> dict[str, str]:
    """Return old addresses of the guide's pages with those of today, both below guide/."""
    return {path.stem: f"{path.parent.name}/{path.stem}" for path in sorted(GUIDE.glob("*/*.md"))}


def on_post_build(config: Mapping[str, Any]) -> None:
    """Write a page that leads on at each old address."""
    for old, new in moved().items():
        folder = Path(config["site_dir"]) / "guide" / old
        folder.mkdir(parents=True)  # where a page of today has that address this raises: both cannot be there
        (folder / "index.html").write_text(PAGE.format(to=f"../{new}/"), encoding="utf-8")

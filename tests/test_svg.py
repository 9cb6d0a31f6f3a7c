"""The one writer of SVG: what it writes is well-formed, escaped, and the same for every picture."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import paceline
from paceline import svg


def test_pictures_are_well_formed_and_escaped():
    parts = [svg.text(1, 2.25, "a < b & c", "end", "middle"), svg.dot(1, 2, 3.5, "some", 'a "tip"'),
             svg.curve([(0, 1), (2, 3.14)], "line"), svg.box(0, 0, 4, 5, fill="#fff")]  # fmt: skip
    root = ElementTree.fromstring(
        svg.picture(10, 20, "x & y", parts, name="chart", rules=".end{fill:#000}", fixed=True)
    )
    assert root.attrib["aria-label"] == "x & y" and root.attrib["viewBox"] == "0 0 10 20"
    _, words, dot, curve, box = root
    assert words.text == "a < b & c" and words.attrib == {"x": "1", "y": "2.2", "class": "end", "text-anchor": "middle"}
    assert dot[0].text == 'a "tip"' and curve.attrib["d"] == "M0.0 1.0L2.0 3.1" and "class" not in box.attrib
    assert "xmlns" not in svg.picture(1, 1, "inside a page", [], alone=False)


def test_nobody_else_writes_elements():
    elements = re.compile(r"<(svg|rect|line|circle|polyline|path)[ >{]")
    files = [path for path in Path(paceline.__file__).parent.rglob("*.py") if path.name != "svg.py"]
    assert [str(path) for path in files if elements.search(path.read_text(encoding="utf-8"))] == []

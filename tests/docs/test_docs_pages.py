"""The reference pages that are written from the code are current, and the pages link to what is there."""

from __future__ import annotations

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.cluster.catalog.devices import read_catalog
from paceline.spec.load import table
from paceline.units import parse_bytes, parse_seconds
from paceline.verify.compare.tolerance import TOLERANCES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WRITTEN = script("write_reference").pages()


@pytest.mark.parametrize("name", WRITTEN)
def test_written_pages_are_current(name: str) -> None:
    on_disk = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert on_disk == WRITTEN[name], "run: python docs/scripts/write_reference.py"


def test_every_option_is_in_the_reference_with_its_documentation() -> None:
    page = WRITTEN["spec.md"]
    for key, option in table().options():
        assert option.doc, f"{'.'.join(key)} has no documentation"
        assert f"| `{key[-1]}` |" in page


def test_sizes_and_durations_of_the_reference_are_written_as_people_read_them() -> None:
    """`107374182400` says nothing to a reader; `"100 GiB"` is what a file may hold, and the same number."""
    shown = {(name, default) for name, default in re.findall(
        r'^\| `(\w+)` \| (?:size|duration), [^|]* \| `"?([^"`]+)"?` \|', WRITTEN["spec.md"], re.M)}  # fmt: skip
    held = {(key[-1], option.default, option.kind) for key, option in table().options()
            if option.kind in ("bytes", "duration") and option.default is not None}  # fmt: skip
    read = {"bytes": parse_bytes, "duration": parse_seconds}
    assert len(held) > 20
    for name, default, kind in held:
        told = [text for other, text in shown if other == name and text != "0"]
        assert not default or default in [read[kind](text) for text in told], (name, default, told)
    assert not [text for _, text in shown if len(text.split()[0]) > 4]


def test_the_reference_of_the_python_interface_names_all_of_it() -> None:
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    assert [name for name in paceline.__all__ if f"`{name}" not in page] == []


def test_the_reference_shows_the_arguments_that_functions_take() -> None:
    page = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^### `(\w+)\((.*)\)`$", page, flags=re.M))
    for name, arguments in shown.items():
        taken = [each for each in inspect.signature(getattr(paceline, name)).parameters.values() if each.name != "self"]
        defaults = {each.name: each.default for each in taken if each.default is not inspect.Parameter.empty}
        assert re.findall(r"(?:^|, )(\w+)", arguments) == [each.name for each in taken], name
        assert eval(f"dict({', '.join(part for part in arguments.split(', ') if '=' in part)})") == defaults, name
    assert {"Run", "fit", "plan", "simulate", "verify", "backtest", "report", "bill", "load_run", "verify_loop"} <= set(
        shown
    )


def test_the_guide_shows_the_tolerances_that_are_applied() -> None:
    page = (DOCS / "guide" / "plan" / "verifying.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([\w ]+)` \| [^|]* \| (\S+) \| (\S+) \|$", page, flags=re.M)
    assert shown == [(name, f"{limits['fp32']:g}", f"{limits['fp64']:g}") for name, limits in TOLERANCES.items()]


def test_the_guide_lists_the_whole_catalog() -> None:
    page = (DOCS / "guide" / "plan" / "planning.md").read_text(encoding="utf-8")
    assert [name for name in read_catalog() if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_the_pages_for_newcomers_name_every_extra_and_count_the_tutorials() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    own = {"test", "lint", "docs", "mutants", "bench"}  # of whoever works on Paceline
    page = (DOCS / "guide" / "getting-started.md").read_text(encoding="utf-8")
    rows = page.partition("| extras | for |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name for row in rows for name in re.findall("`(.+?)`", row.split("|")[1])} == set(extras) - own
    (all_of_them,) = (set(re.findall("`(.+?)`", row.split("|")[2])) for row in rows if "`all`" in row)
    assert all_of_them == set(extras["all"][0].partition("[")[2].rstrip("]").split(","))
    brings = [re.split("[><=]", name)[0] for name in project["dependencies"]]
    assert f"It brings {', '.join(brings[:-1])} and {brings[-1]}" in page
    tutorials = len(list((DOCS / "tutorials").rglob("*.md")))
    assert f"[Tutorials](docs/index.md#tutorials): {tutorials}," in (ROOT / "README.md").read_text(encoding="utf-8")


LONGEST_CHANGELOG = 250  # lines: it had 1,250 of what was mended on the way, which no user reads


def test_the_changelog_is_short_and_says_a_thing_under_one_heading() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert len(lines) <= LONGEST_CHANGELOG, "fold the lines of `Newest` into what stands below"
    assert "### Newest" in headings and len(set(headings)) == len(headings)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed


def test_addresses_that_pages_of_the_guide_have_had_lead_to_them(tmp_path: Path) -> None:
    hook = script("hooks/old_addresses")
    assert hook.moved()["verifying"] == "plan/verifying" and len(hook.moved()) == 27
    hook.on_post_build({"site_dir": str(tmp_path)})
    for page in (tmp_path / "guide").rglob("index.html"):
        (to,) = set(re.findall(r'(?:href="|url=)([^"]+)', page.read_text(encoding="utf-8")))
        led = (page.parent / to).resolve().relative_to(tmp_path.resolve())
        assert (DOCS / led).with_suffix(".md").is_file()
        assert not (DOCS / page.parent.relative_to(tmp_path)).with_suffix(".md").exists()

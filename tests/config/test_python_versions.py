"""What Python 3.12 to 3.14 took away or changed, and no file of the package relies on: seen without these versions."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import paceline

ROOT = Path(paceline.__file__).parent
# Modules that are gone: of 3.12 (PEP 632, PEP 594's first), of 3.13 (PEP 594) and of 3.14.
GONE = {
    "asynchat", "asyncore", "distutils", "imp", "smtpd", "aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr",
    "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib",
    "uu", "xdrlib",
}  # fmt: skip
# Names of modules that are gone, or that warn since 3.12.
GONE_NAMES = {
    ("ast", name) for name in ("Num", "Str", "Bytes", "NameConstant", "Ellipsis")
} | {
    ("typing", "io"), ("typing", "re"), ("typing", "ByteString"), ("pkgutil", "find_loader"), ("pkgutil", "get_loader"),
    ("pkgutil", "ImpImporter"), ("locale", "getdefaultlocale"), ("locale", "resetlocale"), ("sqlite3", "version"),
    ("asyncio", "get_event_loop_policy"), ("asyncio", "set_event_loop_policy"), ("datetime", "utcnow"),
    ("datetime", "utcfromtimestamp"), ("importlib", "find_loader"), ("configparser", "SafeConfigParser"),
    ("unittest", "makeSuite"), ("urllib", "URLopener"), ("request", "FancyURLopener"), ("inspect", "getargspec"),
    ("shutil", "onerror"), ("os", "tmpnam"), ("tempfile", "mktemp"),
}  # fmt: skip
LOOPS = (ast.For, ast.While, ast.AsyncFor)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def leavers(body: list[ast.stmt], in_loop: bool = False) -> Iterator[ast.stmt]:
    """Yield what leaves a `finally` by itself: `return`, and `break` and `continue` of a loop around it (PEP 765)."""
    for node in body:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
            yield node
        elif not isinstance(node, SCOPES):
            inner = [child for child in ast.walk(node) if child is not node and isinstance(child, ast.stmt)]
            direct = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            if inner:
                yield from leavers(direct, in_loop or isinstance(node, LOOPS))
            for handler in getattr(node, "handlers", ()):
                yield from leavers(handler.body, in_loop)


def findings(text: str, name: str = "mine.py") -> list[str]:
    """Return what of a file's text would not run, would warn, or would do something else on a later Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an escape that is none is a SyntaxWarning from 3.12 on
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            return [f"{name}:{error.lineno}: {error.msg}"]
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            taken = [(node.module.rpartition(".")[2], alias.name) for alias in node.names]
            found += [f"{name}:{node.lineno}: {one}.{what}" for one, what in taken if (one, what) in GONE_NAMES]
        found += [f"{name}:{node.lineno}: import {each}" for each in names if each.partition(".")[0] in GONE]
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if (owner, node.attr) in GONE_NAMES:
                found.append(f"{name}:{node.lineno}: {owner}.{node.attr}")
            if node.attr in ("__annotations__", "__annotate__"):  # made when asked for since 3.14 (PEP 649)
                found.append(f"{name}:{node.lineno}: {node.attr}, where typing.get_type_hints is meant")
        if isinstance(node, ast.Constant) and node.value == "__annotations__":
            found.append(f"{name}:{node.lineno}: '__annotations__' of a namespace, which has none since 3.14")
        if isinstance(node, ast.Try):
            found += [f"{name}:{each.lineno}: {type(each).__name__.lower()} in a finally"
                      for each in leavers(node.finalbody)]  # fmt: skip
        if isinstance(node, ast.Call):
            found += [f"{name}:{node.lineno}: {why}" for why in calls(node)]
    return found


def calls(node: ast.Call) -> Iterator[str]:
    """Yield what a call leaves to a default that has changed: how processes start, what an archive may write."""
    called = ast.unparse(node.func)
    given = {keyword.arg for keyword in node.keywords}
    by_default = "mp_context" not in given and len(node.args) < 2
    if called in ("multiprocessing.Process", "multiprocessing.Pool", "ProcessPoolExecutor") and by_default:
        yield f"{called} starts processes by the platform's method, which is forkserver since 3.14"
    if called.endswith((".extractall", ".extract")) and "filter" not in given:
        yield f"{called} without a filter, whose default changed in 3.14"
    if called == "shutil.rmtree" and "onerror" in given:
        yield "shutil.rmtree's onerror is deprecated since 3.12"


def test_what_is_looked_for_is_found() -> None:
    wrong = [
        "import distutils.util",
        "from cgi import escape",
        "import datetime\ndatetime.datetime.utcnow()",
        "from typing import ByteString",
        "def f():\n    try:\n        g()\n    finally:\n        return 1",
        "for x in y:\n    try:\n        g()\n    finally:\n        if x:\n            break",
        "for x in y:\n    try:\n        g()\n    finally:\n        with x:\n            continue",
        "class A:\n    b = A.__annotations__",
        "x = '\\d'",
        "import shutil\nshutil.rmtree(p, onerror=f)",
        "import multiprocessing\nmultiprocessing.Process(target=f)",
        "archive.extractall(path)",
    ]
    assert [text for text in wrong if not findings(text)] == []
    right = "try:\n    g()\nfinally:\n    for x in y:\n        break\n    def f():\n        return 1\n"
    assert findings(right) == []


def test_no_file_relies_on_what_later_pythons_took_away() -> None:
    found = [line for path in sorted(ROOT.rglob("*.py")) for line in findings(path.read_text("utf-8"), path.name)]
    assert found == []

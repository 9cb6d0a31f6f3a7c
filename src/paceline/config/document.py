"""A TOML file as values and the line of every key.

The standard library's parser keeps no positions, so the lines of keys are found here.
"""

from __future__ import annotations

import pkgutil
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, suggestion

KeyPath = tuple[str, ...]
MAX_BYTES = 1 << 20  # a spec is a page of text; more is some other file given by mistake

# Strings, comments, line ends and punctuation; anything else is part of a key or of a plain value.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")|' r"'''.*?'{3,5}(?!')|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'|"
    r"#[^\n]*|\n|[\[\]{}=]|[^\"'#\n\[\]{}=]+",
    re.DOTALL,
)  # fmt: skip


@dataclass(frozen=True)
class TomlDocument:
    """A parsed file: its nested values, and the line on which each key stands.

    A table of a list has its number as a part of its keys: ("task", "data", "mixture", "2", "weight").
    """

    name: str
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int]

    def where(self, key: KeyPath) -> str:
        """Return "file:line" of the key, or of the nearest table around it that has a line of its own."""
        while key and key not in self.lines:
            key = key[:-1]
        return f"{self.name}:{self.lines[key]}" if key else self.name


def packaged_toml(package: str, name: str) -> dict[str, Any]:
    """Return the values of a TOML file that came with a package of ours.

    By the package's loader alone: `importlib.resources` loads archives and temporary files, a 40th of a second plan.
    """
    content = pkgutil.get_data(package, name)
    assert content is not None  # a loader that has no files has no package of ours
    return tomllib.loads(content.decode("utf-8"))


def read_document(path: str | Path) -> TomlDocument:
    """Return the TOML file's values and lines. Raises ConfigError for whatever is not a readable TOML file."""
    return parse_document(_read_text(path), str(path))


def parse_document(text: str, name: str) -> TomlDocument:
    """Return the values and lines of TOML text; `name` stands for the file in messages."""
    try:
        values = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: cannot be read as TOML", "brackets are nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and plain ValueError for numbers of thousands of digits
        message, _, place = str(error).partition(" (at ")
        if said := _of_another_kind(name):
            raise ConfigError(f"'{name}' is not a spec file", *said) from error
        found = re.match(r"line (\d+), column (\d+)", place)
        line = int(found.group(1)) if found else text.count("\n") + 1
        because, fix = _twice(message) or (message[:200], _toml_hint(text, line))
        raise ConfigError(f"{name}:{line}: cannot be read as TOML", because, fix) from error
    return TomlDocument(name, values, key_lines(text))


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the 1-based line of every key and table header in valid TOML text."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}  # tables of every list so far
    table: KeyPath = ()
    key, depth, in_value, line = "", 0, False, 1
    for token in _TOKEN.findall(text + "\n"):
        if token == "\n" and depth == 0:
            if not in_value and key.strip():
                header = key.strip()
                is_list = header.startswith("[[")
                table = _numbered(_parts(header[2:-2] if is_list else header[1:-1]), counts)
                lines.setdefault(table, line)
                if is_list:
                    counts[table] = counts.get(table, 0) + 1
                    table = (*table, str(counts[table]))
                    lines[table] = line
            key, in_value = "", False
        elif in_value:
            depth += (token in ("[", "{")) - (token in ("]", "}"))
        elif token == "=":
            lines.setdefault(table + _parts(key), line)
            in_value = True
        elif not token.startswith("#"):
            key += token
        line += token.count("\n")
    return lines


def _numbered(key: KeyPath, counts: Mapping[KeyPath, int]) -> KeyPath:
    """Return the key with the number of the last table after every list on the way to it."""
    path: KeyPath = ()
    for part in key:
        path = (*path, str(counts[path]), part) if path in counts else (*path, part)
    return path


def _parts(key: str) -> KeyPath:
    """Return the parts of a dotted key, quotes resolved by the TOML parser itself."""
    parts: list[str] = []
    nested: object = tomllib.loads(f"{key} = 0")
    while isinstance(nested, dict):
        ((part, nested),) = nested.items()
        parts.append(part)
    return tuple(parts)


def _read_text(path: str | Path) -> str:
    file = Path(path)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        if file.is_symlink():
            because = f"it is a link to {file.readlink()}, which is not there"
            raise ConfigError(f"there is no file '{path}'", because, "mend the link") from error
        raise ConfigError(f"there is no file '{path}'", "a spec file was expected there", _near(file)) from error
    except IsADirectoryError as error:
        raise ConfigError(f"'{path}' is a folder", "a spec file was expected there", _near(file / "?")) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"cannot read '{path}'", str(error), "check the path and its permissions") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"'{path}' is not a spec file", f"it is larger than {MAX_BYTES} bytes", "give a TOML file")
    if b"\0" in raw:
        raise ConfigError(f"'{path}' is not a spec file", "it is a binary file", "give a TOML file")
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 text", f"byte {error.start} is 0x{raw[error.start]:02x}", "save it as UTF-8"
        ) from error


def _near(file: Path) -> str:
    """Return the nearest spec file in the same folder."""
    try:
        known = [str(other) for other in file.parent.glob("*.toml")]
    except (OSError, ValueError):
        known = []
    return suggestion(str(file), known) if known else "check the path"


def _of_another_kind(name: str) -> tuple[str, str] | None:
    """Return what a file is that was given in the place of a spec, and what to write; None where it may be one."""
    suffix = Path(name).suffix.lower()
    if suffix in (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".txt", ".md"):
        shown = Path(name).as_posix()
        return (
            "a spec names its data",
            f'a TOML file with [task.data] source = "{shown}", or --set task.data.source={shown}',
        )
    if suffix in (".py", ".ipynb"):
        return "it is a program", f"python {name}; a spec in TOML names what it needs of it, as package.module:function"
    return ("it is YAML, and a spec is TOML", "key = value in [tables]") if suffix in (".yaml", ".yml") else None


def _twice(message: str) -> tuple[str, str] | None:
    """Return why a table or a key that stands twice cannot be read, and what to try; None of another message."""
    if found := re.fullmatch(r"Cannot declare \((.*)\) twice", message):
        table = ".".join(re.findall(r"'([^']*)'", found[1]))
        return f"the table [{table}] stands there twice", f"one [{table}] with all of its options"
    if message == "Cannot overwrite a value":
        return "a key stands there twice", "one line for each key"
    return None


def _toml_hint(text: str, line: int) -> str:
    """Return what to try for the usual slips: text without quotes, a key without a value."""
    lines = text.split("\n")
    wrong = lines[line - 1].strip() if line <= len(lines) else ""
    key, equals, value = (part.strip() for part in wrong.partition("="))
    if equals and value and re.fullmatch(r"[A-Za-z][\w .:/-]*|[0-9][\w .]*", value):
        return f'text needs quotes: {key} = "{value}"'
    return "a line is `key = value` or `[table]`; text is in quotes, a list in [ ]"

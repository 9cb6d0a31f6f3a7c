"""One value of a spec file: checked against its option, turned into what the dataclass holds, and written as TOML."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from paceline.config.other_words import choice_meant
from paceline.config.shape import Option, ShapedTable
from paceline.errors import ConfigError
from paceline.units import Amount, Seconds, parse_amount, parse_bytes, parse_seconds

_UNIT = {"amount": "steps", "duration": "s"}  # what a bare number most likely means
UNSET = "none"  # TOML has no null: this text unsets an optional value
_LARGEST = 2**63 - 1

_EXPECTED = {
    "text": "text in quotes", "texts": "a list of texts", "whole": "a whole number", "number": "a number",
    "flag": "true or false", "amount": "an amount with a unit", "duration": "a duration with a unit",
    "bytes": "a size", "free": "a table", "tables": "a list of tables",
}  # fmt: skip
_EXAMPLES = {"texts": '["*.py", "*.md"]', "duration": '"90 s" or "2 h"', "bytes": '"512 MiB"', "free": "{ width = 64 }"}


def convert(option: Option, key: str, value: Any) -> object:
    """Return what the dataclass holds for a file's value.

    Raises ConfigError, naming the key, where the value breaks a rule of the option.
    """
    if option.optional and (value is None or value == UNSET):
        return None
    if option.kind == "text":
        return _text(option, key, value)
    if option.kind == "texts":
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise wrong_type(option, key, value)
        return tuple(_text(option, key, item) for item in value)
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise wrong_type(option, key, value)
        return value
    if option.kind == "amount":
        return _amount(option, key, value)
    if option.kind == "duration":
        return duration(option, key, value, _quantity(option, key, value, parse_seconds))
    if option.kind == "bytes":
        size = value if _is_whole(value) else _quantity(option, key, value, parse_bytes)
        return _in_range(option, key, value, size)
    assert option.kind in ("whole", "number"), option.kind
    if isinstance(value, str) and value in option.words:
        return option.words[value]
    return _in_range(option, key, value, _number(option, key, value))


def duration(option: Option, key: str, given: object, seconds: float) -> Seconds:
    """Return the seconds that were `given`. Raises ConfigError where they are out of the option's range."""
    return Seconds(_in_range(option, key, given, seconds))


def check_free(key: str, value: object) -> None:
    """Raise ConfigError where a value for the user's own keys is not plain: text, number, flag, or lists of them."""
    if isinstance(value, list):
        for item in value:
            check_free(key, item)
    elif isinstance(value, dict):
        for name, item in value.items():
            check_free(f"{key}.{name}", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key} = {literal(value)} is not finite", "JSON has no such number", "a finite number")
    elif isinstance(value, int) and value.bit_length() > 63:
        raise ConfigError(f"{key} = {literal(value)} is out of range", "whole numbers have 64 bits", "text, in quotes")
    elif not isinstance(value, str | bool | int | float):
        raise ConfigError(f"{key} = {value} is a {type(value).__name__}", "it has no place in JSON", "put it in quotes")


def wrong_type(option: Option, key: str, value: object) -> ConfigError:
    """Return the error for a value of another type than the option's."""
    named = {bool: "true or false", int: "a whole number", float: "a number with a fraction", str: "text",
             list: "a list", dict: "a table"}  # fmt: skip
    found = named.get(type(value), kind_of(value))
    fix = hint(option)
    if (
        isinstance(value, str)
        and option.kind in ("whole", "number")
        and re.fullmatch(r"-?[\d.]+([eE][+-]?\d+)?", value)
    ):
        fix = f"{value}, without quotes"
    elif option.kind == "whole" and isinstance(value, float) and math.isfinite(value) and value > 0:
        fix = f"{math.floor(value)} or {math.ceil(value)}"
    elif option.kind in _UNIT and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        unit = option.units[0] if option.kind == "amount" else _UNIT[option.kind]
        fix = f'"{value} {unit}", with a unit; {fix}'
    return ConfigError(
        f"{key} = {literal(value)} is not {_EXPECTED[option.kind]}",
        f"{found} was given where {_EXPECTED[option.kind]} is expected", fix,
    )  # fmt: skip


def hint(option: Option) -> str:
    """Return what to write for an option: its default or an example, and its documentation."""
    if option.item is not None:
        example = f"such as {_table_of(option.item)}"
    elif option.default in (None, "", 0, (), {}) and option.kind in _EXAMPLES:
        example = f"such as {_EXAMPLES[option.kind]}"
    elif option.default is None and not option.optional:
        return option.doc or _EXPECTED[option.kind]
    elif option.default is None:
        example = '"none" leaves it unset'
    else:
        example = f"the default is {literal(plain(option, option.default))}"
    return f"{example} ({option.doc})" if option.doc else example


def _table_of(item: ShapedTable) -> str:
    """Return a list of one table as an example, which sets the first option that such a table has."""
    first = next(member for member in item.members.values() if isinstance(member, Option))
    values = {"text": '"..."', "texts": '["..."]', "whole": "1", "number": "1.0", "flag": "true", **_EXAMPLES}
    chosen = next((literal(choice) for choice in first.choices if choice), values.get(first.kind, "..."))
    return f"[{{ {first.name} = {chosen} }}]"


def _text(option: Option, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(option, key, value)
    is_path = bool(option.objects) and ":" in value  # an import path in the place of an object
    if option.choices and value not in option.choices and not is_path:
        raise ConfigError(
            f"{key} = {literal(value)} is not a choice",
            f"it takes one of: {', '.join(choice or literal(choice) for choice in option.choices)}",
            choice_meant(value, option.choices),
        )  # fmt: skip
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(
            f"{key} = {literal(value)} is not text", "it holds a character that no file can", "UTF-8 text"
        )
    return value


def _number(option: Option, key: str, value: Any) -> int | float:
    if option.kind == "whole":
        if not _is_whole(value):
            raise wrong_type(option, key, value)
        return int(value)
    if not _is_whole(value) and not isinstance(value, float):
        raise wrong_type(option, key, value)
    return float(value) if not isinstance(value, int) or abs(value) <= _LARGEST else math.inf


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(option: Option, key: str, shown: object, value: int | float) -> int | float:
    rule = _broken_rule(option, value)
    if rule:
        raise ConfigError(f"{key} = {literal(shown)} is out of range", rule, hint(option))
    return value


def _broken_rule(option: Option, value: int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "it must be a finite number"
    if option.minimum is not None and value < option.minimum:
        return f"it must be at least {option.minimum:g}"
    if option.above is not None and value <= option.above:
        return f"it must be more than {option.above:g}"
    if option.maximum is not None and value > option.maximum:
        return f"it must be at most {option.maximum!r}"
    return "it must be less than 2^63" if abs(value) > _LARGEST and isinstance(value, int) else ""


def _quantity(option: Option, key: str, value: Any, parse: Any) -> Any:
    if not isinstance(value, str):
        raise wrong_type(option, key, value)
    try:
        return parse(value)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.what}", error.because, error.try_) from error


def _amount(option: Option, key: str, value: Any) -> Amount:
    amount = _quantity(option, key, value, lambda text: parse_amount(text, option.units))
    if amount.unit != "epochs" and amount.value != int(amount.value):
        near = sorted({max(1, math.floor(amount.value)), math.ceil(amount.value)})
        raise ConfigError(
            f"{key} = {literal(value)} is not whole", f"{amount.unit} are counted in whole numbers",
            " or ".join(f'"{count} {amount.unit}"' for count in near),
        )  # fmt: skip
    return amount


def plain(option: Option, value: Any) -> Any:
    """Return what a file would hold for a dataclass's value: the inverse of `convert`, exact."""
    if isinstance(value, Amount):
        return f"{int(value.value) if value.value == int(value.value) else value.value} {value.unit}"
    if option.kind == "duration" and value is not None:
        return f"{int(value) if value == int(value) else value} s"
    if isinstance(value, tuple | list):
        return list(value)
    return next((word for word, held in option.words.items() if held == value), value)


def literal(value: object) -> str:
    """Return the value in TOML's syntax (None as the text "none"), shortened where long; of an object what it is."""
    plain_types = str | int | float | list | tuple | dict | Amount | None
    text = toml(value) if isinstance(value, plain_types) else kind_of(value)
    return text if len(text) <= 80 else text[:77] + "..."


def kind_of(value: object) -> str:
    """Return what an object is, for messages: "a DataLoader", "the class Net"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def toml(value: object) -> str:
    """Return the value in TOML's syntax, whole. None is written as the text "none"."""
    if value is None:
        return f'"{UNSET}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, dict):
        items = ", ".join(f"{toml_key(name)} = {toml(item)}" for name, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, int) and value.bit_length() > 4096:
        return hex(value)  # only in messages: Python refuses to write thousands of decimal digits
    return repr(value) if isinstance(value, int | float) else str(value)


def toml_key(name: str) -> str:
    """Return a key in TOML's syntax, in quotes where it must be."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _quoted(name)


def _quoted(text: str) -> str:
    """Return a basic TOML string: JSON's escapes, and the two kinds of character that JSON lets through."""
    escaped = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return escaped.encode("utf-8", "backslashreplace").decode()

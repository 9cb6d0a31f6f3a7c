"""Redaction: what a journal must not hold. Secrets of known shapes, and what `run.redact` matches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.journal.record import Some
from paceline.spec.journal.secret_shapes import (
    AFTER_A_NAME,
    FOLDED_TO_ASCII,
    KNOWN,
    NAMED,
    NUMBERED,
    SIGNS_OF_KNOWN,
    VARIABLE,
)

MARK = "[redacted]"
SHORTEST_KEY = 20  # of a table: a shorter one is no token


@dataclass(frozen=True)
class Redactor:
    """Replaces secrets in text and in nested data. `patterns` are regular expressions of the user's own."""

    patterns: tuple[str, ...] = ()
    _own: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_own", tuple(map(compiled, self.patterns)))

    def text(self, text: str) -> str:
        """Return the text with each secret replaced; its surroundings stay."""
        for pattern in self._own:
            text = pattern.sub(lambda found: MARK if found.group() else "", text)
        is_odd = not text.isascii() and any(each in text for each in FOLDED_TO_ASCII)
        if is_odd or any(sign in text for sign in SIGNS_OF_KNOWN):
            text = KNOWN.sub(lambda found: MARK if found.group() else "", text)
        folded = text.lower()
        for pattern, signs in AFTER_A_NAME:
            if is_odd or any(sign in folded for sign in signs):
                text = pattern.sub(_keep_head, text)
        return text

    def data(self, value: object) -> Any:
        """Return nested data with the secrets in its texts replaced: also a text whose key or option names a secret."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self._valued(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return self._words(value)
        return value if _is_plain(value) else self.text(str(value))  # as a journal spells it: a path, a set, an object

    def _key(self, key: object) -> Any:
        return self.text(key) if isinstance(key, str) and len(key) >= SHORTEST_KEY else key

    def record(self, record: Some) -> Some:
        """Return a record of the journal with the secrets in its texts replaced."""
        cleaned = {field.name: self._field(field.name, getattr(record, field.name)) for field in fields(record)}
        return replace(record, **cleaned)

    def _field(self, name: str, value: Any) -> Any:
        found = self._valued(name, value)
        return tuple(found) if isinstance(value, tuple) else found

    def _valued(self, key: str, value: object) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool) and NUMBERED.match(key):
            return MARK
        if isinstance(value, str) and VARIABLE.fullmatch(f"{key}={value}"):
            return MARK
        return _all_secret(value) if NAMED.match(key) else self.data(value)

    def _words(self, words: Sequence[Any]) -> list[object]:
        """Return a list with its items redacted, and with what follows an option that names a secret, as in argv.

        After the name of several secrets all is secret up to the next option.
        """
        cleaned: list[object] = []
        secret = is_list = False
        for word in words:
            is_option = isinstance(word, str) and word.startswith("-")
            if is_option:
                secret = NAMED.match(word) is not None
                is_list = secret and word[-1:] in "sS"
            cleaned.append(MARK if secret and isinstance(word, str) and not is_option else self.data(word))
            secret = secret and (is_option or is_list)
        return cleaned


def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of `run.redact`. Raises ConfigError where it is no regular expression, or matches nothing."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"run.redact has '{pattern}'", f"it is no regular expression: {error}", "escape what is meant literally"
        ) from error
    if found.match(""):
        raise ConfigError(f"run.redact has '{pattern}'", "it matches the empty text", "a pattern of what is secret")
    return found


def _all_secret(value: object) -> object:
    """Return nested data with every text in it replaced."""
    if isinstance(value, str):
        return MARK if value else value
    if isinstance(value, Mapping):
        return {key: _all_secret(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_all_secret(item) for item in value]
    return value if _is_plain(value) else MARK


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float)


def _keep_head(found: re.Match[str]) -> str:
    return found["head"] + MARK

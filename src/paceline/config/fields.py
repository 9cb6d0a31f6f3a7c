"""How a spec declares its fields: a default, one line of documentation, and what values are allowed.

Everything that reads specs (the TOML loader, `--set`, the JSON schema, the reference in the docs) reads
these declarations; there is no second list of options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

_REQUIRED = object()


class HeldWord(int):
    """A number that a word of a spec is held as. The plain number is another thing: it cannot stand for the word."""


def option(
    default: Any = _REQUIRED,
    doc: str = "",
    *,
    factory: Any = None,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    quantity: str = "",
    units: tuple[str, ...] = (),
    words: Mapping[str, HeldWord] | None = None,
    objects: Mapping[str, str] | None = None,
) -> Any:
    """Return a dataclass field with its documentation and the rules its values must keep.

    `choices` are the allowed strings (with `objects`, import paths besides); `minimum` and `maximum` are inclusive,
    `above` is exclusive; `quantity` ("amount", "duration" or "bytes") says that a string with a unit is expected in
    files; `units` are the units an amount may have, all of them where empty; `words` may stand in the place of a whole
    number, with what each is held as. `objects` says what Python may put there besides, in a list of texts in the place
    of each: attributes that such an object has ("__len__ __getitem__"), and what it is in words.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum,
                "quantity": quantity, "units": units, "words": dict(words or {}),
                "objects": dict(objects or {})}  # fmt: skip
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is _REQUIRED:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)

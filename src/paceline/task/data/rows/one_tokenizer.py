"""Tokens of one tokenizer: in the sources of a mixture a number has to stand for one text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.spec.model_folder import TOKENIZER
from paceline.task.data.sources.shards.folder import OpensShards
from paceline.task.data.sources.tokens import TokenSplit
from paceline.task.data.storage.bytes import beside

# <|reserved_special_token_2|>, <unused7>, [unused7]: none of them stands in a text.
KEPT_FREE = re.compile(r"reserved|unused", re.IGNORECASE)


def tokenizer_text(source: object) -> str | None:
    """Return the tokenizer.json that a source's tokens were made with; None where nothing says how they were.

    Of a mixture, whose sources are of one, that of the first that says so.
    """
    for part in getattr(source, "sources", ()):
        if (text := tokenizer_text(part)) is not None:
            return text
    split = getattr(source, "split", None)
    if isinstance(split, TokenSplit):
        file = Path(split.folder) / TOKENIZER
        return file.read_text(encoding="utf-8") if file.is_file() else None
    opens = getattr(split, "opens", None)
    if isinstance(opens, OpensShards):
        return bytes(opens.storage.read_all(beside(opens.path, TOKENIZER))).decode()
    return None


def tokens_differ(source: object, like: object) -> str:
    """Return why numbers of a source's tokens may stand for other text than another's; "" where nothing says so."""
    own, other = tokenizer_text(source), tokenizer_text(like)
    return unlike(other, own) if own is not None and other is not None else ""


def unlike(one: str, other: str) -> str:
    """Return why a number may stand for another text in the second of two tokenizer.json, "" where it does not.

    One of them may have tokens that the other lacks, such as those that a chat adds. Special tokens that are kept free
    stand for nothing, and releases of one tokenizer give their numbers to others (Llama 3 and 3.1).
    """
    if one == other:
        return ""
    ours, theirs = json.loads(one), json.loads(other)
    if "model" not in ours or "model" not in theirs:  # bytes, which is no file of the package
        return f"one is {_name(ours)} and the other {_name(theirs)}"
    mine, its = _numbers(ours), _numbers(theirs)
    for token in sorted(mine.keys() & its.keys(), key=lambda token: mine[token]):  # the first alike on all ranks
        if mine[token] != its[token]:
            return f"{token!r} is token {mine[token]} of one and {its[token]} of the other"
    if not (mine.keys() <= its.keys() or its.keys() <= mine.keys()):
        return (
            f"{min(mine.keys() - its.keys())!r} and {min(its.keys() - mine.keys())!r} are tokens of one of them alone"
        )
    return "" if _merges(ours) == _merges(theirs) else "their merges differ"


def _name(told: Mapping[str, Any]) -> str:
    return str(told.get("paceline") or told.get("model", {}).get("type") or "a tokenizer.json")


def _numbers(told: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each token, of those that were added too, but of none that is kept free."""
    known, added = told["model"].get("vocab", {}), told.get("added_tokens") or ()
    found = dict(known) if isinstance(known, Mapping) else {pair[0]: number for number, pair in enumerate(known)}
    free = {each["content"] for each in added if each.get("special") and KEPT_FREE.search(each["content"])}
    every = found | {each["content"]: each["id"] for each in added}
    return {token: number for token, number in every.items() if token not in free}


def _merges(told: Mapping[str, Any]) -> list[str]:
    """Return the merges, which releases of the package write as texts or as pairs."""
    return [each if isinstance(each, str) else " ".join(each) for each in told["model"].get("merges") or ()]

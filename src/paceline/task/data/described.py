"""What a checkpoint keeps of a run's data, so that a later start can say what of them changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.sources.tokens import TokenSplit


def described(source: Source) -> dict[str, Any]:
    """Return the source in plain data: fingerprint, samples, tokens, documents and classes, and those of its parts."""
    if isinstance(source, InOrder):
        return described(source.inner)
    found: dict[str, object] = {"fingerprint": source.fingerprint, "samples": source.samples}
    split = getattr(source, "split", None)
    if isinstance(split, TokenSplit):
        found |= {"tokens": split.tokens, "documents": split.documents}
    if classes := getattr(source, "classes", ()):
        found["classes"] = list(classes)  # in the order of a head's outputs: a prediction can be named
    if isinstance(source, MixedSource):
        parts = zip(source.names, source.sources, strict=True)
        found["parts"] = {name: described(part) for name, part in parts}
    return found


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words what differs between two descriptions: counts, of each part of a mixture that differs."""
    parts, others = before.get("parts", {}), now.get("parts", {})
    changed = [name for name in {**parts, **others} if parts.get(name) != others.get(name)]
    if changed:
        return "; ".join(
            f"'{name}': {', '.join(_counts(parts.get(name, {}), others.get(name, {})))}" for name in changed
        )
    return ", ".join(_counts(before, now))


def _counts(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield what differs of one source."""
    counted = [name for name in ("documents", "tokens", "samples") if name in before or name in now]
    differing = [name for name in counted if before.get(name) != now.get(name)]
    for name in differing:
        then, today = (f"{each[name]:,}" if name in each else "unknown" for each in (before, now))
        yield f"{then} {name} then and {today} now"
    if not differing:
        same = " and ".join(f"{now[name]:,} {name}" for name in counted)
        yield f"{same or 'its size'} as before, with other content"

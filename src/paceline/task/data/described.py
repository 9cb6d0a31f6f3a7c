"""What a checkpoint keeps of a run's data, so that a later start can say what of them changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.task.data.protocol import Source
from paceline.task.data.rows.kept_rows import FORMAT
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.rows.of_split import SourceOfSplit
from paceline.task.data.rows.packed_source import PackedSource, packed_fingerprint
from paceline.task.data.sources.tokens import TokenSplit


def described(source: Source) -> dict[str, Any]:
    """Return the source in plain data: fingerprint, samples, tokens, documents and classes, and those of its parts.

    Of packed rows also by which version of the packing they are made, and of which tokens.
    """
    if isinstance(source, InOrder):
        return described(source.inner)
    found: dict[str, object] = {"fingerprint": source.fingerprint, "samples": source.samples}
    split = getattr(source, "split", None)
    if isinstance(source, SourceOfSplit) or isinstance(split, TokenSplit):
        assert split is not None
        found |= {"tokens": split.tokens, "documents": split.documents, "content": split.digest}
    if isinstance(source, PackedSource):
        found |= {"packing": FORMAT, "row": source.items_per_sample}
    if classes := getattr(source, "classes", ()):
        found["classes"] = list(classes)  # in the order of a head's outputs: a prediction can be named
    if isinstance(source, MixedSource):
        parts = zip(source.names, source.sources, strict=True)
        found["parts"] = {name: described(part) for name, part in parts}
    return found


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words what differs between two descriptions: counts, of each part of a mixture that differs."""
    parts, others = before.get("parts", {}), now.get("parts", {})
    changed = [name for name in {**parts, **others} if _print_of(parts, name) != _print_of(others, name)]
    if changed:
        return "; ".join(f"'{name}': {_changed(parts.get(name), others.get(name))}" for name in changed)
    return _changed(before, now)


def _print_of(parts: Mapping[str, Mapping[str, object]], name: str) -> object:
    return parts[name].get("fingerprint") if name in parts else None


def _changed(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return what differs of one source, which may have been no part of the data before, or be none now."""
    if before is None:
        return "it was no part of the data"
    if now is None:
        return "it is no part of the data any more"
    if (packed := _packed_by(before, now)) is not None and packed != now["packing"]:
        return (
            f"the same documents, whose rows were packed by version {packed} of the packing and are now by version"
            f" {now['packing']}, which lays them otherwise: {before['samples']:,} rows then and {now['samples']:,} now"
        )
    return ", ".join(_counts(before, now))


def _packed_by(before: Mapping[str, Any], now: Mapping[str, Any]) -> int | None:
    """Return by which version of the packing the documents of now were laid before; None where it were others.

    A checkpoint of an earlier release names no version: its fingerprint is held against those of all versions.
    """
    if "packing" not in now:
        return None
    if "packing" in before:
        return int(before["packing"]) if before.get("content") == now["content"] else None
    known = {packed_fingerprint(now["content"], now["row"], version): version for version in range(1, FORMAT + 1)}
    return known.get(str(before.get("fingerprint")))


def _counts(before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield what differs of one source, of what both descriptions hold."""
    counted = [name for name in ("documents", "tokens", "samples") if name in before and name in now]
    differing = [name for name in counted if before[name] != now[name]]
    for name in differing:
        yield f"{before[name]:,} {name} then and {now[name]:,} now"
    if not differing:
        same = " and ".join(f"{now[name]:,} {name}" for name in counted)
        yield f"{same or 'its size'} as before, with other content"

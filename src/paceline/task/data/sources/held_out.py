"""Which documents are held out: decided by their content, so that no order and no other document matters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def document_hash(text: bytes) -> bytes:
    """Return 16 bytes that stand for the document's content."""
    return hashlib.blake2b(text, digest_size=16).digest()


def split_value(content_hash: bytes) -> int:
    """Return the number in 0..2^64-1 that decides a document's split: it is held out where this is below a limit.

    It depends on the content alone, so documents keep their split when others come or go, and copies share theirs.
    """
    return int.from_bytes(content_hash[:8], "little")


def split_limit(values: Iterable[int], fraction: float) -> int:
    """Return the limit below which documents are held out: the fraction of the range, or what holds out the lowest.

    A corpus of two or more documents thus always has one held out, unless `fraction` is 0.
    """
    limit, lowest, count = int(fraction * 2**64), 2**64, 0
    for value in values:
        lowest, count = min(lowest, value), count + 1
    return lowest + 1 if limit and count > 1 and lowest >= limit else limit

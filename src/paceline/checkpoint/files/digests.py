"""Digests of pieces: by BLAKE3 where its package is there, by SHA-256 where it is not, or where a file says so.

SHA-256 is in every Python, and slow on a processor without instructions of its own for it: one core of an Intel Xeon of
2019 hashes 0.29 GB/s, and 4.2 by BLAKE3 (`hash` of benchmarks/checkpoint_stall.py, 1.1 GB, 2026-11-28). Both are of 256
bits.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Protocol, cast

from paceline.errors import ConfigError

SHA256, BLAKE3 = "sha256", "blake3"
KINDS = (SHA256, BLAKE3)


class Digest(Protocol):
    """What is fed with bytes and gives 32."""

    def update(self, content: bytes | bytearray | memoryview, /) -> object:
        """Take the next bytes."""

    def digest(self) -> bytes:
        """Return the digest of what was taken."""


@cache
def best_kind() -> str:
    """Return the kind of digest that is written here."""
    try:
        new_digest(BLAKE3)
    except ConfigError:
        return SHA256
    return BLAKE3


def new_digest(kind: str) -> Digest:
    """Return a digest of a kind that has taken nothing. Raises ConfigError where its package is not there."""
    if kind == SHA256:
        return hashlib.sha256()
    assert kind == BLAKE3, kind
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ConfigError(
            "the digests of this checkpoint cannot be computed",
            "they are of BLAKE3, and the package 'blake3' is not installed",
            "pip install blake3",
        ) from error
    return cast(Digest, blake3())

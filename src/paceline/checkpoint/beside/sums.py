"""Fingerprints that are taken beside the writing of the values, where a snapshot has come without them.

To write a checkpoint takes the disk, and to take fingerprints the cores: done one after the other each waits for the
other. What is known beforehand are those of the parts that may be the same as last time, as their first values say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace

import torch

from paceline.checkpoint.files.threads import Hands
from paceline.checkpoint.fingerprint import first_words, part_sums
from paceline.checkpoint.snapshot import Part, Snapshot
from paceline.checkpoint.tiers.unchanged import Unchanged


class SumsBeside:
    """The fingerprints of a snapshot's parts, on their way while a `with` block runs, which waits for them.

    `samples` are the first values of each.
    """

    def __init__(self, taken: Snapshot) -> None:
        self._taken = taken
        self.samples = _samples_of(taken.values.items())
        self._sums: dict[Part, int] = {}  # of parts that came without one
        self._rest: Future[dict[Part, int]] | None = None
        self._opened = ExitStack()

    def still(self, unchanged: Unchanged) -> dict[Part, Part]:
        """Return which parts have the values that they had in the last checkpoint, each with its fingerprint.

        The fingerprints of all others are taken from then on, beside what follows.
        """
        missing = {
            part: values for part, values in self._taken.values.items() if part.fingerprint is None and part.bytes
        }
        may = {part: values for part, values in missing.items() if unchanged.may_be_still(part, self.samples[part])}
        self._sums = _sums(may)
        rest = {part: values for part, values in missing.items() if part not in may}
        if rest:
            self._rest = self._opened.enter_context(Hands(1, "fingerprints")).submit(_sums, rest)
        told = {part: self._with_sum(part) for part in self._taken.values if part not in rest}
        same = unchanged.since_last(told.values())
        return {part: known for part, known in told.items() if known in same}

    def whole(self) -> Snapshot:
        """Return the snapshot with the fingerprints of its parts."""
        if self._rest is not None:
            self._sums |= self._rest.result()
            self._rest = None
        return replace(
            self._taken, values={self._with_sum(part): values for part, values in self._taken.values.items()}
        )

    def _with_sum(self, part: Part) -> Part:
        return replace(part, fingerprint=self._sums[part]) if part in self._sums else part

    def __enter__(self) -> SumsBeside:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()


def _samples_of(parts: Iterable[tuple[Part, torch.Tensor]]) -> dict[Part, bytes]:
    """Return the first values of parts, by which a later save sees at once that most of them have changed."""
    return {replace(part, fingerprint=None): first_words(values) for part, values in parts if part.bytes}


def _sums(parts: Mapping[Part, torch.Tensor]) -> dict[Part, int]:
    found = part_sums([(values, part.offsets) for part, values in parts.items()])
    return dict(zip(parts, found, strict=True))

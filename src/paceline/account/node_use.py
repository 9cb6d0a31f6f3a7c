"""Nodes that several runs use at once: which part of a node's time each has, by how many ranks it has there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.spec.journal.watching import NodeSample

RanksSpan = tuple[float, float, int, int]  # from when to when a run had so many ranks on a node, and which run
LEAST_SECONDS = 1.0  # shorter sharing is not told: samples of runs that follow each other may overlap by a little


class NodeUse:
    """How many ranks of all runs each node had at each moment, by these runs' samples."""

    def __init__(self, samples_of_runs: Iterable[Iterable[NodeSample]]) -> None:
        spans: dict[str, list[RanksSpan]] = {}
        for run, samples in enumerate(samples_of_runs):
            for sample in samples:
                if sample.time is not None and sample.seconds and sample.ranks:
                    _take(spans.setdefault(sample.node, []), sample.time, sample.seconds, len(sample.ranks), run)
        self._used = {node: _summed([(began, ended, ranks) for began, ended, ranks, _ in own])
                      for node, own in spans.items()}  # fmt: skip
        self.shared_seconds = {node: _overlap(own) for node, own in spans.items()}

    def share(self, sample: NodeSample) -> float:
        """Return which part of its node's rank-seconds a sample's own ranks have; 1 where no other run is there."""
        if sample.node not in self._used or sample.time is None or not sample.seconds or not sample.ranks:
            return 1.0
        moments, total = self._used[sample.node]
        before, after = np.interp((sample.time - sample.seconds, sample.time), moments, total)
        return min(1.0, len(sample.ranks) * sample.seconds / (after - before)) if after > before else 1.0

    @property
    def shared(self) -> dict[str, float]:
        """The nodes that several runs used at once, and for how many seconds."""
        return {node: seconds for node, seconds in self.shared_seconds.items() if seconds >= LEAST_SECONDS}


def _take(spans: list[RanksSpan], ended: float, seconds: float, ranks: int, run: int) -> None:
    """Add the time of a sample; one that follows the last of its run is a part of that span: a run has many samples."""
    began = ended - seconds
    if spans and spans[-1][2:] == (ranks, run) and abs(began - spans[-1][1]) < LEAST_SECONDS:
        began = spans.pop()[0]
    spans.append((began, ended, ranks, run))


def _summed(spans: Sequence[tuple[float, float, int]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return moments, and the rank-seconds up to each of them."""
    edges = [(began, ranks) for began, _, ranks in spans] + [(ended, -ranks) for _, ended, ranks in spans]
    edges.sort()
    moments = np.array([moment for moment, _ in edges])
    ranks = np.cumsum([change for _, change in edges])
    return moments, np.concatenate([[0.0], np.cumsum(np.diff(moments) * ranks[:-1])])


def _overlap(spans: Sequence[RanksSpan]) -> float:
    """Return for how long samples of at least two runs are of the same time."""
    edges = sorted([(began, 1, run) for began, _, _, run in spans] + [(ended, 0, run) for _, ended, _, run in spans])
    there: dict[int, int] = {}
    total, last = 0.0, 0.0
    for moment, begins, run in edges:
        if len(there) > 1:
            total += moment - last
        there[run] = there.get(run, 0) + (1 if begins else -1)
        if not there[run]:
            del there[run]
        last = moment
    return total

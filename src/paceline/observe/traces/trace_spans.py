"""A trace as spans: what ran when, on which thread or stream, of which phase. Torch-free."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.spec.watch.traced import PREFIX

STEP = f"{PREFIX}step "
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# The first word that is in a name decides.
CLASSES = (
    ("attention", ("attention", "sdpa", "flash", "fmha")),
    ("products", ("mm", "linear", "gemm", "matmul", "einsum", "conv", "cutlass", "cublas", "xmma", "wgmma")),
    ("optimizer", ("adam", "sgd", "foreach", "multi_tensor", "optimizer")),
    ("normalisation and softmax", ("norm", "softmax", "logsumexp", "nll", "cross_entropy")),
    ("look-ups", ("embedding", "index", "gather", "scatter")),
    ("copies and casts", ("copy", "memcpy", "memset", "aten::to", "_to_copy", "contiguous", "cat", "clone", "fill",
                          "zero")),
    ("sums", ("sum", "mean", "reduce")),
)  # fmt: skip
REST = "element by element, and the rest"
COMMUNICATION = "communication"
TracedTimes = list[tuple[float, float]]  # in seconds, in order


@dataclass(frozen=True)
class TracedSpan:
    """What ran from `begin` to `end`, in seconds, in one line of the trace (a thread or a stream)."""

    name: str
    kind: str
    begin: float
    end: float
    line: tuple[Any, Any]

    @property
    def seconds(self) -> float:
        """How long the span lasted."""
        return self.end - self.begin


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace: its spans in the order in which they began, and what the run wrote of it."""

    spans: tuple[TracedSpan, ...]
    about: dict[str, Any]

    @property
    def steps(self) -> list[TracedSpan]:
        """The steps that were traced."""
        return [span for span in self.spans if span.name.startswith(STEP)]


def read_trace(path: Path) -> RankTrace:
    """Return a rank's trace. Raises DataError for a file that is none."""
    try:
        with gzip.open(path, "rt") as file:
            told = json.load(file)
        found = [_span(event) for event in told["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        because = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} is no trace of a run", because, "take it again: paceline trace RUN") from error
    about = told.get("paceline")
    return RankTrace(tuple(sorted(found, key=lambda span: span.begin)), about if isinstance(about, dict) else {})


def _span(event: dict[str, Any]) -> TracedSpan:
    begin = float(event["ts"]) / 1e6
    line = (event.get("pid"), event.get("tid"))
    return TracedSpan(str(event["name"]), str(event.get("cat", "")), begin, begin + float(event["dur"]) / 1e6, line)


def class_of(span: TracedSpan) -> str:
    """Return what kind of work an operator or a kernel is."""
    if span.name.startswith(PREFIX):
        return COMMUNICATION
    name = span.name.lower()
    return next((kind for kind, words in CLASSES if any(word in name for word in words)), REST)


def own_times(spans: Sequence[TracedSpan]) -> list[TracedTimes]:
    """Return when each span of a thread ran alone, without later spans inside of it; the first to begin is first."""
    inside: list[TracedTimes] = [[] for _ in spans]
    open_ones: list[int] = []
    for at, span in enumerate(spans):
        while open_ones and spans[open_ones[-1]].end <= span.begin:
            open_ones.pop()
        for outer in reversed(open_ones):
            inside[outer].append((span.begin, span.end))
            if span.end <= spans[outer].end:  # what is around that one knows of it already
                break
        open_ones.append(at)
    return [less([(span.begin, span.end)], joined(within)) for span, within in zip(spans, inside, strict=True)]


def union(spans: Iterable[TracedSpan]) -> TracedTimes:
    """Return when any of the spans ran, as intervals in order that do not touch."""
    return joined((span.begin, span.end) for span in spans)


def joined(times: Iterable[tuple[float, float]]) -> TracedTimes:
    """Return when any of the intervals is, in order and so that none touches another."""
    found: TracedTimes = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def overlap(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return for how many seconds both are."""
    total, at = 0.0, 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            total += min(end, other[place][1]) - max(begin, other[place][0])
            place += 1
    return total


def less(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> TracedTimes:
    """Return intervals without what other ones cover; both in order."""
    left: TracedTimes = []
    at = 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            if other[place][0] > begin:
                left.append((begin, other[place][0]))
            begin = max(begin, other[place][1])
            place += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how many seconds intervals have."""
    return sum(end - begin for begin, end in intervals)

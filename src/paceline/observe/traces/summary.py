"""TraceSummary: where a step's time went, by its trace, beside what the forecast said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.traces.trace_spans import (
    COMMUNICATION,
    ON_DEVICE,
    PREFIX,
    REST,
    STEP,
    RankTrace,
    TracedSpan,
    TracedTimes,
    class_of,
    joined,
    length,
    less,
    overlap,
    own_times,
    union,
)
from paceline.spec.journal.record import number

# Which terms of a forecast a class of work stands beside, by the terms' kinds.
FORECAST = {
    "products": ("products", "recompute"), "attention": ("attention",),
    REST: ("elementwise", "casts"), "optimizer": ("update",),
    COMMUNICATION: ("collectives", "sends", "sync"), "gaps": ("host", "allocator"),
}  # fmt: skip
GAPS = "gaps"
# What computes in its own time: operators of torch, those that its compiler calls, and what that has compiled.
OPERATORS = ("aten::", "mkldnn::", "onednn::", "mkl::", "quantized::")
COMPILED = "Compiled"
LEAST_SHARE = 0.001  # of a step: what is shorter is not told


@dataclass(frozen=True)
class TracedClass:
    """A class of work: its seconds of a step, its largest operators or kernels, and what was forecast (None: nothing).

    On a device that runs several at once, seconds of classes may add up to more than a step.
    """

    name: str
    seconds: float
    forecast: float | None
    most: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TraceSummary:
    """One rank's steps: means of a step, in seconds."""

    path: str
    rank: int
    first: int
    last: int
    step_seconds: float
    classes: tuple[TracedClass, ...]
    communication_seconds: float  # during which bytes were on their way
    hidden_seconds: float  # of that, while the rank computed
    gaps: tuple[tuple[str, float], ...]  # by phase: nothing ran, since the host had not started anything
    grown: tuple[Mapping[str, Any], ...] = ()  # kinds of tensor of which there was more at the end

    @property
    def hidden_share(self) -> float | None:
        """How much of the communication was hidden behind computing; None where there was none."""
        return self.hidden_seconds / self.communication_seconds if self.communication_seconds > 0 else None


def summarise_trace(trace: RankTrace, path: Path, forecast: Sequence[Mapping[str, object]] = ()) -> TraceSummary | None:
    """Return where the steps of a trace went; None where no step is in it. `forecast` are the run's terms of time."""
    steps = trace.steps
    if not steps:
        return None
    begin, end, count = steps[0].begin, steps[-1].end, len(steps)
    within = [span for span in trace.spans if span.end > begin and span.begin < end]
    on_device = [span for span in within if span.kind in ON_DEVICE]
    sends = [span for span in within if _communicates(span)]
    sends = [span for span in sends if span.kind in ON_DEVICE] or sends
    sending = union(sends)
    if on_device:
        work = [(span, [(span.begin, span.end)]) for span in on_device if not _communicates(span)]
    else:
        work = _operators(within, steps[0].line, sending)
    computing = joined(each for _, times in work for each in times)
    classes = _classes([(span, length(times)) for span, times in work], count, forecast)
    communication = length(sending) / count
    told = _forecast(forecast, COMMUNICATION)
    if communication > 0 or told:
        most = _most([(span, span.seconds) for span in sends], count)
        classes.append(TracedClass(COMMUNICATION, communication, told, most))
    gaps = _gaps(within, joined([*computing, *sending]), count)
    idle = sum(seconds for _, seconds in gaps)
    classes.append(TracedClass("gaps of the host", idle, _forecast(forecast, GAPS), tuple(gaps[:3])))
    return TraceSummary(
        path=str(path),
        rank=int(number(trace.about.get("rank")) or 0),
        first=int(steps[0].name.removeprefix(STEP)),
        last=int(steps[-1].name.removeprefix(STEP)),
        step_seconds=(end - begin) / count,
        classes=tuple(sorted(classes, key=lambda each: -each.seconds)),
        communication_seconds=communication,
        hidden_seconds=overlap(sending, computing) / count,
        gaps=tuple(gaps),
        grown=tuple(trace.about.get("grown") or ()),
    )


def _communicates(span: TracedSpan) -> bool:
    """Return whether a span is a collective: phases and steps are the other ranges of Paceline's."""
    return span.name.startswith(PREFIX) and not span.name.startswith(STEP) and _is_collective(span.name)


def _is_collective(name: str) -> bool:
    words = name.removeprefix(PREFIX).split(" over ")[0]
    return words in COLLECTIVE_WORDS


COLLECTIVE_WORDS = frozenset({
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "barrier", "send", "receive", "scatter",
    "gather", "collective",
})  # fmt: skip


def _operators(
    within: list[TracedSpan], main: tuple[object, object], sending: TracedTimes
) -> list[tuple[TracedSpan, TracedTimes]]:
    """Return the operators of a CPU and when each computed by itself, of every thread.

    What is no operator of torch's own (a function of autograd, a hook) calls others and waits: where bytes are on their
    way in its own time, it waits for them.
    """
    by_line: dict[tuple[object, object], list[TracedSpan]] = {}
    for span in within:
        if span.kind == "cpu_op" or (_communicates(span) and span.line == main):
            by_line.setdefault(span.line, []).append(span)
    found = []
    for spans in by_line.values():
        spans.sort(key=lambda span: (span.begin, -span.end))
        for span, times in zip(spans, own_times(spans), strict=True):
            if not _communicates(span):
                computes = span.name.startswith(OPERATORS) or COMPILED in span.name
                found.append((span, times if computes else less(times, sending)))
    return found


def _classes(
    work: list[tuple[TracedSpan, float]], count: int, forecast: Sequence[Mapping[str, object]]
) -> list[TracedClass]:
    by_class: dict[str, list[tuple[TracedSpan, float]]] = {}
    for span, own in work:
        by_class.setdefault(class_of(span), []).append((span, own))
    return [
        TracedClass(name, sum(own for _, own in each) / count, _forecast(forecast, name), _most(each, count))
        for name, each in by_class.items()
    ]


def _most(work: list[tuple[TracedSpan, float]], count: int) -> tuple[tuple[str, float], ...]:
    by_name: dict[str, float] = {}
    for span, own in work:
        by_name[span.name] = by_name.get(span.name, 0.0) + own / count
    return tuple(sorted(by_name.items(), key=lambda pair: -pair[1])[:3])


def _forecast(terms: Sequence[Mapping[str, object]], name: str) -> float | None:
    kinds = FORECAST.get(name)
    if kinds is None or not terms:
        return None
    return sum(number(term.get("value")) or 0.0 for term in terms if term.get("kind") in kinds)


def _gaps(within: list[TracedSpan], busy: list[tuple[float, float]], count: int) -> list[tuple[str, float]]:
    """Return for each phase how long nothing ran in it, the longest first."""
    found: dict[str, float] = {}
    for span in within:
        if span.name.startswith(PREFIX) and span.kind == "user_annotation" and not _communicates(span):
            if span.name.startswith(STEP):
                continue
            idle = span.seconds - overlap([(span.begin, span.end)], busy)
            name = span.name.removeprefix(PREFIX)
            found[name] = found.get(name, 0.0) + max(0.0, idle) / count
    return sorted(found.items(), key=lambda pair: -pair[1])

"""What differs between runs' specs, plans, versions and data, from the records of their starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.report.drawn.markup import shown
from paceline.spec.journal.kinds import RunStarted

OWN = ("spec.run.dir", "spec.task.name")  # of every run its own, and without meaning for its numbers
ABSENT = "–"


@dataclass(frozen=True)
class DifferentOption:
    """One value that is not the same in all runs, as text in their order."""

    name: str  # with dots, such as spec.task.optimizer.lr
    values: tuple[str, ...]


def told_of(start: RunStarted) -> dict[str, object]:
    """Return what a start was made of as one flat table: spec, plan, data and versions."""
    parts: dict[str, object] = {"spec": start.spec, "plan": start.plan, "data": start.facts, "versions": start.versions}
    more = {"devices": start.world_size, "parameters": start.parameters, "host": start.host}
    return dict(_flat({**parts, **more}, ""))


def _flat(value: object, name: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def differences(starts: Sequence[RunStarted]) -> tuple[DifferentOption, ...]:
    """Return what is not the same in all starts, in the order of the spec."""
    told = [told_of(start) for start in starts]
    names = dict.fromkeys(name for own in told for name in own if name not in OWN)
    found = []
    for name in names:
        values = tuple(shown(own[name]) or ABSENT if name in own else ABSENT for own in told)
        if len(set(values)) > 1:
            found.append(DifferentOption(name, values))
    return tuple(found)

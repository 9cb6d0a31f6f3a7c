"""RunKinds: which of the compared runs are of one kind and differ by their seeds, so that a difference is noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.observe.compare.differ import OWN, told_of
from paceline.observe.compare.noise import Noise, between_runs
from paceline.spec.journal.kinds import RunStarted

SEED = "spec.task.seed"
TASK, WORK = ("spec.task.", "data."), ("spec.task.", "data.", "plan.", "devices")


@dataclass(frozen=True)
class RunKinds:
    """The kind of each run, and of those of a kind which are one piece of evidence: runs with one seed learn alike."""

    kinds: tuple[int, ...]
    pieces: tuple[str, ...]

    def told(self, values: Sequence[float | None], index: int) -> tuple[float, float, Noise] | None:
        """Return the means of the first run's kind and of another's, and the noise of their difference.

        None where both are of one kind, and where no kind has two pieces.
        """
        if self.kinds[0] == self.kinds[index]:
            return None
        found: dict[int, dict[str, list[float]]] = {}
        for kind, piece, value in zip(self.kinds, self.pieces, values, strict=True):
            if value is not None:
                found.setdefault(kind, {}).setdefault(piece, []).append(value)
        groups = {kind: [fmean(own) for own in pieces.values()] for kind, pieces in found.items()}
        places = [list(groups).index(self.kinds[each]) for each in (0, index)]
        noise = between_runs(list(groups.values()), *places)
        if noise is None:
            return None
        return fmean(groups[self.kinds[0]]), fmean(groups[self.kinds[index]]), noise


def same_but_for_the_seed(first: RunStarted, second: RunStarted) -> bool:
    """Return whether two runs are the same experiment: their tasks differ by nothing but the seed."""
    return _parts(first, TASK) == _parts(second, TASK)


def same_work(first: RunStarted, second: RunStarted) -> bool:
    """Return whether two runs do the same work on the same devices, but for the seed."""
    return _parts(first, WORK) == _parts(second, WORK)


def seed_of(start: RunStarted) -> str:
    """Return the seed of a run, as text."""
    return str(told_of(start).get(SEED))


def _parts(start: RunStarted, which: tuple[str, ...]) -> dict[str, object]:
    told = {**told_of(start), "devices.name": _device(start)}
    return {name: value for name, value in told.items() if name.startswith(which) and name not in (*OWN, SEED)}


def _device(start: RunStarted) -> object:
    device = start.cluster.get("device")
    return device.get("name") if isinstance(device, dict) else None

"""Segment: a stretch in which a job computes, from a restart to the next stop, at one speed or several."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.simulate.cycle import Cycle


@dataclass(frozen=True)
class Pace:
    """How fast a job runs from a point of work on: the share its copies reach, over the factor of a slow device."""

    from_work: float
    share: float
    factor: float

    @property
    def speed(self) -> float:
        """Seconds of full-speed training per second of work."""
        return self.share / self.factor


@dataclass(frozen=True)
class Yield:
    """What seconds of work came to: training at full speed, and what was lost to smaller size and slow devices."""

    progress: float
    shrunk: float
    slowed: float


class Segment:
    """A job that computes since `begin`, in cycles of work and saving."""

    def __init__(self, begin: float, progress: float, cycle: Cycle, share: float, factor: float) -> None:
        self.begin, self.progress = begin, progress  # the progress that it began with
        self._cycle = cycle
        self._paces = [Pace(0.0, share, factor)]

    def change(self, at: float, factor: float) -> None:
        """Go on at another factor of slowness from a time on."""
        work = self._cycle.work_at(at - self.begin)
        self._paces.append(Pace(work, self._paces[-1].share, factor))

    def end_for(self, progress: float) -> float:
        """Return when the job has made so much progress."""
        left = progress - self.progress
        for pace, after in zip(self._paces, self._paces[1:], strict=False):
            made = (after.from_work - pace.from_work) * pace.speed
            if made >= left:
                return self.begin + self._cycle.elapsed_for(pace.from_work + left / pace.speed)
            left -= made
        last = self._paces[-1]
        return self.begin + self._cycle.elapsed_for(last.from_work + left / last.speed)

    def work_at(self, at: float) -> float:
        """Return the seconds of work until a time."""
        return self._cycle.work_at(at - self.begin)

    def copied_at(self, at: float) -> float:
        """Return the progress that the last complete copy in memory holds."""
        return self.progress + self.made(self._cycle.copied_at(at - self.begin)).progress

    def stored_at(self, at: float) -> float:
        """Return the progress that the last complete checkpoint holds."""
        return self.progress + self.made(self._cycle.stored_at(at - self.begin)).progress

    def made(self, work: float) -> Yield:
        """Return what the first `work` seconds of work came to."""
        progress = shrunk = slowed = 0.0
        ends = [pace.from_work for pace in self._paces[1:]] + [work]
        for pace, end in zip(self._paces, ends, strict=True):
            length = max(0.0, min(end, work) - pace.from_work)
            progress += length * pace.speed
            shrunk += length * (1 - pace.share)
            slowed += length * pace.share * (1 - 1 / pace.factor)
        return Yield(progress, shrunk, slowed)

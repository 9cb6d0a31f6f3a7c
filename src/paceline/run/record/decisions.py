"""What was decided: automatic choices as records, each told once however often it is made."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.said import say_line
from paceline.spec.journal.kinds import (
    DecisionRecord,
)
from paceline.spec.journal.record import Record, now

REMEMBERED_STEPS = 1000  # of those that have decided something: a run that goes back makes the last ones again


class TellsDecisions:
    """Records and says what was decided. Who stands on this class says how a record is written."""

    def __init__(self) -> None:
        self._told_rates: dict[str, float] = {}  # by callbacks
        self._told_once: set[tuple[str, str, str]] = set()
        self._told_in: dict[int, set[tuple[str, str, str, str]]] = {}  # by step, which may be made again

    def _write(self, record: Record) -> None:
        raise NotImplementedError

    def _write_new(self, record: Record) -> None:
        raise NotImplementedError

    def _decided(self, what: str, before: object, after: object, because: str, evidence: object = None) -> None:
        self._write(DecisionRecord(what, before, after, because, evidence))

    def decided(self, what: str, before: object, after: object, because: str, evidence: object = None) -> None:
        """Say and record an automatic choice."""
        self._decided(what, before, after, because, evidence)
        self.say(f"{what:<8} {because}")

    def told_rate(self, step: int, before: float, by: str, lr: float) -> None:
        """Record that a callback has set the learning rate, where it is not what it set it to last."""
        if self._told_rates.get(by) != lr:
            self._told_rates[by] = lr
            decision = DecisionRecord("learning rate", before, lr, f"step {step}: {by} says so", None)
            if self._is_new_in(step, decision):
                self._write(decision)

    def ended_early(self, decision: DecisionRecord) -> None:
        """Record and say that training ends before its planned end, because no evaluation is better any more."""
        self._write(now(decision))
        self.say(f"stop     early, after {decision.after}: {decision.because}")

    def decided_before(self, decisions: Sequence[DecisionRecord]) -> None:
        """Record what others have decided."""
        for decision in decisions:
            self._write(decision)

    def decided_once(self, decisions: Sequence[DecisionRecord]) -> None:
        """Record what others have decided for good, but for what they told this start before."""
        for decision in decisions:
            told = decision.what, str(decision.after), decision.because
            if told not in self._told_once:
                self._told_once.add(told)
                self._write_new(decision)

    def decided_now(self, decisions: Sequence[DecisionRecord]) -> None:
        """Record and say what was decided on the way."""
        for each in decisions:
            self._write(each)
            self.say(f"{each.what:<8} {each.because}: {each.after}")

    def decided_in(self, step: int, decisions: Sequence[DecisionRecord]) -> None:
        """Record and say what a step has decided, but for what it decided alike when it was made before."""
        self.decided_now([each for each in decisions if self._is_new_in(step, each)])

    def _is_new_in(self, step: int, decision: DecisionRecord) -> bool:
        known = self._told_in.setdefault(step, set())
        key = decision.what, str(decision.before), str(decision.after), decision.because
        is_new = key not in known
        known.add(key)
        if len(self._told_in) > REMEMBERED_STEPS:
            del self._told_in[next(iter(self._told_in))]
        return is_new

    def say(self, text: str) -> None:
        """Print a line."""
        say_line(text)

"""Finding: one thing that `paceline doctor` looked at, what is there, and what to do where something is missing."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.units import plural

OK, NOTE, WRONG = "ok", "note", "wrong"  # fine; something is left unused or slower; training cannot work


@dataclass(frozen=True)
class Finding:
    """What was looked at (`about`), its `state`, what is there (`found`), and what to `try_` where it is not ok."""

    about: str
    state: str
    found: str
    try_: str = ""


@dataclass(frozen=True)
class Examination:
    """All findings on this machine."""

    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 where training works, 2 where something that it needs is missing."""
        return 2 if any(finding.state == WRONG for finding in self.findings) else 0


HANGING = 14  # columns that a finding's mark and word take


def lines_of(examination: Examination) -> list[str]:
    """Return the findings for people: a line for each, and what to do below it."""
    marks = {OK: " ", NOTE: "-", WRONG: "!"}
    lines = []
    for finding in examination.findings:
        lines.append(f"{marks[finding.state]} {finding.about:<12}{finding.found}")
        lines += [f"  {'':<12}try: {finding.try_}"] if finding.try_ else []
    wrong = [finding.about for finding in examination.findings if finding.state == WRONG]
    noted = sum(finding.state == NOTE for finding in examination.findings)
    if wrong:
        return [*lines, f"training cannot work here: {', '.join(wrong)} (! above)"]
    return [*lines, "training works here" + (f"; {plural(noted, 'remark')} (- above)" if noted else "")]

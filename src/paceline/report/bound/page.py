"""The verdict on a run's steps as HTML."""

from __future__ import annotations

from paceline.report.drawn.markup import esc, listing, table_html
from paceline.units import format_seconds
from paceline.verdict.verdict import BoundVerdict


def bound_html(bound: BoundVerdict | None) -> str:
    """Return the verdict with its evidence, all causes, and how far ranks are apart; nothing where there is none."""
    if bound is None:
        return ""
    gain = f"; without it steps would be {bound.gain:.2f} times as fast at most" if bound.gain else ""
    words = f'<p class="verdict">{esc(bound.text)}{esc(gain)}.</p>'
    facts = listing(
        [
            ("shown by", "; ".join(bound.evidence)),
            ("try", bound.advice),
            ("it would bring", bound.promise),
        ]
    )
    rows = [(esc(part.kind), f"{part.share:.0%}", esc("; ".join(part.evidence))) for part in bound.parts]
    parts = table_html(("a step is decided by", "share", "shown by"), rows, (1,))
    skew = table_html(
        ("ranks, seconds of a step", "least", "median", "most", "rank of the most"),
        [
            (esc(each.name), *(esc(format_seconds(value)) for value in (each.least, each.median, each.most)),
             str(each.rank))
            for each in bound.skew
        ],
        (1, 2, 3, 4),
    )  # fmt: skip
    return words + facts + parts + skew

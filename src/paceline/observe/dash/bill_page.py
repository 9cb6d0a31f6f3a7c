"""The bill as a page: of the server, and as one file without a script."""

from __future__ import annotations

from urllib.parse import urlencode

from paceline.account.bill import GROUPS, Bill
from paceline.account.texts import HEADS, cells_of, notes_of
from paceline.observe.dash.page import static
from paceline.report.drawn.markup import esc, listing, section, table_html
from paceline.units import plural


def bill_page(bill: Bill, made: str) -> str:
    """Return the bill as one file; `made` says from what."""
    return static(f"Bill by {bill.by}", bill_body(bill), made)


def bill_body(bill: Bill, links: bool = False) -> str:
    """Return the groups with their sum, what was not useful, and where the rates are from; with links to others."""
    rows = [[esc(cell) for cell in cells_of(row)] for row in (*bill.rows, bill.total)]
    table = table_html((bill.by, *HEADS), rows, range(1, len(HEADS) + 1))
    others = " ".join(
        f'<a href="/bill?{esc(urlencode({"by": by}))}"{" aria-current=true" if by == bill.by else ""}>{esc(by)}</a>'
        for by in (*GROUPS, *bill.tags)
    )
    return (
        f'<header><div class="eyebrow">Paceline, the bill</div><h1>What runs cost, by {esc(bill.by)}</h1>'
        f'<p class="meta">{plural(bill.runs, "run")}</p></header>'
        + (f'<nav class="ranks" aria-label="groups">{others}</nav>' if links else "")
        + section("Device-hours, money, energy, carbon", table if bill.rows else "<p>Nothing was spent yet.</p>")
        + section("How it was counted", listing(notes_of(bill)))
    )

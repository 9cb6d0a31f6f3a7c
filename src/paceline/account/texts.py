"""The bill in lines for people."""

from __future__ import annotations

from paceline.account.bill import Bill, BillRow
from paceline.account.timeline import KINDS
from paceline.said import one_line
from paceline.units import format_amount, format_seconds

WORDS = {"usd": "money", "kwh": "energy", "carbon_g": "carbon"}
MISSING = {
    "usd": "money of some starts, which the sum lacks: set cluster.price_usd_per_device_hour, or give --prices",
    "kwh": "energy of some starts, which the sum lacks: set cluster.watts_per_device",
    "carbon_kg": "carbon of some starts, which the sum lacks: set cluster.region, or run.when.carbon",
}
HEADS = ("device-hours", "USD", "kWh", "kg CO2e", *KINDS)


HANGING = 11  # columns that the word of a note takes
WIDTH, BELOW = 100, "  "  # columns of a line; what stands before figures below their group's name


def table_of(bill: Bill) -> list[str]:
    """Return the table in lines. Where a name has no room beside its figures, they stand below the names."""
    if not bill.rows:
        return ["nothing was spent in that time"]
    rows = [[bill.by, *HEADS], *(cells_of(row) for row in (*bill.rows, bill.total))]
    if bill.by == "kind":  # each row is of one kind: how much of all of it is what is left to say
        shown = len(HEADS) - len(KINDS) + 1
        shares = [row.device_hours / (bill.total.device_hours or 1.0) for row in (*bill.rows, bill.total)]
        of_all = ["share", *(f"{each:.1%}" for each in shares)]
        rows = [[*row[:shown], share] for row, share in zip(rows, of_all, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if len(_line(rows[0], widths)) <= WIDTH:
        blocks = [[_line(row, widths)] for row in rows]
    else:
        blocks = [[row[0], BELOW + _line([f"{row[1]:>{widths[1]}}", *row[2:]], widths[1:])] for row in rows]
    rule = ["-" * len(blocks[0][-1])]
    return [line for block in (blocks[0], rule, *blocks[1:-1], rule, blocks[-1]) for line in block]


def note_lines(bill: Bill) -> list[str]:
    """Return what stands under the table in lines, an empty one first."""
    return ["", *(f"{head:<{HANGING}}{words}" for head, words in notes_of(bill))] if bill.rows else []


def notes_of(bill: Bill) -> list[tuple[str, str]]:
    """Return what stands under the table: a word, and what is said of it."""
    wasted = sum(bill.total.hours[kind] for kind in KINDS if kind != "useful")
    share = wasted / bill.total.device_hours if bill.total.device_hours else 0.0
    hours = f"{share:.1%} of {format_amount(bill.total.device_hours)} device-hours; time between starts holds none"
    rates = [(WORDS[name], f"estimated {', '.join(origins)}") for name, origins in bill.how.items()]
    drawn = [("idle draw", _baseline(bill.total))] if bill.total.kwh else []
    shared = [("shared", f"{node} had several of these runs at once for {format_seconds(seconds)}: what its processors"
                         " took is shared out by ranks") for node, seconds in bill.shared.items()]  # fmt: skip
    unknown = [("unknown", MISSING[name]) for name in sorted(bill.total.missing)]
    return [("not useful", hours), *rates, *drawn, *shared, *unknown]


def _baseline(total: BillRow) -> str:
    """Return what of the energy devices draw without any work."""
    if total.baseline_kwh is None:
        return "unknown, of what is drawn without any work: set cluster.figures.waiting_watts"
    least = "at least " if total.baseline_lacks else ""
    share = total.baseline_kwh / (total.kwh or 1.0)
    return f"{least}{share:.0%} of the energy is what held devices draw without any work, by the power model"


def cells_of(row: BillRow) -> list[str]:
    """Return a row of the table as texts."""
    amounts = [_amount(value) for value in (row.device_hours, row.usd, row.kwh, row.carbon_kg)]
    whole = row.device_hours or 1.0
    return [one_line(row.group), *amounts, *(f"{row.hours[kind] / whole:.1%}" for kind in KINDS)]


def _amount(value: float | None) -> str:
    return "unknown" if value is None else format_amount(value)


def _line(row: list[str], widths: list[int]) -> str:
    first, *rest = (f"{cell:<{width}}" if index == 0 else f"{cell:>{width}}"
                    for index, (cell, width) in enumerate(zip(row, widths, strict=True)))  # fmt: skip
    return "  ".join((first, *rest)).rstrip()

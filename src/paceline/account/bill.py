"""The bill of many runs: their ledgers in one table, grouped by run, tag, day, plan, device, start or kind of work."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.account.ledger import LedgerEntry, ledger_of
from paceline.account.node_use import NodeUse
from paceline.account.prices import PriceBook
from paceline.account.timeline import KINDS
from paceline.errors import ConfigError, StorageError, suggestion
from paceline.spec.journal.reading import read_journal, read_nodes
from paceline.spec.journal.watching import NodeSample
from paceline.spec.run_files import called, distinct, runs_at

GROUPS = ("run", "start", "plan", "device", "node", "kind", "day", "month")
UNTAGGED = "(none)"
COLUMNS = ("device_hours", "usd", "kwh", "carbon_kg", *KINDS)


@dataclass
class BillRow:
    """What a group cost. `missing` are amounts that some of its entries do not know; the sum is of the others."""

    group: str
    device_hours: float = 0.0
    usd: float | None = None
    kwh: float | None = None
    carbon_kg: float | None = None
    hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))  # device-hours by kind
    missing: set[str] = field(default_factory=set)
    baseline_kwh: float | None = None  # of `kwh`, what devices draw without any work, of the entries that know it
    baseline_lacks: bool = False  # whether some entries do not know it

    def add(self, entry: LedgerEntry, share: float = 1.0) -> None:
        """Count a share of an entry."""
        self.device_hours += share * entry.device_seconds / 3600
        self.hours[entry.kind] += share * entry.device_seconds / 3600
        for name, value in (("usd", entry.usd), ("kwh", entry.kwh),
                            ("carbon_kg", None if entry.carbon_g is None else entry.carbon_g / 1000)):  # fmt: skip
            if value is None:
                self.missing.add(name)
            else:
                setattr(self, name, (getattr(self, name) or 0.0) + share * value)
        if entry.baseline_kwh is not None:
            self.baseline_kwh = (self.baseline_kwh or 0.0) + share * entry.baseline_kwh
        elif entry.kwh is not None:
            self.baseline_lacks = True


@dataclass(frozen=True)
class Bill:
    """Rows of groups, dearest first, their sum, and from where its rates are."""

    by: str
    rows: tuple[BillRow, ...]
    total: BillRow
    how: dict[str, tuple[str, ...]]  # amount -> where the rates of it are from
    runs: int
    tags: tuple[str, ...] = ()  # that some run has
    shared: Mapping[str, float] = field(default_factory=dict)  # nodes with several of the runs at once, and seconds


def runs_in(paths: Sequence[Path]) -> list[Path]:
    """Return the runs' directories that paths name, each once: itself, or those in it. Raises ConfigError for none."""
    found: list[Path] = []
    for path in paths:
        own = runs_at(path)
        if not own:
            because = "there is no run in it" if path.is_dir() else "there is no such folder"
            raise ConfigError(f"{path} holds no run", because, "name runs' directories, or the folder that holds them")
        found += own
    return distinct(found)


def make_bill(
    paths: Sequence[Path],
    by: str = "run",
    since: datetime.date | None = None,
    until: datetime.date | None = None,
    book: PriceBook | None = None,
    price_class: str = "",
) -> Bill:
    """Return the bill of runs' directories, or of all runs in folders, `by` one of GROUPS or a tag's name.

    Days before `since` and after `until` are left out. Raises ConfigError where there is no run, for a tag that no run
    has and for a price class that the book lacks, and StorageError where a journal cannot be read.
    """
    _check_class(book, price_class)
    runs = runs_in(paths)
    use = NodeUse(_samples(run) for run in runs) if len(runs) > 1 else None
    entries = [entry for run, name in zip(runs, called(runs), strict=True)
               for entry in _ledger(run, name, book, price_class, use)]  # fmt: skip
    known = sorted({tag for entry in entries for tag in entry.tags})
    if by not in GROUPS and by not in known and entries:
        words = f"tags here: {', '.join(known)}" if known else "no run has a tag: run.tags = { team = ... }"
        raise ConfigError(f"a bill by '{by}'", f"that is neither one of {', '.join(GROUPS)}, nor a tag of a run", words)
    first, last = (day.isoformat() if day else "" for day in (since, until))
    kept = [entry for entry in entries if entry.day >= first and (not last or entry.day <= last)]
    rows: dict[str, BillRow] = {}
    total = BillRow("total")
    for entry in kept:
        for name, share in (entry.nodes if by == "node" else {_group(entry, by): 1.0}).items():
            rows.setdefault(name, BillRow(name)).add(entry, share)
        total.add(entry)
    ordered = sorted(rows.values(), key=lambda row: (-(row.usd or 0.0), -row.device_hours))
    return Bill(by, tuple(ordered), total, _origins(kept), len({entry.run for entry in kept}), tuple(known),
                use.shared if use else {})  # fmt: skip


def _check_class(book: PriceBook | None, price_class: str) -> None:
    """Raise ConfigError for a class that no price of the book has: runs would be billed at their own rates."""
    known = sorted({each.price_class for each in book.prices if each.price_class}) if book else []
    if price_class and price_class not in known:
        if not known:
            because = "the book's prices have no class" if book and book.prices else "there is no price book"
            raise ConfigError(f"price class '{price_class}'", because, "a book of prices (docs/guide/bill.md)")
        because = f"the book has {', '.join(known)}"
        raise ConfigError(f"price class '{price_class}'", because, suggestion(price_class, known))


def _samples(run: Path) -> list[NodeSample]:
    try:
        return list(read_nodes(run))
    except OSError as error:
        raise _unreadable(run, error) from error


def _ledger(run: Path, name: str, book: PriceBook | None, price_class: str, use: NodeUse | None) -> list[LedgerEntry]:
    try:
        return ledger_of(read_journal(run), name, book, price_class, _samples(run), use)
    except OSError as error:
        raise _unreadable(run, error) from error


def _unreadable(run: Path, error: OSError) -> StorageError:
    return StorageError(f"the journal of {run} cannot be read", str(error), "mend it, or name the others")


def bill_csv(bill: Bill) -> str:
    """Return the bill as CSV: a row per group, hours by kind, empty where an amount is unknown."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([bill.by, *(name if name not in KINDS else f"{name}_device_hours" for name in COLUMNS)])
    for row in bill.rows:
        amounts = [row.device_hours, row.usd, row.kwh, row.carbon_kg, *row.hours.values()]
        lines.writerow([_inert(row.group), *("" if value is None else f"{value:.9g}" for value in amounts)])
    return out.getvalue()


def _group(entry: LedgerEntry, by: str) -> str:
    if by == "start":
        return f"{entry.run} {entry.attempt}"
    if by == "month":
        return entry.day[:7]
    return str(getattr(entry, by)) if by in GROUPS else entry.tags.get(by, UNTAGGED)


def _origins(entries: Iterable[LedgerEntry]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        for name, how in entry.how.items():
            found.setdefault(name, {})[how] = None
    return {name: tuple(hows) for name, hows in found.items()}


def _inert(text: str) -> str:
    """Return a cell that a spreadsheet takes for no formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text

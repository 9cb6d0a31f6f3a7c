"""What runs cost: device-hours by what the devices did, money, energy and carbon.

RUNS are runs' directories, or folders that hold them; `runs` without any. Amounts are estimates, at the rates of each
run's forecast or of a price book of your own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from paceline.cli.json.shapes import BILL
from paceline.cli.output import print_json, say_folded

EXAMPLE = "paceline bill runs\npaceline bill runs --by day --since 2026-11-01 --csv > november.csv"
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline bill`."""
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="*", help="runs' directories, or folders of them")
    parser.add_argument(
        "--by",
        default="run",
        metavar="GROUP",
        help="run, start, plan, device, node, kind, day, month, or the name of a tag",
    )
    parser.add_argument("--since", metavar="DAY", help="leave out the days before this one, YYYY-MM-DD")
    parser.add_argument("--until", metavar="DAY", help="leave out the days after this one, YYYY-MM-DD")
    parser.add_argument("--prices", metavar="FILE", type=Path, help="a price book of your own (docs/guide/bill.md)")
    parser.add_argument("--price-class", default="", metavar="CLASS", help="take prices of this class in the book")
    parser.add_argument("--csv", action="store_true", help="write the table as CSV")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write it as a page, too: one file of HTML")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline bill`."""
    from paceline.account.bill import bill_csv, make_bill
    from paceline.account.days import day_of
    from paceline.account.prices import read_prices
    from paceline.account.texts import HANGING, note_lines, table_of
    from paceline.observe.dash.bill_page import bill_page
    from paceline.observe.dash.export import write_page
    from paceline.report.format import utc

    bill = make_bill(
        options.runs or [Path("runs")],
        options.by,
        day_of(options.since, "--since"),
        day_of(options.until, "--until"),
        read_prices(options.prices),
        options.price_class,
    )
    if options.export:
        made = f"Made at {utc(time.time())} from the journals of {', '.join(map(str, options.runs or ['runs']))}."
        write_page(options.export, bill_page(bill, made))
    if options.json:
        print_json(bill, BILL)
    elif options.csv:
        print(bill_csv(bill), end="")
    else:
        print("\n".join(table_of(bill)))
        for line in note_lines(bill):
            say_folded(line, HANGING)
    return 0

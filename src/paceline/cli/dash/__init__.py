"""Shows runs as they go on, on a page of this machine that is read-only unless asked; with --export, as one file.

RUNS are runs' directories, or folders that hold them; `runs` without any. Another machine's browser needs the token
that is printed, and --host to be let in at all; `ssh -L 8377:localhost:8377 MACHINE` needs neither.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import DASH
from paceline.cli.output import print_json

if TYPE_CHECKING:
    from paceline.observe.dash.serve import DashAddress

EXAMPLE = "paceline dash runs\npaceline dash runs/stdlib-code --export page.html"
EXAMPLE_NEEDS = "somebody who looks, and Ctrl-C"
CODES = (74,)
PORT = 8377


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline dash`."""
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="*", help="runs' directories, or folders of them")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS",
        help="listen on this address or name of this machine (127.0.0.1: only for itself)",
    )  # fmt: skip
    parser.add_argument("--port", type=_port, default=PORT, metavar="N", help=f"listen on this port ({PORT}); 0: any")
    parser.add_argument(
        "--always-ask",
        action="store_true",
        help="ask this machine's own users for the token too, where there are others",
    )
    parser.add_argument(
        "--actions", action="store_true", help="let the page ask running jobs for traces; without it, it is read-only"
    )
    parser.add_argument("--export", type=Path, metavar="FILE", help="write what the page shows now, and end")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline dash`."""
    paths = options.runs or [Path("runs")]
    if options.export is not None:
        from paceline.observe.dash.export import export_page

        count = export_page(paths, options.export)
        if options.json:
            print_json({"page": str(options.export), "runs": count}, DASH)
        else:
            print(f"page     {options.export}")
        return 0
    from paceline.observe.dash.serve import serve

    def tell(address: DashAddress) -> None:
        if options.json:
            print_json({"url": address.url, "url_with_token": address.with_token}, DASH)
        else:
            print("\n".join(_lines(address, options.always_ask)), flush=True)

    try:
        serve(paths, options.host, options.port, options.always_ask, tell, options.actions)
    except KeyboardInterrupt:  # how it is meant to end
        return 0
    return 0


def _lines(address: DashAddress, always_ask: bool) -> list[str]:
    lines = [f"page     {address.with_token if always_ask else address.url}"]
    if address.is_open and not always_ask:
        lines.append(f"others   {address.with_token} (once; whoever has it can read these runs)")
    return [*lines, "end      Ctrl-C"]


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"'{text}' is no port: 0 to 65535")
    return number

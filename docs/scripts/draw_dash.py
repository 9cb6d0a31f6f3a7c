"""Draws docs/images/dash.png: the live page of a made-up run, in the Chromium of this machine.

python docs/scripts/draw_dash.py

The run is of the tests' journals: 2 devices, killed once and resumed, going on.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Serve the run, look at it, and keep the picture."""
    sys.path[:0] = map(str, [ROOT / "tests" / "helpers", ROOT / "tests", ROOT / "benchmarks" / "shared"])
    journals = importlib.import_module("report_journals")
    browser = importlib.import_module("browser").browser
    served = runpy.run_path(str(ROOT / "tests" / "observe" / "dash" / "served.py"))["served"]
    records = [record for record in journals.resumed() if record["attempt"] < 3][:-1]
    late = time.time() - records[-1]["time"]
    for record in records:
        record["time"] += late  # it goes on now
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        run = journals.write(Path("runs") / "stdlib-code", records)
        with served(run) as server, browser(Path(name) / "profile") as tab:
            tab.call("Emulation.setDeviceMetricsOverride", width=1500, height=1300, deviceScaleFactor=1, mobile=False)
            tab.open(f"{server.address.url}run/stdlib-code")
            tab.wait("document.getElementById('link').textContent === 'live'")
            tab.picture(ROOT / "docs" / "images" / "dash.png", 1500, 1300)


if __name__ == "__main__":
    main()

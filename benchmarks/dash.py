"""The live page of a large run: 4,096 ranks on 512 nodes, 100,000 steps, and how fast a new step appears on it.

    python benchmarks/dash.py [--quick] [--ranks 4096] [--steps 100000] [--json OUT] [--save]

The journal is written first, as such a run would have left it: a record for each step, one of all ranks for every
hundred, a node's sample each ten seconds in the last hour. `paceline dash` then serves it in a process of its own. What
is measured: until the page is answered, until its newest step is the journal's (all of it was read), the time from a
step in the journal to the page's event, the most memory that the server has used, and the CPU that an open page costs.
Where a Chromium is installed, the time until the browser has drawn the first curve is measured too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import keep, machine
from shared.report_journals import START, run_started, step  # a run's records, without the run

RANKS_PER_NODE, ALL_RANKS_EVERY, NODE_EVERY_SECONDS, STEP_SECONDS = 8, 100, 10.0, 1.0
NODE_SAMPLES = 360  # of each node: an hour's


@dataclass(frozen=True)
class Measured:
    """What was measured, in seconds, bytes, and a share of one core."""

    ranks: int
    steps: int
    journal_bytes: int
    answer_seconds: float
    painted_seconds: float | None
    whole_seconds: float
    update_seconds: float  # the median
    slowest_update_seconds: float
    server_bytes: int
    cpu_share: float


def write_journal(run_dir: Path, ranks: int, steps: int) -> int:
    """Write the journal; return its size in bytes."""
    draw, folder = random.Random(1), run_dir / "journal"
    (folder / "nodes").mkdir(parents=True)
    spread = {"min": 0.98, "median": 1.0, "max": 1.1, "rank": 0}
    begun = time.time() - steps * STEP_SECONDS
    with (folder / "0001.jsonl").open("w") as file:
        file.write(json.dumps(run_started(1, begun, steps=steps + 1000, world_size=ranks)) + "\n")
        for number in range(1, steps + 1):
            now = begun + number * STEP_SECONDS
            file.write(json.dumps(step(1, number, now, draw, STEP_SECONDS)) + "\n")
            if number % ALL_RANKS_EVERY == 0:
                names = ("total", "data", "forward_backward", "reduce", "optimizer", "other", "computing", "waiting")
                slow = {**spread, "rank": draw.randrange(ranks), "max": 1 + draw.random() / 2}
                told = {"schema": 1, "kind": "ranks", "time": now, "attempt": 1, "step": number, "device": "cuda",
                        "steps": ALL_RANKS_EVERY, "ranks": ranks, "spreads": dict.fromkeys(names, slow)}  # fmt: skip
                file.write(json.dumps(told) + "\n")
    signals = dict.fromkeys(("celsius", "watts", "joules", "utilisation", "memory_bytes", "clock_share"), spread)
    for node in range(1, ranks // RANKS_PER_NODE):
        own = {"schema": 1, "kind": "node", "attempt": 1, "node": f"node-{node:04d}", "seconds": NODE_EVERY_SECONDS,
               "ranks": list(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)), "signals": signals,
               "host": {"cpu_share": 0.4, "memory_available_bytes": 1e12}, "absent": {}, "flagged": []}  # fmt: skip
        line = json.dumps({**own, "time": START, "step": steps}) + "\n"
        (folder / "nodes" / f"0001-node-{node:04d}.jsonl").write_text(line * NODE_SAMPLES)
    return sum(path.stat().st_size for path in folder.rglob("*.jsonl"))


def serve(run_dir: Path) -> tuple[subprocess.Popen[str], int]:
    """Start the server; return its process and port."""
    command = [sys.executable, "-m", "paceline", "dash", str(run_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])


def get(port: int, path: str) -> str:
    """Return what is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    return connection.getresponse().read().decode()


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU time that a process has used."""
    words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def most_bytes(process: subprocess.Popen[str]) -> int:
    """Return the most resident memory that a process has used."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def wait_for(stream: http.client.HTTPResponse, words: str) -> None:
    """Return when a part of the page has these words."""
    while words.encode() not in (line := stream.readline()):
        assert line, "the server has ended"


def follow(run_dir: Path, port: int, steps: int, process: subprocess.Popen[str]) -> tuple[float, list[float], float]:
    """Return when all was shown, how long each of some new steps took to be, and the share of a core meanwhile."""
    draw, took = random.Random(2), []
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/run/{run_dir.name}/events")
    stream = connection.getresponse()
    wait_for(stream, f"{steps:,} of ")
    whole = time.monotonic()
    used = cpu_seconds(process)
    with (run_dir / "journal" / "0001.jsonl").open("a") as file:
        for number in range(steps + 1, steps + 21):
            time.sleep(STEP_SECONDS)  # as the run's steps come
            file.write(json.dumps(step(1, number, time.time(), draw, STEP_SECONDS)) + "\n")
            file.flush()
            written = time.monotonic()
            wait_for(stream, f"{number:,} of ")
            took.append(time.monotonic() - written)
    share = (cpu_seconds(process) - used) / (time.monotonic() - whole)
    connection.close()
    return whole, took, share


def painted(port: int, run_dir: Path, folder: Path) -> float | None:
    """Return the seconds until a browser has drawn the first curve; None where none is installed."""
    import shutil

    from shared.browser import NAMES, browser

    if not any(map(shutil.which, NAMES)):
        return None
    with browser(folder) as tab:
        began = time.monotonic()
        tab.open(f"http://127.0.0.1:{port}/run/{run_dir.name}")
        tab.wait("document.querySelector('#loss svg')")
        return time.monotonic() - began


def measure(ranks: int, steps: int) -> Measured:
    """Write the journal, serve it and look."""
    with tempfile.TemporaryDirectory() as name:
        folder, run_dir = Path(name), Path(name) / "run"
        size = write_journal(run_dir, ranks, steps)
        process, port = serve(run_dir)
        try:
            first = painted(port, run_dir, folder / "profile")
        finally:
            process.terminate()
            process.wait()
        process, port = serve(run_dir)  # which has read nothing yet
        try:
            began = time.monotonic()
            get(port, f"/run/{run_dir.name}")
            answered = time.monotonic() - began
            whole, took, share = follow(run_dir, port, steps, process)
            used = most_bytes(process)
        finally:
            process.terminate()
            process.wait()
    return Measured(ranks, steps, size, answered, first, whole - began, statistics.median(took), max(took), used, share)


def lines_of(found: Measured) -> list[str]:
    """Return the table."""
    rows = [
        ("journal", f"{found.journal_bytes / 1e6:,.0f} MB"),
        ("the page is answered after", f"{found.answer_seconds:.2f} s"),
        ("a browser has drawn the first curve after",
         "no Chromium here" if found.painted_seconds is None else f"{found.painted_seconds:.2f} s"),
        ("all of the journal is shown after", f"{found.whole_seconds:.2f} s"),
        ("a step is on the page after", f"{found.update_seconds:.2f} s (at most {found.slowest_update_seconds:.2f})"),
        ("most memory of the server", f"{found.server_bytes / 1e6:,.0f} MB"),
        ("CPU of an open page", f"{found.cpu_share:.1%} of a core"),
    ]  # fmt: skip
    head = [f"{found.ranks:,} ranks, {found.steps:,} steps", "", "| | |", "|---|---|"]
    return [*head, *(f"| {name} | {value} |" for name, value in rows)]


def main() -> None:
    """Measure and print; keep the table with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps and of the ranks")
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/dash.md")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    found = measure(options.ranks // part, options.steps // part)
    where: dict[str, Any] = machine()
    text = "\n".join(lines_of(found))
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"machine": where, **asdict(found)}, indent=2))
    if options.save:
        head = (
            f"# The live page of a large run\n\n`python benchmarks/dash.py` on {where['cpu']}, {where['cores']} cores,"
        )
        keep("dash", page=f"{head} {where['date']}.\n\n{text}\n")


if __name__ == "__main__":
    main()

"""What a slow rank costs a step, and what of that its having less work brings back.

    python benchmarks/costs/stragglers.py [--quick] [--rounds 5] [--ranks 2] [--factor 3] [--json OUT]

Three runs take turns: no rank is slow; one is (its passes take `--factor` times as long, by `--faults`) and the batch
stays cut evenly; one is, and `run.health.on_straggler = "less_work"`. A run's time is the median of its last steps,
when the cut has settled. Ratios are to the even cut with a slow rank, of the same round. Ranks that compute beside each
other need a core each: a slow rank computes for longer, it does not sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.spec.journal.reading import read_journal

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import machine, median_of

SPEC = """
[task]
name = "stragglers"
model = {{ name = "llama-1m", hidden = {hidden} }}
data = {{ source = "{corpus}", seq_len = {seq_len}, cache_dir = "{folder}/cache" }}
global_batch = "{batch} samples"
stop = "{steps} steps"
[cluster]
device = "cpu"
devices = {ranks}
probe = false
learn = false
[plan]
dp_replicate = {ranks}
precision = "fp32"
[run]
dir = "{run_dir}"
verify = false
checkpoint_every = "none"
evaluate_every = "none"
check_every = "4 steps"
[run.health]
on_straggler = "{answer}"
straggler_checks = 2
"""
FAULTS = """
[[each]]
kind = "slow"
rank = 1
step = 1
steps = {steps}
factor = {factor}
"""
RUNS = {"no slow rank": ("tell", False), "even cut": ("tell", True), "less work": ("less_work", True)}
LAST = 0.4  # of a run's steps, whose time counts


def step_seconds(name: str, options: argparse.Namespace, folder: Path) -> tuple[float, list[int]]:
    """Return the median time of a run's last steps, and the rows that its ranks had in the end (none: even)."""
    answer, is_slow = RUNS[name]
    run_dir = folder / name.replace(" ", "-")
    values = {**vars(options), "folder": folder, "run_dir": run_dir, "corpus": options.corpus, "answer": answer}
    (folder / "spec.toml").write_text(SPEC.format(**values))
    (folder / "faults.toml").write_text(FAULTS.format(**values))
    words = [sys.executable, "-m", "paceline", "train", str(folder / "spec.toml")]
    words += ["--faults", str(folder / "faults.toml")] if is_slow else []
    ended = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}: {ended.stderr}")
    records = list(read_journal(run_dir))
    seconds = [record["seconds"]["total"] for record in records if record["kind"] == "step"]
    cuts = [record["evidence"]["rows"]["to"] for record in records
            if record["kind"] == "decision" and record["what"] == "rows" and "rows" in record["evidence"]]  # fmt: skip
    return statistics.median(seconds[-int(LAST * len(seconds)) :]), cuts[-1] if cuts else []


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return each run's step time over the even cut's, round by round, and the rows that ranks had in the end."""
    found: dict[str, list[float]] = {name: [] for name in RUNS}
    rows: list[list[int]] = []
    names = list(RUNS)
    for number in range(options.rounds):
        turn = names[number % len(names) :] + names[: number % len(names)]
        with tempfile.TemporaryDirectory(prefix="stragglers-") as folder:
            took = {name: step_seconds(name, options, Path(folder)) for name in turn}
        for name, (seconds, _) in took.items():
            found[name].append(seconds / took["even cut"][0])
        rows.append(took["less work"][1])
    table = [{"run": name, "ratio": vars(median_of(values))} for name, values in found.items()]
    return {"rows": table, "cuts": rows, "factor": options.factor, "ranks": options.ranks, "machine": machine()}


def main(arguments: list[str]) -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--corpus", default=str(Path(__file__).parents[2] / "src" / "paceline" / "spec"))
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that everything works")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.seq_len = 1, 30, 32
    result = measure(options)
    print(f"one of {options.ranks} ranks takes {options.factor:g} times as long for its passes")
    print("| run | step time over the even cut's with a slow rank |\n|---|---|")
    for row in result["rows"]:
        ratio = row["ratio"]
        print(f"| {row['run']} | {ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) |")
    print(f"rows in the end: {result['cuts']}")
    if options.json:
        Path(options.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])

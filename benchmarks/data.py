"""What samples of text cost to read: Paceline's sources beside a memory map, torch's loaders and other libraries.

    python benchmarks/data.py [--quick] [--tokens 100000000] [--rounds 3] [--json OUT] [--save]
        [--only PART ...] [--python datasets=PATH] [--python litdata=PATH] [--python grain=PATH]
        [--python mosaicml-streaming=PATH]

Each reader reads the same tokens in a process of its own, in batches of rows with their labels (int64), in a new order
each epoch; readers take turns. A library that needs an environment of its own is given its Python: make a virtual
environment, install `benchmarks/readers/requirements/PACKAGE.txt` into it, and name its interpreter. A library that is
not there is said to be not installed.

The whole is made of parts: the readers of one package each (`none` for those that need no package), and the tables
`resume`, `cold` and `batches`. With `--only` the other parts come from the file that `--json` names, so that a long run
can be made in pieces, and as many tokens are read as they say unless it is told otherwise. Each part holds its own
baseline, machine, date, load, tokens and rounds.

CPU is that of all processes of a reader for a row: it does not see what else the machine does. The baseline is a memory
map and a permutation that numpy draws for each epoch. Then: seconds from opening the source to its first batch, what
memory that took, and how often neighbours meet in a batch against a uniform shuffle; seconds from opening to a batch
anywhere in 10^8 samples (2.5 GB of temporary files); bytes that a cold epoch of remote shards fetches; what packing
leaves empty of the built-in corpus, and how even its ranks are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import keep, machine
from readers import BASELINE, READERS, ROWS, SEED, SEQ_LEN, VOCAB
from readers.batches import batches_of_documents
from readers.cold import cold_reads
from readers.page import TABLES, page
from readers.resume import resumes

from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import ShardWriter
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.sources.tokens import TokenWriter

DOCUMENT_TOKENS = 2095  # on average, as in a corpus of code
MANY_SAMPLES = 10**8
TOKENS = 100_000_000
NO_PACKAGE = "none"  # the part of the readers that need no package
SHARD_TOKENS = 2**25
MOST_SECONDS = 300  # of one reader in one round, or of writing its files
MEASURE = Path(__file__).parent / "readers" / "measure.py"


def write_corpus(folder: Path, tokens: int) -> None:
    """Write random documents of geometric lengths: as a cached corpus, and the same tokens as token shards."""
    random = np.random.default_rng(SEED)
    (folder / "tokens").mkdir()
    (folder / "shards").mkdir()
    with TokenWriter(folder / "tokens", "train", VOCAB, VOCAB - 1) as writer:
        while writer.tokens < tokens:
            lengths = random.geometric(1 / DOCUMENT_TOKENS, 1000)
            writer.add(np.split(random.integers(0, VOCAB - 1, lengths.sum(), dtype=np.uint16), lengths.cumsum()[:-1]))
    split, written = writer.result(), []
    everything, ends = split.open(), split.offsets()
    firsts = [0, *(np.flatnonzero(np.diff(ends[:-1] // SHARD_TOKENS)) + 1).tolist(), split.documents]
    for number, (first, last) in enumerate(itertools.pairwise(firsts)):
        with ShardWriter(folder / "shards" / f"{number}.shard", 2, VOCAB - 1) as shard:
            for document in range(first, last):
                shard.add([everything[ends[document] : ends[document + 1] - 1]])
        written.append(shard.result())
    (folder / "shards" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    splits = {"train": tuple(written), "validation": ()}
    write_index(folder / "shards", ShardIndex("bytes", VOCAB, VOCAB - 1, splits, {}))


def measured(
    name: str, folder: Path, batches: int, pythons: dict[str, str], counts_near: bool = False
) -> dict[str, Any]:
    """Return what one reader took, in a fresh process; `missing` or `failed` where it cannot be measured."""
    python = pythons.get(READERS[name].package, sys.executable)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    command = [python, str(MEASURE), name, str(folder), str(batches), *(["near"] if counts_near else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {MOST_SECONDS} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"failed": error}
    return dict(json.loads(lines[-1]))


def prepare(folder: Path, pythons: dict[str, str], names: Sequence[str]) -> dict[str, str]:
    """Let each library write its format; return why not, of those that cannot."""
    refused = {}
    for package in dict.fromkeys(READERS[name].package for name in names if READERS[name].writes):
        name = next(name for name in names if READERS[name].package == package)
        found = measured(name, folder, 0, pythons)
        if "missing" in found:
            refused[package] = "not installed"
        elif "failed" in found:
            refused[package] = found["failed"]
    return refused


def read_by(names: Sequence[str], folder: Path, rounds: int, batches: int, pythons: dict[str, str]) -> dict[str, Any]:
    """Return what each reader took: medians over rounds, or why it was not measured. The baseline is among them.

    Neighbours are counted in the first round: their order is the same in all.
    """
    refused = prepare(folder, pythons, names)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names if READERS[name].package not in refused}
    for number in range(rounds):
        for name, results in found.items():
            if not any("failed" in result or "missing" in result for result in results):
                results.append(measured(name, folder, batches, pythons, counts_near=number == 0))
    rows: dict[str, Any] = {}
    for name, reader in READERS.items():
        if name not in names:
            continue
        if reader.package in refused:
            rows[name] = {"not_measured": refused[reader.package]}
        elif "missing" in found[name][-1] or "failed" in found[name][-1]:
            rows[name] = {"not_measured": found[name][-1].get("failed", "not installed")}
        else:
            keys = [key for key in found[name][0] if key != "note"]
            rows[name] = {key: statistics.median(each[key] for each in found[name] if key in each) for key in keys}
            rows[name] |= {"note": found[name][0]["note"]} if "note" in found[name][0] else {}
            rows[name]["over_memory_map"] = over(found[name], found[BASELINE])
            if reader.beside in names:
                rows[name]["over_same"] = over(found[name], found[reader.beside])
    return rows


def over(results: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> float:
    """Return the CPU of a row over that of another reader that took turns with it: the median of rounds."""
    return statistics.median(own["cpu"] / other["cpu"] for own, other in zip(results, base, strict=True))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, help=f"default {TOKENS:,}, or as many as the parts of --json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH")
    parser.add_argument("--only", action="append", default=[], metavar="PART")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in chosen.python)
    packages = dict.fromkeys(reader.package or NO_PACKAGE for reader in READERS.values())
    parts = [*packages, *TABLES]
    if unknown := (set(pythons) - set(packages)) | (set(chosen.only) - set(parts)):
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(parts)}")
    many, max_bytes = MANY_SAMPLES, 20_000_000
    if chosen.quick:
        chosen.tokens, chosen.rounds, chosen.batches, many, max_bytes = 2_000_000, 1, 200, 10**6, 300_000
    report: dict[str, Any] = {"rows": ROWS, "seq_len": SEQ_LEN, "resume_samples": many, "parts": {}}
    if chosen.only and chosen.json and chosen.json.exists():
        before = json.loads(chosen.json.read_text())
        if wrong := [key for key, value in report.items() if key != "parts" and before.get(key) != value]:
            told = ", ".join(f"{key} {before.get(key)}, and {report[key]} here" for key in wrong)
            parser.error(f"{chosen.json} is of another size: {told}")
        report = before
    chosen.tokens = chosen.tokens or max((each["tokens"] for each in report["parts"].values()), default=TOKENS)
    with tempfile.TemporaryDirectory(prefix="data-") as folder_name:
        folder = Path(folder_name)
        write_corpus(folder, chosen.tokens)
        tables: dict[str, Callable[[], dict[str, Any]]] = {
            "resume": lambda: resumes(folder, many),
            "cold": lambda: cold_reads(folder),
            "batches": lambda: batches_of_documents(folder / "cache", max_bytes),
        }
        for part in chosen.only or parts:
            load = os.getloadavg()[0]
            if part in tables:
                found: dict[str, Any] = {"rows": tables[part]()}
            else:
                rows = read_by(readers_of(part), folder, chosen.rounds, chosen.batches, pythons)
                found = {"rows": rows, "rounds": chosen.rounds}
            loads = [load, os.getloadavg()[0]]
            real_time = os.sched_getscheduler(0) != os.SCHED_OTHER  # by chrt: other programs wait for it
            about = {"machine": machine(), "load": loads, "real_time": real_time, "tokens": chosen.tokens}
            report["parts"][part] = {**about, **found}
            if chosen.json:  # at once: a long run may be cut
                chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    print(page(report))
    if chosen.save:
        keep("data", report, page(report))


def readers_of(part: str) -> list[str]:
    """Return the baseline and the readers that need a part's package."""
    return [name for name, each in READERS.items() if name == BASELINE or (each.package or NO_PACKAGE) == part]


if __name__ == "__main__":
    main()

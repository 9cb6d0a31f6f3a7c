"""What samples of text cost to read: Paceline's sources beside a memory map, torch's loaders and other libraries.

    python benchmarks/data.py [--quick] [--tokens 100000000] [--rounds 3] [--json OUT] [--save]
        [--only PACKAGE ...] [--python datasets=PATH] [--python litdata=PATH] [--python grain=PATH]
        [--python mosaicml-streaming=PATH]

Each reader reads the same tokens in a process of its own, in batches of rows with their labels (int64), in a new order
each epoch; readers take turns. A library that needs an environment of its own is given its Python: make a virtual
environment, install `benchmarks/readers/requirements/PACKAGE.txt` into it, and name its interpreter. A library that is
not there is said to be not installed. With `--only` (`none` for readers that need no package) the other readers' rows,
and the tables below, come from the file that `--json` names, so that a long run can be made in parts.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, machine
from readers import READERS, ROWS, SEED, SEQ_LEN, VOCAB
from readers.cold import cold_reads
from readers.resume import resumes

from paceline.spec.task import DataSpec
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.packing import pieces_of
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import ShardWriter
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.sources.tokens import TokenWriter

DOCUMENT_TOKENS = 2095  # on average, as in a corpus of code
MANY_SAMPLES = 10**8
BATCH, RANKS = 64, 8
BASELINE = "memory map and permutation"
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
            keys = found[name][0]
            rows[name] = {key: statistics.median(each[key] for each in found[name] if key in each) for key in keys}
            base = [each["cpu"] for each in found[BASELINE]]
            over = [each["cpu"] / cpu for each, cpu in zip(found[name], base, strict=True)]
            rows[name]["over_memory_map"] = statistics.median(over)
    return rows


def batches_of_documents(folder: Path, max_bytes: int) -> dict[str, Any]:
    """Return what batches of the built-in corpus leave empty, and how unequal ranks are, over three epochs.

    Rows of packed documents; and whole documents, cut where they are longer than a row, in buckets of about one length.
    """
    found = {}
    for seq_len in (512, 2048):
        data = DataSpec(seq_len=seq_len, rows="packed", max_bytes=max_bytes, cache_dir=str(folder))
        train, _ = open_sources(data, SEED)
        assert isinstance(train, PackedSource)
        filled = np.add.reduceat(train.rows.lengths, train.rows.firsts[:-1])
        loads = filled[ids_at(train, SEED, np.arange(3 * train.samples))]
        found[f"packed rows of {seq_len:,}"] = {"rows": train.samples, "waste": train.waste, **_skew(loads)}
        lengths = pieces_of(train.split.offsets(), seq_len)[1]
        order = BucketedOrder(lengths, BATCH, 2048 * 16)
        loads = lengths[order.ids(SEED, np.arange(3 * len(lengths)))]
        passes = loads[: len(loads) // BATCH * BATCH].reshape(-1, BATCH // RANKS)
        waste = 1 - passes.sum() / (passes.max(1) * passes.shape[1]).sum()
        found[f"documents of at most {seq_len:,} in buckets"] = {"rows": len(lengths), "waste": float(waste),
                                                                 **_skew(loads)}  # fmt: skip
    return found


def _skew(loads: np.ndarray) -> dict[str, float]:
    """Return how many tokens the fullest rank has over the mean."""
    by_rank = loads[: len(loads) // BATCH * BATCH].reshape(-1, RANKS, BATCH // RANKS).sum(2)
    skew = by_rank.max(1) / by_rank.mean(1)
    return {"skew_median": float(np.median(skew)), "skew_95": float(np.quantile(skew, 0.95)),
            "skew_max": float(skew.max())}  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH")
    parser.add_argument("--only", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in chosen.python)
    packages = {reader.package for reader in READERS.values()}
    if unknown := (set(pythons) | set(chosen.only)) - packages - {"none"}:
        parser.error(f"no reader needs {', '.join(unknown)}")
    many, max_bytes = MANY_SAMPLES, 20_000_000
    if chosen.quick:
        chosen.tokens, chosen.rounds, chosen.batches, many, max_bytes = 2_000_000, 1, 200, 10**6, 300_000
    names = [
        name for name, reader in READERS.items()
        if name == BASELINE or not chosen.only or (reader.package or "none") in chosen.only
    ]  # fmt: skip
    before = json.loads(chosen.json.read_text()) if chosen.only and chosen.json and chosen.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="data-") as folder_name:
        folder = Path(folder_name)
        write_corpus(folder, chosen.tokens)
        about = {"tokens": chosen.tokens, "rows": ROWS, "seq_len": SEQ_LEN, "resume_samples": many}
        if before and {key: before[key] for key in about} != about:
            parser.error(f"{chosen.json} is of another size")
        report = before or {
            "cold": cold_reads(folder), "resume": resumes(folder, many), "readers": {},
            "batches": batches_of_documents(folder / "cache", max_bytes),
        }  # fmt: skip
        rows = {**report["readers"], **read_by(names, folder, chosen.rounds, chosen.batches, pythons)}
        report = {
            "machine": machine(),
            **about,
            **report,
            "readers": {name: rows[name] for name in READERS if name in rows},
        }
    print(page(report))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    if chosen.save:
        (RESULTS / "data.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "data.md").write_text(page(report))


def page(report: dict[str, Any]) -> str:
    """Return the tables."""
    about = report["machine"]
    lines = [
        "# Reading samples of text", "",
        f"{about['date']} · {about['cpu']}, {about['cores']} cores · torch {about['torch']} · {report['tokens']:,}"
        f" tokens, batches of {report['rows']} rows of {report['seq_len']:,} with their labels. Neighbours: how often"
        " windows less than 8 apart meet in a batch of 64, against a uniform shuffle.", "",
        "| reader | CPU µs a row | over the memory map | first batch, ms | memory, MB | neighbours |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, row in report["readers"].items():
        if "not_measured" in row:
            lines.append(f"| {name} | {row['not_measured']} | | | | |")
            continue
        near = f"{row['near']:.2f}" if "near" in row else ""
        lines.append(
            f"| {name} | {row['cpu'] * 1e6:.1f} | {row['over_memory_map']:.2f} | {row['first'] * 1e3:.0f} |"
            f" {row['memory'] / 1e6:.0f} | {near} |"
        )
    many = f"{report['resume_samples']:,}"
    lines += ["", f"| from opening to a batch anywhere in {many} samples | median, ms | most, ms |", "|---|---:|---:|"]
    for kind, row in report["resume"].items():
        lines.append(f"| {kind} | {row['median'] * 1e3:.1f} | {row['most'] * 1e3:.1f} |")
    lines += ["", "| a cold epoch of remote shards | bytes fetched over their bytes | requests |", "|---|---:|---:|"]
    for kind, row in report["cold"].items():
        lines.append(f"| {kind} | {row['amplification']:.2f} | {row['requests']:,} |")
    lines += [
        "",
        f"Global batches of {BATCH} rows of the Python library over {RANKS} ranks: what of a rank's rows is padding,"
        " and tokens of the fullest rank over the mean.",
        "",
        "| samples | how many | empty | fullest rank: median | 95 % | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, row in report["batches"].items():
        lines.append(
            f"| {kind} | {row['rows']:,} | {row['waste']:.2%} | {row['skew_median']:.4f} | {row['skew_95']:.4f} |"
            f" {row['skew_max']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

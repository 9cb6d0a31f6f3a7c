"""What samples of text cost to read: Paceline's sources beside a memory map and torch's DataLoader.

    python benchmarks/data.py [--quick] [--tokens 100000000] [--rounds 3] [--json OUT] [--save]

Each contender reads the same tokens in a process of its own, in batches of rows with their labels (int64), in a new
order each epoch; contenders take turns. The figure is CPU time of all processes of the contender for a row: it does not
see what else the machine does. The baseline is a memory map and a permutation that numpy has drawn before. Then the
seconds from opening the source to its first batch, those of a batch anywhere in 10^8 samples, how often neighbours meet
in a batch against a uniform shuffle, and what packing leaves empty of the built-in corpus.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, machine

from paceline.run.loop.loader import BatchStream
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec
from paceline.task.data.ahead import ReadAhead
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.order.windowed import WindowedOrder
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tokens import TokenSplit, TokenWriter

VOCAB, SEQ_LEN, ROWS, SEED = 32768, 1024, 16, 7
DOCUMENT_TOKENS = 2095  # on average, as in a corpus of code
MANY_SAMPLES = 10**8
NEIGHBOURS, GROUP = 8, 64  # ids nearer than this, in batches of so many rows

Batches = Iterator[Any]


def write_tokens(folder: Path, tokens: int) -> TokenSplit:
    """Write random documents of geometric lengths."""
    random = np.random.default_rng(SEED)
    with TokenWriter(folder, "train", VOCAB, VOCAB - 1) as writer:
        while writer.tokens < tokens:
            lengths = random.geometric(1 / DOCUMENT_TOKENS, 1000)
            writer.add(np.split(random.integers(0, VOCAB - 1, lengths.sum(), dtype=np.uint16), lengths.cumsum()[:-1]))
    return writer.result()


# ---- contenders: batches of {"tokens", "labels"} of [ROWS, SEQ_LEN], without an end ---------------------------------


def memory_map(split: TokenSplit) -> Batches:
    """Windows of a memory map in an order that numpy has drawn."""
    tokens, count = split.open(), split.windows(SEQ_LEN)
    windows = np.lib.stride_tricks.as_strided(
        tokens, (count, SEQ_LEN + 1), (SEQ_LEN * tokens.itemsize, tokens.itemsize)
    )
    while True:
        order = np.random.default_rng(SEED).permutation(count)
        for at in range(0, count - ROWS + 1, ROWS):
            rows = windows[order[at : at + ROWS]]
            yield {"tokens": torch.from_numpy(rows[:, :-1].astype(np.int64)),
                   "labels": torch.from_numpy(rows[:, 1:].astype(np.int64))}  # fmt: skip


def _stream(source: Any) -> BatchStream:
    return BatchStream(source, SEED, Plan(micro_batch=ROWS, batch_samples=ROWS), 0, torch.device("cpu"))


def _read(source: Any) -> Batches:
    stream, position = _stream(source), 0
    while True:
        yield stream.at(position).micro_batches[0].data
        position += ROWS


def windows(split: TokenSplit) -> Batches:
    """Paceline's windows in its global order."""
    return _read(TokenSource(split, VOCAB, SEQ_LEN))


def windows_ahead(split: TokenSplit) -> Batches:
    """The same, each batch begun in a thread while the one before is used."""
    ahead, position = ReadAhead(_stream(TokenSource(split, VOCAB, SEQ_LEN)).at, prepare=lambda: None), 0
    while True:
        batch = ahead.take(position)
        position += ROWS
        ahead.begin(position)
        yield batch.micro_batches[0].data


def windows_of_blocks(split: TokenSplit) -> Batches:
    """Paceline's windows in its two-level order."""
    source = TokenSource(split, VOCAB, SEQ_LEN)
    source.order = WindowedOrder(source.samples, 2048, 16)  # type: ignore[attr-defined]
    return _read(source)


def packed(split: TokenSplit) -> Batches:
    """Paceline's packed rows of whole documents."""
    return _read(PackedSource(split, VOCAB, SEQ_LEN))


def shards(split: TokenSplit) -> Batches:
    """Paceline's token shards, whose checksums are held at the first touch."""
    folder = Path(split.folder).parent / "shards"
    train, _ = open_sources(DataSpec(str(folder), seq_len=SEQ_LEN, validation_fraction=0.0), SEED)
    return _read(train)


class Windows(torch.utils.data.Dataset[Any]):
    """The same windows as a data set that is read in batches."""

    def __init__(self, split: TokenSplit) -> None:
        self.source = TokenSource(split, VOCAB, SEQ_LEN)

    def __len__(self) -> int:
        return self.source.samples

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("it is read in batches")

    def __getitems__(self, indices: list[int]) -> Any:
        return self.source.read(np.array(indices))


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader(split: TokenSplit, workers: int) -> Batches:
    data = Windows(split)
    random = torch.Generator().manual_seed(SEED)
    while True:
        yield from torch.utils.data.DataLoader(
            data, ROWS, shuffle=True, num_workers=workers, collate_fn=_as_it_is, generator=random, drop_last=True
        )


def data_loader(split: TokenSplit) -> Batches:
    """torch's DataLoader in the process that trains."""
    return _loader(split, 0)


def data_loader_worker(split: TokenSplit) -> Batches:
    """torch's DataLoader with a process that reads ahead."""
    return _loader(split, 1)


CONTENDERS: dict[str, Callable[[TokenSplit], Batches]] = {
    "memory map and permutation": memory_map,
    "Paceline": windows,
    "Paceline, read ahead by a thread": windows_ahead,
    "Paceline, order of two levels": windows_of_blocks,
    "Paceline, packed rows": packed,
    "Paceline, token shards": shards,
    "torch DataLoader, batched, no worker": data_loader,
    "torch DataLoader, batched, a worker": data_loader_worker,
}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _measure(name: str, split: TokenSplit, batches: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    stream = CONTENDERS[name](split)
    batch = next(stream)
    first = time.perf_counter() - began
    assert batch["tokens"].shape == batch["labels"].shape == (ROWS, SEQ_LEN)
    for _ in range(batches // 4):  # pages and caches are warm then
        next(stream)
    before, began = _cpu_seconds(), time.perf_counter()
    for _ in range(batches):
        next(stream)
    wall, alone = time.perf_counter() - began, _cpu_seconds() - before
    if hasattr(stream, "close"):
        stream.close()  # workers end, and count
    rows = batches * ROWS
    pipe.send({"cpu": max(alone, _cpu_seconds() - before) / rows, "wall": wall / rows, "first": first})


def measured(name: str, split: TokenSplit, batches: int) -> dict[str, float]:
    """Return seconds of CPU and of the clock for a row, and to the first batch, in a fresh process."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_measure, args=(name, split, batches, theirs))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv())
    finally:
        process.join()


# ---- orders and packing --------------------------------------------------------------------------------------------


def near_pairs(ids: np.ndarray) -> float:
    """Return how many pairs of rows of a batch are neighbours, on average."""
    batches = ids[: len(ids) // GROUP * GROUP].reshape(-1, GROUP)
    distance = np.abs(batches[:, :, None] - batches[:, None, :])
    return float((distance < NEIGHBOURS).sum() - batches.size) / 2 / len(batches)


def orders(samples: int) -> dict[str, float]:
    """Return how often neighbours meet against a uniform shuffle, and seconds of a batch anywhere in 10^8 samples."""
    places = np.arange(samples)
    drawn = [near_pairs(np.random.default_rng(seed).permutation(samples)) for seed in range(3)]
    uniform = statistics.fmean(drawn)
    everywhere = statistics.fmean(near_pairs(sample_ids(seed, places, samples)) for seed in range(3))
    windowed = near_pairs(WindowedOrder(samples, 2048, 16).ids(SEED, places))
    seconds = []
    for position in np.random.default_rng(SEED).integers(0, 3 * MANY_SAMPLES, 20):
        began = time.perf_counter()
        sample_ids(SEED, position + np.arange(ROWS), MANY_SAMPLES)
        seconds.append(time.perf_counter() - began)
    return {"global": everywhere / uniform, "windowed": windowed / uniform, "resume_seconds": max(seconds)}


def packing(folder: Path, max_bytes: int) -> dict[str, Any]:
    """Return what packed rows of the built-in corpus leave empty, and how unequal the ranks of a batch are."""
    found = {}
    for seq_len in (512, 2048):
        data = DataSpec(seq_len=seq_len, rows="packed", max_bytes=max_bytes, cache_dir=str(folder))
        train, _ = open_sources(data, SEED)
        assert isinstance(train, PackedSource)
        order = ids_at(train, SEED, np.arange(train.samples))
        loads = np.add.reduceat(train.rows.lengths, train.rows.firsts[:-1])[order]
        by_rank = loads[: len(loads) // 64 * 64].reshape(-1, 8, 8).sum(2)  # a global batch of 64 over 8 ranks
        skew = by_rank.max(1) / by_rank.mean(1)
        found[str(seq_len)] = {"rows": train.samples, "waste": train.waste, "skew_median": float(np.median(skew)),
                               "skew_95": float(np.quantile(skew, 0.95)), "skew_max": float(skew.max())}  # fmt: skip
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.tokens, chosen.rounds, chosen.batches = 2_000_000, 1, 200
    with tempfile.TemporaryDirectory(prefix="data-") as name:
        folder = Path(name)
        (folder / "tokens").mkdir()
        split = write_tokens(folder / "tokens", chosen.tokens)
        _write_shards(folder, chosen.tokens)
        found: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
        for _ in range(chosen.rounds):
            for contender, results in found.items():
                results.append(measured(contender, split, chosen.batches))
        order = orders(split.windows(SEQ_LEN))
        waste = packing(folder / "cache", 300_000 if chosen.quick else 20_000_000)
    report = {"machine": machine(), "tokens": split.tokens, "rows": ROWS, "seq_len": SEQ_LEN, "orders": order,
              "packing": waste, "contenders": _rows(found)}  # fmt: skip
    print(page(report))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    if chosen.save:
        (RESULTS / "data.json").write_text(json.dumps(report, indent=1) + "\n")
        (RESULTS / "data.md").write_text(page(report))


def _write_shards(folder: Path, tokens: int) -> None:
    """Prepare shards of text with as many tokens, a byte each."""
    (folder / "text").mkdir()
    random, size = np.random.default_rng(SEED), 2**20
    for number in range(-(-tokens // size)):
        letters = random.integers(97, 123, min(size, tokens - number * size), dtype=np.uint8)
        (folder / "text" / f"{number:05d}.txt").write_bytes(letters.tobytes())
    data = DataSpec(str(folder / "text"), validation_fraction=0.0, cache_dir=str(folder / "cache"))
    prepare(data, folder / "shards")


def _rows(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    baseline = [result["cpu"] for result in found["memory map and permutation"]]
    return {
        name: {
            **{key: statistics.median(result[key] for result in results) for key in ("cpu", "wall", "first")},
            "over_memory_map": statistics.median(
                result["cpu"] / base for result, base in zip(results, baseline, strict=True)
            ),
        }
        for name, results in found.items()
    }


def page(report: dict[str, Any]) -> str:
    """Return the tables."""
    about = report["machine"]
    lines = [
        "# Reading samples of text", "",
        f"{about['date']} · {about['cpu']}, {about['cores']} cores · torch {about['torch']} · {report['tokens']:,}"
        f" tokens, batches of {report['rows']} rows of {report['seq_len']:,} with their labels", "",
        "| reader | CPU µs a row | over the memory map | first batch, ms |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for name, row in report["contenders"].items():
        lines.append(f"| {name} | {row['cpu'] * 1e6:.1f} | {row['over_memory_map']:.2f} | {row['first'] * 1e3:.0f} |")
    order = report["orders"]
    lines += [
        "", f"Neighbours in a batch of {GROUP} against a uniform shuffle: {order['global']:.2f} of the global order,"
        f" {order['windowed']:.1f} of the two-level one (16 blocks of 2,048).",
        f"The ids of a batch anywhere in three epochs of 10^8 samples: {order['resume_seconds'] * 1e3:.2f} ms at most.",
        "",
        "| packed rows of the Python library, tokens | rows | empty | tokens of the fullest of 8 ranks over the mean:"
        " median | 95 % | most |", "|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for seq_len, row in report["packing"].items():
        lines.append(
            f"| {seq_len} | {row['rows']:,} | {row['waste']:.2%} | {row['skew_median']:.4f} | {row['skew_95']:.4f} |"
            f" {row['skew_max']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

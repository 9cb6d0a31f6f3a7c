"""One reader, measured in a process of its own: `python measure.py NAME FOLDER BATCHES [NEAR]` prints a line of JSON.

CPU seconds are those of the process and of all processes below it; memory is what is theirs alone, or shared among
them, and not a file's. All readers keep the memory that they free, as ranks of a run on a CPU do. Importing a library
is not counted. With BATCHES of 0 its files are written instead. A slow reader reads fewer batches: as many as it reads
in MOST_SECONDS. Neighbours are counted where NEAR is given.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from readers import READERS, ROWS, SEQ_LEN, Batches, windows

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of glibc's mallopt: see src/paceline/run/memory/allocator.py
NAMED = 4  # tokens that name a window: 60 bits of a random corpus
MOST_NAMED = 4096  # batches whose rows are looked up
LOOK_EVERY = 64  # batches between two looks at the clock
MOST_SECONDS = 6.0  # of reading that is measured; a third as long before it


def processes() -> Iterator[int]:
    """Yield this process and all below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    found = [os.getpid()]
    while found:
        yield found[0]
        found = found[1:] + [child for child, parent in parents.items() if parent == found[0]]


def cpu_seconds() -> float:
    """Return the seconds of CPU of all of them, of those that have ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for number in processes():
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if number != os.getpid():  # this one knows it better than to a tick
            ticks += sum(map(int, fields[11:15]))  # its own, and of its children that have ended
    return time.process_time() + ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> int:
    """Return the bytes of anonymous and shared memory of all of them."""
    total = 0
    for number in processes():
        try:
            lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
    return total


def near_pairs(batches: Batches, folder: Path, distance: int, group: int) -> float:
    """Return how often neighbours meet in groups of rows against what a uniform shuffle gives; nan of other rows."""
    rows = windows(folder)
    weights = 32768 ** np.arange(NAMED)
    names = rows[:, :NAMED].astype(np.int64) @ weights
    order = np.argsort(names)
    wanted = min(MOST_NAMED, max(len(rows) // ROWS, group // ROWS))
    ids = []
    for _ in range(wanted):
        found = next(batches)["tokens"][:, :NAMED].numpy() @ weights
        places = np.minimum(np.searchsorted(names, found, sorter=order), len(rows) - 1)
        assert np.array_equal(names[order[places]], found), "a row is no window of the corpus"
        ids.append(order[places])
    groups = np.concatenate(ids)
    groups = groups[: len(groups) // group * group].reshape(-1, group)
    apart = np.abs(groups[:, :, None] - groups[:, None, :])
    pairs = ((apart < distance).sum() - groups.size) / 2 / len(groups)
    near = sum(len(rows) - step for step in range(1, distance)) * 2 / (len(rows) * (len(rows) - 1))
    return float(pairs / (group * (group - 1) / 2 * near))


def read_some(stream: Batches, most: int, seconds: float) -> int:
    """Read so many batches, or fewer where that takes longer; return how many."""
    ends = time.perf_counter() + seconds
    for number in range(most):
        next(stream)
        if number % LOOK_EVERY == LOOK_EVERY - 1 and time.perf_counter() > ends:
            return number + 1
    return most


def main() -> None:
    """Measure, or write."""
    name, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(TRIM_THRESHOLD, -1)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 32 * 2**20)
    reader = READERS[name]
    if not reader.is_there():
        print(json.dumps({"missing": reader.package}))
        return
    if not count:
        reader.load("write")(folder)
        print("{}")
        return
    read = reader.load(reader.function)
    memory = memory_bytes()
    began = time.perf_counter()
    stream = read(folder)
    batch = next(stream)
    first = time.perf_counter() - began
    assert batch["tokens"].shape == batch["labels"].shape == (ROWS, SEQ_LEN)
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1]) or not reader.of_windows
    read_some(stream, count // 4, MOST_SECONDS / 3)  # pages and caches are warm then
    before, began = cpu_seconds(), time.perf_counter()
    count = read_some(stream, count, MOST_SECONDS)
    wall, cpu = time.perf_counter() - began, cpu_seconds() - before
    result: dict[str, object] = {"cpu": cpu / count / ROWS, "wall": wall / count / ROWS, "first": first,
              "memory": memory_bytes() - memory}  # fmt: skip
    if note := reader.note():
        result["note"] = note
    if reader.of_windows and sys.argv[4:]:
        result["near"] = near_pairs(stream, folder, distance=8, group=64)
    print(json.dumps(result), flush=True)
    for process in multiprocessing.active_children():
        process.terminate()
    os._exit(0)  # no library's threads are waited for


if __name__ == "__main__":
    main()
